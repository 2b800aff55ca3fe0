"""The prefill worker's decisions, without sockets, threads or a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, get_args

import msgspec
import numpy as np
import pytest

from baton.engine.cache.paged_cache import PagedCache
from baton.engine.grammar.constraint import CompileGrammar, DropGrammar, GrammarDone
from baton.engine.scheduling.plan import Sampled, StepPlan, StepResult, abandoned_step
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduling.step_time import StepTime
from baton.kv_transfer import sender_handoff
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.sender_handoff import SenderConfig
from baton.prefill_worker import assign_core
from baton.prefill_worker.core import PrefillCore, PrefillLimits
from baton.prefill_worker.events import (
    Connect,
    DataDown,
    DataUp,
    Disconnect,
    FromPeer,
    LayersDone,
    NotPacked,
    NotSent,
    Packed,
    PackFrame,
    PeerDown,
    PeerUp,
    ToPeer,
)
from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.errors import CapacityError, InputError
from baton.proto.layout import KVLayout
from baton.proto.wire.envelope import EnvelopeDecoder
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Assign,
    Busy,
    Commit,
    Committed,
    Credit,
    DecodeToPrefill,
    DeviceTicket,
    Drained,
    GrammarSpec,
    Grant,
    GrantRef,
    HandoffReport,
    Heartbeat,
    Hello,
    Message,
    Moved,
    Open,
    Opened,
    OpenRefused,
    PeerDead,
    PeerLost,
    Ping,
    Pong,
    PoolTicket,
    Refused,
    Rejected,
    Release,
    Released,
    Reserve,
    Share,
    Terminal,
    TerminalAck,
    Tokens,
    Welcome,
)
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens
from baton.worker.events import (
    AbandonStep,
    DrainRequested,
    Exit,
    Fault,
    FromRouter,
    Log,
    RouterDown,
    RouterUp,
    RunStep,
    StepDone,
    Tick,
    ToRouter,
)
from baton.worker.membership import Membership, WorkerIdentity

from ..model_cards import model_card

M = TypeVar("M", bound=Message)

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=1, block_size=4)
CARD = model_card(max_length=200, eos_token_ids=[0], layout=LAYOUT)
KEY = b"r" * 16
SECOND = b"s" * 16
ROUTER = "router"
DECODE = "ipc:///decode-0"
BIG = 1 << 30


def make_context(prompt: int = 10, new: int | None = 8) -> WireContext:
    return WireContext(
        tokens=WireTokens(np.arange(1, prompt + 1, dtype=np.int32)),
        max_length=200,
        sampling=WireSampling(temperature=0.0, max_new_tokens=new),
        eos_token_ids=[0],
    )


def generated(commit):
    """The tokens after the prompt in the context of a commit."""
    return commit.context.tokens.array[commit.context.prompt_length :].tolist()


class Bench:
    """A core on a clock that tests move; its actions, sorted."""

    def __init__(
        self, ticket: PoolTicket | DeviceTicket | None = None, order=None, **limits
    ) -> None:
        me = WorkerIdentity("prefill-0", "prefill", 5, 1, "ipc:///p", "default", CARD, 8)
        self.member = Membership(me, (ROUTER, "router-2"))
        self.cache = PagedCache(64, LAYOUT.block_size)
        config = SchedulerConfig(max_batch=8, token_budget=16, one_token=True)
        self.scheduler = Scheduler(config, self.cache)
        self.sender = Sender(5, LAYOUT, SenderConfig(frame_bytes=256))
        times = StepTime()
        times.learn(16, 0.01)
        self.core = PrefillCore(
            self.member, self.scheduler, self.sender, PrefillLimits(**limits), times, ticket,
            order=order,
        )  # fmt: skip
        self.now = 100.0
        self.said: list[Message] = []
        self.routers: list[tuple[str, Message]] = []
        self.peers: list[tuple[str, Message]] = []
        self.plans: list[StepPlan] = []
        self.other: list[object] = []
        self.faulty = False  # the test plants exceptions in the core's code
        self.unreachable: set[str] = set()  # decode workers that answer no Ping
        self.feed(RouterUp(ROUTER))
        self.hear(Welcome(router=ROUTER, incarnation=3, key=b"k" * 16))
        self.take(Hello)

    def feed(self, event) -> None:
        pongs = []
        for action in self.core.handle(event, self.now):
            match action:
                case ToPeer(endpoint=endpoint, message=Ping(nonce=nonce)):
                    if endpoint not in self.unreachable:
                        pongs.append(FromPeer(endpoint, Pong(nonce=nonce)))
                case ToRouter(router=router, message=message):
                    self.said.append(message)
                    self.routers.append((router, message))
                case ToPeer(endpoint=endpoint, message=message):
                    self.peers.append((endpoint, message))
                case Fault(error=error) if not self.faulty:
                    raise error
                case RunStep(plan=plan):
                    self.plans.append(plan)
                case PackFrame(send=send):
                    self.other.append(action)
                    self.feed(Packed(send.key, send.frame.index, 77 + send.frame.index))
                case _:
                    self.other.append(action)
        self.core.check_integrity()
        for pong in pongs:
            self.feed(pong)

    def take(self, kind: type[M]) -> list[M]:
        """Messages of one kind to routers, taken out."""
        found = [m for m in self.said if isinstance(m, kind)]
        self.said = [m for m in self.said if not isinstance(m, kind)]
        return found

    def one(self, kind: type[M]) -> M:
        found = self.take(kind)
        assert len(found) == 1, (found, self.said)
        return found[0]

    def to_peer(self, kind: type[M]) -> list[M]:
        found = [m for _, m in self.peers if isinstance(m, kind)]
        self.peers = [(e, m) for e, m in self.peers if not isinstance(m, kind)]
        return found

    def did(self, kind: type) -> list:
        found = [a for a in self.other if isinstance(a, kind)]
        self.other = [a for a in self.other if not isinstance(a, kind)]
        return found

    def hear(self, message: Message, router: str = ROUTER) -> None:
        self.feed(FromRouter(router, message))

    def answer(self, message: Message, endpoint: str = DECODE) -> None:
        self.feed(FromPeer(endpoint, message))

    def later(self, seconds: float, step: float = 0.05) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + step)
            self.feed(Tick())

    # ------------------------------------------------------------------ the usual way

    def assign(self, attempt: int = 1, key: bytes = KEY, router: str = ROUTER, **fields) -> Assign:
        message = Assign(
            request=key,
            attempt=attempt,
            request_id="r",
            context=fields.pop("context", None) or make_context(**fields.pop("shape", {})),
            decode=fields.pop("decode", DECODE),
            deadline=fields.pop("deadline", 60.0),
            **fields,
        )
        self.hear(message, router)
        return message

    def open(self, incarnation: int = 9, endpoint: str = DECODE, transport: str = "zmq") -> None:
        self.feed(PeerUp(endpoint))
        opened = Opened(
            worker="decode-0",
            incarnation=incarnation,
            transport=transport,
            data_endpoint="ipc:///data",
        )
        self.answer(opened, endpoint)

    def grant(self, reserve: Reserve | None = None, cached: int = 0) -> GrantRef:
        if reserve is None:
            (reserve,) = self.to_peer(Reserve)
        ref = GrantRef(9, reserve.serial, 0)
        self.answer(
            Grant(
                request=reserve.request,
                attempt=reserve.attempt,
                grant=ref,
                cached_tokens=cached,
                credit=BIG,
            )
        )
        return ref

    def step(self, token: int = 42) -> None:
        plan = self.plans.pop(0)
        drawn = tuple(Sampled(c.request, token) for c in plan.chunks if c.sample is not None)
        self.feed(StepDone(StepResult(plan.step, drawn, 0.01, plan.num_tokens)))

    def commit(self) -> Commit:
        (message,) = self.to_peer(Commit)
        return message

    def committed(self, commit: Commit) -> None:
        self.answer(
            Committed(
                request=commit.request,
                attempt=commit.attempt,
                grant=commit.grant,
                bytes=commit.bytes,
                frames=commit.frames,
            )
        )

    def computing(self, **fields) -> GrantRef:
        self.assign(**fields)
        self.open()
        return self.grant()

    def handing_over(self, **fields) -> Commit:
        self.computing(**fields)
        self.step()
        return self.commit()

    def assert_empty(self) -> None:
        assert self.core.idle
        assert self.cache.pool.used == 0


@pytest.fixture
def bench() -> Bench:
    return Bench()


# ------------------------------------------------------------------ from Assign to Committed


def test_a_whole_life(bench):
    bench.assign()
    assert bench.one(Accepted).attempt == 1
    assert [a.endpoint for a in bench.did(Connect)] == [DECODE]
    bench.feed(PeerUp(DECODE))
    (opening,) = bench.to_peer(Open)
    assert opening.incarnation == 5
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    assert (reserve.num_tokens, reserve.growth) == (10, 8)
    assert not bench.plans  # nothing is computed before there is room for it
    bench.grant(reserve)
    bench.step()
    run = bench.one(Tokens).runs[0]
    assert (run.request, run.attempt, run.position, run.tokens) == (KEY, 1, 10, [42])
    commit = bench.commit()
    assert (generated(commit), commit.router) == ([42], ROUTER)
    assert commit.bytes == 3 * 2 * LAYOUT.block_bytes
    assert bench.cache.pool.used == 3  # kept until the other side owns them
    bench.committed(commit)
    report = bench.one(HandoffReport)
    assert (report.prefill, report.decode, report.blocks) == ("prefill-0", "decode-0", 3)
    bench.assert_empty()


def test_a_repeated_assign_gets_the_same_answer_in_every_state(bench):
    for advance in (lambda: None, bench.open, bench.grant, bench.step):
        advance()
        bench.assign()
        assert bench.one(Accepted).attempt == 1
    assert len(bench.to_peer(Commit)) == 1


def test_an_assign_repeated_after_the_handover_is_not_waited_for(bench):
    """Only a router that lost its memory asks: for it the attempt is over."""
    bench.committed(bench.handing_over())
    bench.take(Accepted)
    bench.assign()
    assert bench.one(Aborted).attempt == 1
    bench.assign(attempt=2)
    assert bench.one(Accepted).attempt == 2


def test_a_router_that_lost_its_memory_is_served_from_then_on(bench):
    bench.computing()
    message = bench.assign()
    bench.hear(message, "router-2")
    bench.step()
    assert bench.commit().router == "router-2"


def test_a_long_prompt_runs_in_chunks_and_passes_block_by_block(bench):
    bench.assign(shape={"prompt": 40})
    bench.open()
    bench.grant()
    sizes = []
    while bench.plans:
        sizes.append(bench.plans[0].num_tokens)
        bench.step()
    assert sizes == [16, 16, 8]
    frames = [a.send.frame for a in bench.did(PackFrame)]
    assert sum(f.block_count * f.layer_count for f in frames) == 10 * 2
    assert bench.commit().frames == len(frames)


SHARED_POOL = PoolTicket(1, 2, 4096, b"m" * 16)
DEVICE_POOL = DeviceTicket("host", b"h" * 64, 512, 4096)


@pytest.mark.parametrize(
    ("ticket", "offered"),
    [(SHARED_POOL, ["shm", "zmq"]), (DEVICE_POOL, ["cuda_ipc", "zmq"]), (None, ["zmq"])],
)
def test_blocks_are_named_to_who_maps_the_pool_and_sent_to_who_does_not(
    ticket, offered, monkeypatch
):
    monkeypatch.setattr(sender_handoff, "MIN_FRAME_BYTES", 1)  # or there were nothing to cut here
    counts = {}
    for transport in offered:
        bench = Bench(ticket=ticket)
        bench.assign()
        bench.feed(PeerUp(DECODE))
        (opening,) = bench.to_peer(Open)
        assert opening.transports == offered
        assert opening.pool == (ticket if ticket is SHARED_POOL else None)
        assert opening.device_pool == (ticket if ticket is DEVICE_POOL else None)
        bench.open(transport=transport)
        bench.grant()
        bench.step()
        assert {a.shared for a in bench.did(PackFrame)} == {transport != "zmq"}
        counts[transport] = bench.commit().frames
    assert all(counts[transport] < counts["zmq"] for transport in offered[:-1])


def test_a_frame_that_cannot_be_packed_fails_its_handoff():
    bench = Bench(ticket=DEVICE_POOL)
    bench.assign()
    bench.open(transport="cuda_ipc")
    bench.grant()
    (key,) = bench.sender._live
    bench.feed(NotPacked(key))
    assert bench.to_peer(Release)
    bench.feed(NotPacked(key))  # of another frame
    assert not bench.to_peer(Release)


def test_what_the_decode_worker_has_cached_is_not_sent(bench):
    bench.assign()
    bench.open()
    bench.grant(cached=8)
    bench.step()
    assert bench.commit().bytes == 1 * 2 * LAYOUT.block_bytes


def test_layers_pass_while_the_step_runs():
    bench = Bench(stream_tokens=8)
    bench.assign(shape={"prompt": 12})
    bench.open()
    bench.grant()
    (plan,) = bench.plans
    assert plan.chunks[0].stream_layers
    bench.feed(LayersDone(plan.chunks[0].request, 1))
    frames = [a.send.frame for a in bench.did(PackFrame)]
    assert {(f.layer_start, f.layer_count) for f in frames} == {(0, 1)}
    bench.step()
    frames += [a.send.frame for a in bench.did(PackFrame)]
    assert sum(f.block_count * f.layer_count for f in frames) == 3 * 2


def test_a_commit_has_the_limit_of_steps_of_its_assign(bench):
    assert bench.handing_over(step_limit=0.04).step_limit == 0.04


def test_frames_asked_for_again_are_packed_again(bench):
    commit = bench.handing_over()
    first = bench.did(PackFrame)
    bench.answer(
        Refused(
            request=KEY,
            attempt=1,
            grant=commit.grant,
            code="frames_missing",
            frames=[0],
            credit=BIG,
            round=1,
        )
    )
    (again,) = bench.did(PackFrame)
    assert again.send.frame == first[0].send.frame
    assert bench.commit().digest == commit.digest
    assert bench.cache.pool.used


def test_the_report_says_how_long_each_step_took(bench):
    bench.assign()
    bench.later(1.0)
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    bench.later(0.25)
    bench.grant(reserve)
    bench.later(0.5)
    bench.step()
    commit = bench.commit()
    bench.later(0.125)
    bench.committed(commit)
    times = bench.one(HandoffReport).times
    assert times.granted - times.started == pytest.approx(0.25, abs=0.1)
    assert times.granted <= times.computing
    assert times.computed - times.granted >= 0.5
    assert times.computed <= times.sending <= times.ended
    assert times.refusals == 0


# ------------------------------------------------------------------ ends without a handover


def test_a_first_token_that_ends_the_request_needs_no_decode_worker(bench):
    ref = bench.computing()
    bench.step(token=0)
    assert bench.one(Tokens).runs[0].tokens == [0]
    terminal = bench.one(Terminal)
    assert (terminal.status, terminal.position) == ("end_of_sequence", 11)
    assert terminal.times.started <= terminal.times.computed <= terminal.times.ended
    assert terminal.times.sending is None
    (release,) = bench.to_peer(Release)
    assert release.grant == ref
    assert not bench.to_peer(Commit)
    assert bench.cache.pool.used == 0
    bench.answer(Released(request=KEY, attempt=1))
    bench.hear(TerminalAck(requests=[(KEY, 1)]))
    bench.assert_empty()


def test_one_token_asked_for_ends_with_it(bench):
    bench.computing(shape={"new": 1})
    bench.step()
    assert bench.one(Terminal).status == "maximum_length"


def test_the_terminal_is_repeated_until_the_router_has_it(bench):
    bench.computing(shape={"new": 1})
    bench.step()
    bench.take(Terminal)
    bench.later(1.6)
    assert len(bench.take(Terminal)) == 3
    bench.hear(TerminalAck(requests=[(KEY, 1)]))
    bench.later(2.0)
    assert not bench.take(Terminal)


@pytest.mark.parametrize(
    ("emitted", "status"), [([5, 0], "end_of_sequence"), ([5] * 8, "maximum_length")]
)
def test_a_replay_whose_tokens_end_it_already_is_answered_at_once(bench, emitted, status):
    bench.assign(emitted=emitted)
    terminal = bench.one(Terminal)
    assert (terminal.status, terminal.position) == (status, 10 + len(emitted))
    assert not bench.to_peer(Reserve)
    bench.assert_empty()


def test_a_replay_goes_on_behind_what_was_streamed(bench):
    bench.assign(attempt=2, emitted=[50, 51])
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    assert (reserve.num_tokens, reserve.growth) == (12, 6)
    bench.grant(reserve)
    bench.step()
    run = bench.one(Tokens).runs[0]
    assert (run.attempt, run.position) == (2, 12)
    assert generated(bench.commit()) == [50, 51, 42]


def test_a_context_that_cannot_run_is_accepted_and_ended(bench):
    bench.assign(context=WireContext(tokens=WireTokens(np.empty(0, np.int32)), max_length=5))
    assert bench.one(Accepted)
    assert bench.one(Terminal).code
    bench.assert_empty()


def test_the_deadline_ends_a_request_in_the_queue(bench):
    bench.assign(deadline=1.0)
    bench.later(0.9)
    assert not bench.take(Terminal)
    bench.later(0.2)
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.position) == ("deadline_exceeded", 10)
    bench.assert_empty()


@pytest.mark.parametrize("steps", [0, 1])
def test_the_deadline_ends_a_request_that_runs_and_gives_its_grant_back(bench, steps):
    bench.computing(deadline=1.0)
    for _ in range(steps):
        bench.step()
    bench.later(1.1)
    assert bench.one(Terminal).code == "deadline_exceeded"
    assert bench.to_peer(Release)
    while bench.plans:
        bench.step()
    assert bench.cache.pool.used == 0


# ------------------------------------------------------------------ Abort in every state

STATES: dict[str, Callable[[Bench], object]] = {
    "queued": lambda bench: bench.assign(),
    "reserving": lambda bench: (bench.assign(), bench.open()),
    "computing": lambda bench: bench.computing(),
    "handing over": lambda bench: bench.handing_over(),
}


@pytest.mark.parametrize("state", STATES)
def test_abort(bench, state):
    STATES[state](bench)
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.one(Aborted).attempt == 1
    released = bench.to_peer(Release)
    assert len(released) == (state != "queued")
    while bench.plans:
        bench.step()
    assert bench.cache.pool.used == 0
    bench.take(Tokens)
    bench.answer(Released(request=KEY, attempt=1))
    bench.assert_empty()
    bench.later(1.0)
    assert not bench.take(Tokens) + bench.take(Terminal)


def test_an_abort_frees_after_the_step_that_runs_at_the_latest(bench):
    bench.computing()
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.cache.pool.used  # the engine writes to them
    bench.step()
    assert bench.cache.pool.used == 0


def test_a_step_whose_requests_have_all_left_is_abandoned(bench):
    bench.computing()
    (plan,) = bench.plans
    bench.assign(key=SECOND)
    bench.hear(Abort(request=SECOND, attempt=1))
    assert not bench.did(AbandonStep)  # it is not in that step
    bench.hear(Abort(request=KEY, attempt=1))
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.did(AbandonStep) == [AbandonStep(plan.step)]
    known = bench.core._steps._times.predict(plan.num_tokens)
    bench.plans.clear()
    bench.feed(StepDone(abandoned_step(plan, 1e-6)))
    assert bench.cache.pool.used == 0
    assert not bench.take(Tokens) + bench.take(Terminal)
    assert bench.core._steps._times.predict(plan.num_tokens) == known


def test_a_step_that_somebody_waits_for_goes_on(bench):
    bench.assign(shape={"prompt": 20})
    bench.assign(key=SECOND)
    bench.open()
    for reserve in bench.to_peer(Reserve):
        bench.grant(reserve)
    bench.step()
    assert len(bench.plans[0].chunks) == 2
    bench.hear(Abort(request=KEY, attempt=1))
    assert not bench.did(AbandonStep)
    bench.hear(Abort(request=SECOND, attempt=1))
    assert bench.did(AbandonStep) == [AbandonStep(bench.plans[0].step)]


def test_an_assign_behind_its_abort_is_refused(bench):
    bench.hear(Abort(request=KEY, attempt=2))
    bench.take(Aborted)
    for attempt in (1, 2):
        bench.assign(attempt=attempt)
        assert bench.one(Aborted).attempt == attempt
    bench.assign(attempt=3)
    assert bench.one(Accepted).attempt == 3


def test_an_abort_of_a_lower_attempt_leaves_the_higher_alone(bench):
    bench.assign(attempt=2)
    bench.hear(Abort(request=KEY, attempt=1))
    bench.open()
    assert bench.to_peer(Reserve)


def test_a_higher_attempt_takes_the_place_of_the_lower(bench):
    bench.computing()
    bench.assign(attempt=2)
    assert bench.to_peer(Release)
    bench.step()
    (reserve,) = bench.to_peer(Reserve)
    assert reserve.attempt == 2
    assert not bench.take(Tokens)


def test_a_terminal_is_forgotten_with_its_abort(bench):
    bench.computing(shape={"new": 1})
    bench.step()
    bench.hear(Abort(request=KEY, attempt=1))
    bench.take(Terminal)
    bench.later(2.0)
    assert not bench.take(Terminal)


# ------------------------------------------------------------------ a decode side without room


def busy(bench: Bench, reserve: Reserve) -> None:
    bench.answer(Busy(request=reserve.request, attempt=reserve.attempt, retry_after=0.1))


def test_busy_frees_the_slot_and_is_tried_again_later():
    bench = Bench(max_active=1)
    bench.assign()
    bench.assign(key=b"s" * 16)
    bench.open()
    (first,) = bench.to_peer(Reserve)
    busy(bench, first)
    (second,) = bench.to_peer(Reserve)  # the slot is free for the next at once
    assert second.request == b"s" * 16
    bench.answer(Busy(request=second.request, attempt=1, retry_after=0.1))
    bench.later(0.09)
    assert not bench.to_peer(Reserve)
    bench.later(0.1)
    (again,) = bench.to_peer(Reserve)
    assert again.serial > second.serial


def test_after_a_few_refusals_the_router_chooses_again():
    bench = Bench(max_reserve_tries=2)
    bench.assign()
    bench.open()
    for _ in range(2):
        (reserve,) = bench.to_peer(Reserve)
        busy(bench, reserve)
        bench.later(0.15)
    given = bench.take(Busy)
    assert given and given[0].decode_full
    bench.assert_empty()


def test_what_is_given_back_is_said_until_the_router_acts():
    bench = Bench(max_reserve_tries=1)
    bench.assign()
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    busy(bench, reserve)
    bench.take(Busy)
    bench.later(1.6)
    assert len(bench.take(Busy)) == 3
    bench.hear(Abort(request=KEY, attempt=1))
    bench.later(2.0)
    assert not bench.take(Busy)


def test_what_is_given_back_is_not_said_beyond_the_deadline():
    bench = Bench(max_reserve_tries=1)
    bench.assign(deadline=2.0)
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    busy(bench, reserve)
    bench.later(3.0)
    bench.take(Busy)
    bench.later(3.0)
    assert not bench.take(Busy)
    assert bench.member.unacknowledged == 0


def test_a_full_queue_is_busy():
    bench = Bench(max_queue=1)
    bench.assign()
    bench.assign(key=b"s" * 16)
    answer = bench.one(Busy)
    assert (answer.request, answer.decode_full) == (b"s" * 16, False)


def test_no_more_than_max_active_hold_blocks_there():
    bench = Bench(max_active=2)
    for number in range(5):
        bench.assign(key=bytes([number]) * 16)
    bench.open()
    assert len(bench.to_peer(Reserve)) == 2


# ------------------------------------------------------------------ links


def test_another_model_there_gives_the_request_back(bench):
    bench.assign()
    bench.feed(PeerUp(DECODE))
    bench.answer(OpenRefused(field="fingerprint", ours="a", theirs="b"))
    bench.feed(Tick())
    assert "fingerprint" in bench.one(PeerLost).reason
    assert bench.one(Busy).decode_full
    bench.assert_empty()


def test_who_was_refused_may_be_followed_by_one_that_fits(bench):
    bench.assign()
    bench.feed(PeerUp(DECODE))
    bench.answer(OpenRefused(field="fingerprint", ours="a", theirs="b"))
    bench.feed(PeerDown(DECODE))
    bench.assign(attempt=2)
    bench.open()
    assert bench.to_peer(Reserve)[0].attempt == 2


def test_open_is_repeated_until_answered(bench):
    bench.assign()
    bench.feed(PeerUp(DECODE))
    bench.to_peer(Open)
    bench.later(1.1)
    assert len(bench.to_peer(Open)) == 2
    bench.open()
    bench.to_peer(Open)
    bench.later(2.0)
    assert not bench.to_peer(Open)


def test_a_decode_worker_that_never_answers_is_reported(bench):
    bench.assign()
    bench.later(4.0)
    (lost, *_) = bench.take(PeerLost)
    assert (lost.endpoint, lost.attempt) == (DECODE, 1)
    assert bench.take(Busy)[0].decode_full
    bench.assert_empty()


def test_a_broken_connection_alone_loses_nothing(bench):
    commit = bench.handing_over()
    bench.feed(PeerDown(DECODE))
    bench.later(0.5)
    bench.open()
    bench.to_peer(Commit)
    bench.later(1.0)
    assert bench.to_peer(Commit)  # repeated until answered
    bench.committed(commit)
    bench.assert_empty()


def test_a_decode_worker_that_was_restarted_holds_nothing(bench):
    bench.handing_over()
    bench.feed(PeerDown(DECODE))
    bench.open(incarnation=10)
    (lost,) = bench.take(PeerLost)
    assert lost.attempt == 1
    assert not bench.to_peer(Release)
    bench.assert_empty()


def test_a_dead_decode_worker_gives_its_requests_back(bench):
    bench.handing_over()
    bench.hear(PeerDead(incarnation=9, endpoint=DECODE))
    assert bench.one(PeerLost).endpoint == DECODE
    assert bench.one(Busy).attempt == 1
    assert [a.endpoint for a in bench.did(Disconnect)] == [DECODE]
    bench.assert_empty()
    bench.hear(PeerDead(incarnation=9, endpoint=DECODE))
    assert not bench.take(PeerLost)


def test_a_grant_nobody_waits_for_is_given_back(bench):
    bench.assign()
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    bench.hear(PeerDead(incarnation=9, endpoint=DECODE))
    bench.grant(reserve)
    (release,) = bench.to_peer(Release)
    assert release.grant == GrantRef(9, reserve.serial, 0)


# ------------------------------------------------------------------ the router


def test_adopt_repeats_the_tokens_and_moves_the_request(bench):
    bench.handing_over()
    bench.take(Tokens)
    bench.routers.clear()
    bench.hear(Adopt(request=KEY, position=10), "router-2")
    said = [(r, type(m)) for r, m in bench.routers]
    assert said == [("router-2", Accepted), (ROUTER, Moved), ("router-2", Tokens)]
    assert bench.one(Tokens).runs[0].tokens == [42]


def test_an_abort_of_the_router_it_was_taken_from_frees_nothing(bench):
    bench.assign()
    bench.hear(Adopt(request=KEY, position=10), "router-2")
    bench.routers.clear()
    bench.hear(Abort(request=KEY, attempt=1))
    assert [(r, type(m)) for r, m in bench.routers] == [(ROUTER, Moved), (ROUTER, Aborted)]
    assert bench.core.load().requests_waiting == 1
    bench.hear(Abort(request=KEY, attempt=1), "router-2")
    assert bench.core.load().requests_waiting == 0


def test_a_higher_attempt_of_another_router_is_told_to_the_one_before(bench):
    bench.assign()
    bench.routers.clear()
    bench.assign(attempt=1025, router="router-2")
    assert bench.routers[0] == (ROUTER, Moved(request=KEY, router="router-2"))
    assert bench.core.load().requests_waiting == 1


def test_heartbeats_say_what_each_router_has_here(bench):
    bench.assign()
    bench.assign(key=b"2" * 16, router="router-2")
    tokens = len(make_context().tokens)
    assert bench.core.load().shares == {
        ROUTER: Share(1, tokens),
        "router-2": Share(1, tokens),
    }


def test_adopt_of_a_request_without_tokens_says_that_it_is_here(bench):
    bench.assign()
    bench.hear(Adopt(request=KEY, position=10))
    run = bench.one(Tokens).runs[0]
    assert (run.position, run.tokens) == (10, [])


def test_adopt_of_an_ended_request_repeats_tokens_and_terminal(bench):
    bench.computing(shape={"new": 1})
    bench.step()
    bench.said.clear()
    bench.hear(Adopt(request=KEY, position=10))
    assert [type(m) for m in bench.said] == [Accepted, Tokens, Terminal]


@pytest.mark.parametrize("new", [8, 1])
def test_adopt_says_the_log_probability_again(bench, new):
    bench.computing(shape={"new": new})
    plan, entry = bench.plans.pop(0), TokenLogProbs.of(-0.5, {42: -0.5})
    drawn = tuple(Sampled(c.request, 42, logprobs=entry) for c in plan.chunks)
    bench.feed(StepDone(StepResult(plan.step, drawn, 0.01, plan.num_tokens)))
    bench.take(Tokens)
    bench.hear(Adopt(request=KEY, position=10))
    (run,) = bench.one(Tokens).runs
    assert (run.tokens, run.logprobs) == ([42], [entry])


def test_adopt_of_an_unknown_request_is_answered(bench):
    bench.hear(Adopt(request=KEY, position=10))
    assert bench.one(Aborted).attempt == 0


def test_a_proof_stays_with_its_request(bench):
    """Proofs were in a table of 65,536 entries, the oldest evicted first."""
    bench = Bench(max_queue=1)
    sent = bench.assign(proof=b"long")
    for number in range(70_000):  # the queue is full: each is returned
        other = msgspec.structs.replace(sent, request=number.to_bytes(16, "big"), proof=b"short")
        bench.core.handle(FromRouter(ROUTER, other), bench.now)
    bench.feed(RouterUp("router-2"))
    (held,) = bench.take(Hello)[-1].requests
    assert (held.request, held.proof) == (KEY, b"long")
    bench.hear(Adopt(request=KEY, position=0))
    assert bench.take(Accepted)[-1].proof == b"long"


def test_forgotten_attempts_are_counted(bench, monkeypatch):
    monkeypatch.setattr(assign_core, "ATTEMPTS_KEPT", 3)
    bench = Bench()
    for number in range(5):
        bench.hear(Abort(request=number.to_bytes(16, "big"), attempt=1))
    bench.later(1.0)
    assert bench.take(Heartbeat)[-1].dropped == {"attempt_forgotten": 2}


def test_hello_lists_what_is_here_and_what_ended(bench):
    bench.assign(key=b"a" * 16)
    bench.open()
    bench.grant()
    bench.step(token=0)
    bench.assign(key=b"b" * 16)
    bench.feed(RouterUp(ROUTER))
    listed = {(r.request[:1], r.done, r.router) for r in bench.one(Hello).requests}
    assert listed == {(b"a", True, ROUTER), (b"b", False, ROUTER)}


def test_a_router_without_memory_gets_a_hello_but_not_for_every_word(bench):
    for _ in range(5):
        bench.hear(Rejected(code="endpoint_unknown", message="say Hello first"))
    assert len(bench.take(Hello)) == 1
    bench.now += 1.0
    bench.hear(Rejected(code="endpoint_unknown", message="say Hello first"))
    assert len(bench.take(Hello)) == 1


@pytest.mark.parametrize(("code", "restart"), [("endpoint_dead", True), ("model_mismatch", False)])
def test_a_final_rejection_ends_the_process(bench, code, restart):
    bench.hear(Rejected(code=code, message="no"))
    if not restart:
        assert not bench.did(Exit)  # another router may take it
        bench.hear(Rejected(code=code, message="no"), "router-2")
    (action,) = bench.did(Exit)
    assert action.restart is restart


def test_only_a_router_can_declare_a_prefill_worker_dead(bench):
    """A decode worker that refuses it fails as its peer, and ends nothing else."""
    bench.assign()
    bench.open()
    bench.answer(Rejected(code="endpoint_dead", message="finally dead"))
    assert not bench.did(Exit)
    lost = bench.one(PeerLost)
    assert (lost.request, lost.reason, lost.refused) == (KEY, "finally dead", False)


def test_a_draining_worker_that_was_declared_dead_ends_and_does_not_return(bench):
    """A new incarnation would take work again, and SIGTERM comes only once."""
    bench.feed(RouterUp("router-2"))
    bench.hear(Welcome(router="router-2", incarnation=4), "router-2")
    bench.assign()
    bench.assign(key=SECOND, router="router-2")
    bench.open()
    bench.feed(DrainRequested())
    bench.hear(Rejected(code="endpoint_dead", message="declared dead"))
    bench.later(6.0)
    assert not bench.did(Exit)
    assert [held.router for held in bench.core._held()] == ["router-2"]
    bench.hear(Abort(request=SECOND, attempt=1), "router-2")
    for release in bench.to_peer(Release):
        bench.answer(Released(request=release.request, attempt=release.attempt))
    assert bench.core.is_drained


def test_pings_are_answered(bench):
    bench.hear(Ping(nonce=3))
    assert bench.one(Pong).nonce == 3
    bench.answer(Ping(nonce=4))
    assert bench.to_peer(Pong)[0].nonce == 4


def test_heartbeats_tell_progress_and_whether_the_engine_works(bench):
    bench.computing()
    bench.later(0.25)
    beat = bench.take(Heartbeat)[-1]
    assert beat.busy and beat.progress == 0 and beat.step_s > 0
    bench.step()
    bench.later(0.25)
    beat = bench.take(Heartbeat)[-1]
    assert not beat.busy and beat.progress == 1


# ------------------------------------------------------------------ drain


def test_a_draining_worker_finishes_what_it_has_and_takes_no_more(bench):
    commit = bench.handing_over()
    bench.feed(DrainRequested())
    bench.assign(key=b"s" * 16)
    assert bench.one(Busy).reason == "draining"
    assert not bench.take(Drained)
    bench.committed(commit)
    assert [m.worker for m in bench.take(Drained)] == ["prefill-0"] * 2  # both routers
    assert bench.core.is_drained


def test_a_draining_worker_waits_until_its_terminals_are_heard(bench):
    bench.computing(shape={"new": 1})
    bench.feed(DrainRequested())
    bench.step()
    bench.answer(Released(request=KEY, attempt=1))
    assert not bench.core.is_drained
    bench.hear(TerminalAck(requests=[(KEY, 1)]))
    assert bench.core.is_drained


def test_what_belongs_to_a_router_that_is_gone_for_good_is_freed_at_last(bench):
    bench.handing_over(deadline=600.0)
    bench.feed(RouterDown(ROUTER))
    bench.later(59.0)
    assert bench.core._held()
    bench.later(2.0)
    assert not bench.core._held() and not bench.take(Aborted)
    assert bench.to_peer(Release), "the grant goes back too"


def test_tables_forget(bench):
    bench.committed(bench.handing_over())
    bench.hear(Abort(request=b"x" * 16, attempt=1))
    assert bench.core.remembered
    bench.now += 1000.0
    bench.feed(Tick())
    assert bench.core.remembered == 0


def test_what_a_decode_worker_refuses_to_hear_is_noted(bench):
    bench.assign()
    bench.feed(PeerUp(DECODE))
    bench.did(Log)
    bench.answer(Rejected(code="decode_failed", message="what"))
    (line,) = bench.did(Log)
    assert line.event == "peer.rejected"
    assert line.fields["code"] == "decode_failed"


def test_a_decode_worker_of_another_version_is_given_up_at_once(bench):
    bench.assign()
    bench.feed(PeerUp(DECODE))
    bench.answer(Rejected(code="version_mismatch", message="version 4, not 2"))
    lost = bench.one(PeerLost)
    assert (lost.endpoint, lost.reason) == (DECODE, "version 4, not 2")
    assert bench.one(Busy).decode_full


def test_a_request_whose_commit_no_envelope_can_carry_ends(bench):
    commit = bench.handing_over()
    bench.feed(NotSent(DECODE, commit, "Commit cannot be sent: too large"))
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.message) == (
        "limit_exceeded", "Commit cannot be sent: too large",
    )  # fmt: skip
    (release,) = bench.to_peer(Release)
    assert release.grant == commit.grant
    bench.feed(NotSent(DECODE, Ping(), "odd"))


# ------------------------------------------------------------------ nothing passes between the two


def first(found: list[M]) -> M:
    """A returned request is reported until the router acts on it."""
    assert all(message == found[0] for message in found)
    return found[0]


def hand_over(bench, state: str) -> None:
    """Bring a handoff into one of its states."""
    bench.assign()
    if state == "connecting":
        return
    bench.feed(PeerUp(DECODE))
    if state == "opening":
        return
    bench.open()
    if state == "reserving":
        return
    ref = bench.grant()
    if state == "granted":
        return
    if state == "sending":  # without credit for all of its frames
        bench.sender._of(DECODE, ref).credit = 0
    bench.step()
    assert bool(bench.to_peer(Commit)) == (state == "committing")


HANDOFFS = ["connecting", "opening", "reserving", "granted", "sending", "committing"]


@pytest.mark.parametrize("state", HANDOFFS)
def test_a_decode_worker_that_answers_nothing_is_given_up_in_every_state(bench, state):
    hand_over(bench, state)
    bench.unreachable.add(DECODE)
    bench.later(2.9)
    assert not bench.take(PeerLost)
    bench.later(0.7)  # it is asked twice a second
    lost = first(bench.take(PeerLost))
    assert (lost.endpoint, lost.request) == (DECODE, KEY)
    assert first(bench.take(Busy)).decode_full
    while bench.plans:
        bench.step()
    bench.assert_empty()
    bench.later(0.6)
    bench.take(PeerLost)
    bench.assign(key=SECOND)
    assert bench.one(PeerLost).request == SECOND, "the next one need not wait for that"


@pytest.mark.parametrize("state", HANDOFFS[2:])
def test_a_decode_worker_that_sends_and_hears_nothing_is_given_up(bench, state):
    """Packets pass from it to here only: its own questions and news arrive as ever."""
    hand_over(bench, state)
    bench.unreachable.add(DECODE)
    for _ in range(36):
        bench.answer(Ping())
        bench.answer(Credit(grant=GrantRef(9, 1, 0), credit=0))
        bench.later(0.1)
    assert first(bench.take(PeerLost)).endpoint == DECODE


def test_a_flapping_connection_does_not_prolong_the_wait(bench):
    hand_over(bench, "committing")
    for _ in range(7):
        bench.feed(PeerDown(DECODE))
        bench.later(0.25)
        bench.feed(PeerUp(DECODE))
        bench.later(0.25)
    assert first(bench.take(PeerLost)).endpoint == DECODE


def test_a_decode_worker_with_a_long_queue_is_waited_for_while_it_answers(bench):
    hand_over(bench, "committing")
    bench.later(30.0)
    assert not bench.take(PeerLost)


def test_the_time_this_worker_was_stopped_does_not_count(bench):
    hand_over(bench, "committing")
    bench.unreachable.add(DECODE)
    bench.later(0.6)
    bench.unreachable.clear()  # the answers arrived meanwhile and are read after the tick
    bench.now += 10.0
    bench.feed(Tick())
    bench.later(0.6)
    assert not bench.take(PeerLost)


def test_a_healed_path_is_used_again(bench):
    hand_over(bench, "reserving")
    bench.unreachable.add(DECODE)
    bench.later(4.0)
    bench.take(PeerLost)
    bench.unreachable.clear()
    bench.later(0.6)
    bench.to_peer(Reserve)
    bench.assign(attempt=2)
    assert bench.to_peer(Reserve)


def test_a_lost_link_is_closed_when_nobody_has_wanted_it_for_a_minute(bench):
    hand_over(bench, "reserving")
    bench.unreachable.add(DECODE)
    bench.later(62.0)
    assert not bench.did(Disconnect)
    bench.later(2.0)
    assert [a.endpoint for a in bench.did(Disconnect)] == [DECODE]


def test_frames_that_never_arrive_end_the_handoff(bench):
    """The decode worker answers all the while: only its data connection passes nothing."""
    hand_over(bench, "granted")
    bench.step()
    for number in range(1, 8):
        (commit, *_) = bench.to_peer(Commit)
        bench.to_peer(Commit)
        bench.later(0.5)
        refused = Refused(
            request=KEY, attempt=1, grant=commit.grant, code="frames_missing",
            frames=list(range(commit.frames)), credit=BIG + number * commit.bytes,
            counted=BIG, arrived=0, round=number,
        )  # fmt: skip
        bench.answer(refused)
        if number * 0.5 < 3.0:
            assert not bench.take(PeerLost)
    assert "no KV frame" in first(bench.take(PeerLost)).reason


# ------------------------------------------------------------------ KV frames that cannot go


def test_without_a_data_connection_the_router_chooses_another(bench):
    bench.assign()
    bench.open()
    bench.feed(DataDown(DECODE))
    ref = bench.grant()
    bench.step()
    bench.later(2.9)
    assert not bench.take(PeerLost)
    bench.later(0.3)
    assert bench.one(PeerLost).endpoint == DECODE
    assert bench.one(Busy).decode_full
    (release,) = bench.to_peer(Release)  # it receives messages, so its blocks need not wait
    assert release.grant == ref
    bench.assert_empty()


def test_a_job_for_a_worker_without_a_data_connection_goes_back_at_once(bench):
    bench.assign(key=b"o" * 16, decode="ipc:///decode-1")
    bench.open(endpoint="ipc:///decode-1")
    bench.feed(DataDown("ipc:///decode-1"))
    bench.later(3.1)
    bench.take(PeerLost)
    bench.peers.clear()
    bench.assign(decode="ipc:///decode-1")
    assert bench.one(PeerLost).request == KEY
    bench.feed(DataUp("ipc:///decode-1"))
    bench.assign(attempt=2, decode="ipc:///decode-1")
    assert bench.to_peer(Reserve)


def test_blocks_are_asked_for_once_both_connections_stand(bench):
    bench.computing()
    bench.feed(DataDown(DECODE))
    bench.assign(key=b"o" * 16)
    assert not bench.to_peer(Reserve)
    bench.feed(DataUp(DECODE))
    (reserve,) = bench.to_peer(Reserve)
    assert reserve.request == b"o" * 16
    bench.later(4.0)
    assert not bench.take(PeerLost)


def opened(**fields) -> Opened:
    return Opened(
        worker="decode-0", incarnation=9, transport="zmq", data_endpoint="ipc:///data", **fields
    )


def test_frames_keep_the_receivers_limit(bench):
    block = LAYOUT.block_bytes
    bench.assign(shape={"prompt": 30})
    bench.feed(PeerUp(DECODE))
    bench.answer(opened(max_frame_bytes=2 * block))
    bench.grant()
    bench.step()
    bench.step()
    frames = [a.send.frame for a in bench.did(PackFrame)]
    assert sum(frame.nbytes for frame in frames) == 8 * LAYOUT.num_layers * block
    assert max(frame.nbytes for frame in frames) == 2 * block < 256


def test_who_takes_no_whole_block_is_refused(bench):
    bench.assign()
    bench.feed(PeerUp(DECODE))
    bench.answer(opened(max_frame_bytes=LAYOUT.block_bytes - 1))
    assert "max_frame_bytes" in bench.one(PeerLost).reason
    assert not bench.to_peer(Reserve)


def test_a_new_connection_hears_what_waits_for_an_answer(bench):
    """Its name is new: who would answer the old one has to learn it."""
    ref = bench.computing()
    bench.feed(PeerDown(DECODE))
    bench.feed(PeerUp(DECODE))
    assert not bench.to_peer(Reserve)
    bench.answer(opened())
    (reserve,) = bench.to_peer(Reserve)
    assert (reserve.serial, reserve.request) == (ref.slot, KEY)
    bench.step()
    bench.commit()
    bench.feed(PeerDown(DECODE))
    bench.feed(PeerUp(DECODE))
    bench.answer(opened())
    bench.committed(bench.commit())
    bench.assert_empty()


# ------------------------------------------------------------------ grammars


class Digits:
    """A grammar of tokens, and the tokens it was shown."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def consume_token(self, token: int) -> bool:
        self.seen.append(token)
        return token < 50

    def allowed(self) -> np.ndarray:
        return np.arange(100) < 50


def structured(**shape) -> WireContext:
    return msgspec.structs.replace(make_context(**shape), json_schema='{"type":"integer"}')


def test_a_grammar_is_compiled_before_a_slot_is_taken(bench):
    bench.open()
    bench.assign(context=structured())
    assert bench.one(Accepted).attempt == 1
    (wanted,) = bench.did(CompileGrammar)
    assert wanted.key == (KEY, 1)
    assert (wanted.task.schema, wanted.task.eos) == ('{"type":"integer"}', frozenset({0}))
    bench.later(1.0)
    assert not bench.to_peer(Reserve)
    matcher = Digits()
    bench.feed(GrammarDone(wanted.key, matcher))
    bench.open()
    bench.grant()
    assert bench.plans[0].chunks[0].sample.mask is matcher
    bench.step()
    assert matcher.seen == [42]
    bench.committed(bench.commit())
    bench.assert_empty()


def test_nobody_waits_for_anothers_grammar():
    bench = Bench(max_active=1)
    bench.assign(context=structured())
    bench.assign(key=b"s" * 16)
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    assert reserve.request == b"s" * 16
    bench.grant(reserve)
    bench.feed(GrammarDone((KEY, 1), Digits()))
    bench.step()
    bench.committed(bench.commit())
    (reserve,) = bench.to_peer(Reserve)
    assert reserve.request == KEY


def test_a_bad_schema_ends_its_request_alone(bench):
    bench.assign(context=structured())
    bench.assign(key=b"s" * 16)
    bench.feed(GrammarDone((KEY, 1), InputError("json_schema: not like this")))
    terminal = bench.one(Terminal)
    assert (terminal.request, terminal.code) == (KEY, "input")
    assert "not like this" in terminal.message
    assert terminal.position == 10
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    assert reserve.request == b"s" * 16


def test_no_memory_for_a_schema_now_says_when_to_come_back(bench):
    bench.assign(context=structured())
    bench.feed(GrammarDone((KEY, 1), CapacityError("schemas take it all", retry_after=1.5)))
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.retry_after) == ("overloaded", 1.5)


def test_an_abort_while_the_grammar_compiles(bench):
    bench.open()
    bench.assign(context=structured())
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.one(Aborted).attempt == 1
    assert bench.did(DropGrammar) == [DropGrammar((KEY, 1))]
    bench.feed(GrammarDone((KEY, 1), Digits()))
    bench.feed(GrammarDone((KEY, 1), InputError("late")))
    assert not bench.take(Terminal)
    assert not bench.to_peer(Reserve)
    bench.assert_empty()


def test_a_deadline_passes_while_the_grammar_compiles(bench):
    bench.open()
    bench.assign(context=structured(), deadline=0.5)
    bench.later(1.0)
    assert bench.one(Terminal).code == "deadline_exceeded"
    assert bench.did(DropGrammar) == [DropGrammar((KEY, 1))]
    bench.feed(GrammarDone((KEY, 1), Digits()))
    bench.assert_empty()


def test_a_replay_compiles_behind_its_tokens(bench):
    bench.open()
    bench.assign(context=structured(), emitted=[42, 43])
    (wanted,) = bench.did(CompileGrammar)
    assert wanted.task.emitted == (42, 43)


def test_a_higher_attempt_drops_the_compile_of_the_lower_one(bench):
    bench.assign(context=structured())
    bench.assign(attempt=2, context=structured())
    assert bench.did(DropGrammar) == [DropGrammar((KEY, 1))]
    assert [wanted.key for wanted in bench.did(CompileGrammar)] == [(KEY, 1), (KEY, 2)]


def test_a_compiled_grammar_is_not_dropped(bench):
    bench.assign(context=structured())
    bench.feed(GrammarDone((KEY, 1), Digits()))
    bench.hear(Abort(request=KEY, attempt=1))
    assert not bench.did(DropGrammar)


def test_the_decode_worker_is_told_the_grammar_with_the_blocks(bench):
    bench.open()
    bench.assign(context=structured(), emitted=[42, 43])
    bench.feed(GrammarDone((KEY, 1), Digits()))
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    assert reserve.grammar == GrammarSpec('{"type":"integer"}', [0], [42, 43])
    bench.assign(key=b"s" * 16)
    (reserve,) = bench.to_peer(Reserve)
    assert reserve.grammar is None


def test_a_replay_that_had_ended_compiles_nothing(bench):
    bench.assign(context=structured(), emitted=[42, 0])
    assert not bench.did(CompileGrammar)
    assert bench.one(Terminal).status == "end_of_sequence"


def test_a_grammar_and_a_missing_link_are_both_waited_for(bench):
    bench.assign(context=structured())
    bench.feed(GrammarDone((KEY, 1), Digits()))
    assert not bench.to_peer(Reserve)
    bench.open()
    assert len(bench.to_peer(Reserve)) == 1


# ------------------------------------------------------------------ first tokens in time


def served(bench: Bench) -> list[bytes]:
    """The requests that begin, in order; each is computed and handed over at once."""
    begun = []
    while reserves := bench.to_peer(Reserve):
        for reserve in reserves:
            begun.append(reserve.request)
            bench.grant(reserve)
        while bench.plans:
            bench.now += 0.01
            bench.step()
        for commit in bench.to_peer(Commit):
            bench.committed(commit)
    return begun


def queue(bench: Bench, **waited: float) -> list[bytes]:
    """Prompts that wait for the link, and for how long they did elsewhere before."""
    for number, (name, seconds) in enumerate(waited.items()):
        context = make_context(10)
        context.tokens.array[:] = number + 1  # no prefix is shared
        bench.assign(key=name.encode() * 16, waited=seconds, context=context)
    return [name.encode() * 16 for name in waited]


def in_time_bench(slo_ttft: float = 2.0) -> Bench:
    bench = Bench(max_active=1, slo_ttft=slo_ttft)
    bench.committed(bench.handing_over(key=b"0" * 16))  # 10 tokens in 10 ms
    bench.to_peer(Reserve)
    return bench


def test_a_prompt_that_is_late_lets_those_in_time_go_first():
    bench = in_time_bench()
    bench.assign(key=b"x" * 16)
    (first,) = bench.to_peer(Reserve)
    a, b, c = queue(bench, a=1.5, b=2.5, c=0.0)
    bench.grant(first)
    bench.step()
    bench.committed(bench.commit())
    assert served(bench) == [a, c, b]
    bench.assert_empty()


def test_a_prompt_s_own_limit_replaces_that_of_the_worker():
    bench = in_time_bench()
    bench.assign(key=b"x" * 16)
    (first,) = bench.to_peer(Reserve)
    context = make_context(10)
    context.tokens.array[:] = 9
    bench.assign(key=b"o" * 16, waited=0.5, context=context, slo_ttft=0.4)
    a, b = queue(bench, a=1.5, b=2.5)
    bench.grant(first)
    bench.step()
    bench.committed(bench.commit())
    assert served(bench) == [a, b"o" * 16, b]


def test_in_the_order_of_coming_unless_there_is_a_time_to_keep():
    bench = Bench(max_active=1)
    names = queue(bench, a=1.5, b=2.5, c=0.0)
    bench.open()
    assert served(bench) == names


def test_a_replay_in_the_midst_of_its_answer_is_never_late():
    bench = in_time_bench()
    bench.assign(key=b"x" * 16)
    (first,) = bench.to_peer(Reserve)
    bench.assign(key=b"r" * 16, attempt=2, emitted=[7, 8], waited=50.0)
    (a,) = queue(bench, a=0.0)
    bench.grant(first)
    bench.step()
    bench.committed(bench.commit())
    assert served(bench) == [b"r" * 16, a]


def test_what_is_cached_need_not_be_computed_in_time():
    """80 tokens take 80 ms: too long for the 50 that are left, unless most of them are here."""
    bench = Bench(max_active=1, slo_ttft=2.0)
    prompt = make_context(80)
    bench.assign(key=b"0" * 16, context=prompt)
    bench.open()
    assert served(bench) == [b"0" * 16]
    bench.assign(key=b"x" * 16)
    (first,) = bench.to_peer(Reserve)
    other = make_context(80)
    other.tokens.array[:] = 5
    bench.assign(key=b"o" * 16, waited=1.65, context=other)
    bench.assign(key=b"c" * 16, waited=1.65, context=prompt)
    bench.grant(first)
    bench.step()
    bench.committed(bench.commit())
    assert served(bench) == [b"c" * 16, b"o" * 16]


def test_prompts_wait_where_they_can_be_overtaken_while_the_engine_has_work():
    bench = Bench(max_active=4, slo_ttft=2.0)
    bench.committed(bench.handing_over(key=b"0" * 16))  # 1 ms a token from now on
    for number in range(4):
        bench.assign(key=bytes([number]) * 16, shape={"prompt": 80})
    assert len(bench.to_peer(Reserve)) == 2  # 160 ms of work
    bench.later(0.06)  # a decode worker that does not answer delays no request
    assert len(bench.to_peer(Reserve)) >= 1


def test_slots_are_all_given_where_no_time_is_to_be_kept():
    bench = Bench(max_active=4)
    bench.committed(bench.handing_over(key=b"0" * 16))
    for number in range(6):
        bench.assign(key=bytes([number]) * 16, shape={"prompt": 80})
    assert len(bench.to_peer(Reserve)) == 4


GOLDEN = Path(__file__).parents[1] / "proto" / "golden"
ROGUE = "ipc:///decode-1"


@pytest.mark.parametrize("kind", sorted(get_args(DecodeToPrefill), key=lambda kind: kind.__name__))
def test_a_decode_worker_changes_nothing_about_handoffs_to_another(bench, kind):
    """It has a link, and sends every message about another's request and grant."""
    bench.assign(key=b"o" * 16, decode=ROGUE)
    bench.open(endpoint=ROGUE)
    (own,) = bench.to_peer(Reserve)
    ref = bench.computing()
    about = {
        "request": KEY, "attempt": 1, "grant": ref, "credit": BIG, "counted": 0, "frames": [],
        "code": "handoff_failed", "nonce": 0,
    }  # fmt: skip
    raw = json.loads((GOLDEN / "envelopes.json").read_text())[kind.__name__]["least"]
    decoder = EnvelopeDecoder[Message](DecodeToPrefill)
    (least,) = decoder.decode([bytes.fromhex(frame) for frame in raw])
    known = {name: about[name] for name in kind.__struct_fields__ if name in about}
    said = msgspec.structs.replace(least, **known)
    bench.answer(said, ROGUE)
    bench.step()
    commit = bench.commit()
    bench.answer(said, ROGUE)
    bench.take(HandoffReport)
    bench.committed(commit)
    assert bench.one(HandoffReport).request == KEY
    assert not bench.take(Busy)
    assert own.request == b"o" * 16


# ------------------------------------------------------------------------------ keys of peers


def test_a_refusal_by_the_peers_key_list_gives_all_handoffs_back_at_once(bench):
    """Without it a Reserve was repeated until the request's deadline."""
    bench.assign()
    bench.open()
    bench.to_peer(Reserve)
    bench.assign(key=SECOND)
    bench.to_peer(Reserve)
    bench.answer(Rejected(code="access_denied", message="not your handoff"))
    assert {one.request for one in bench.take(PeerLost)} == {KEY, SECOND}
    assert all(one.decode_full for one in bench.take(Busy))
    bench.later(1.0)
    assert not bench.to_peer(Reserve)
    bench.assert_empty()


def test_an_open_that_is_refused_is_asked_again_later(bench):
    """The peer's key list may be newer by then. Meanwhile the router uses other workers."""
    bench.assign()
    bench.feed(PeerUp(DECODE))
    assert len(bench.to_peer(Open)) == 1
    bench.answer(Rejected(code="access_denied", message="not in the list"))
    lost = bench.one(PeerLost)
    assert lost.refused
    assert "not in the list" in lost.reason
    bench.later(4.0)
    assert not bench.to_peer(Open)
    bench.later(2.0)
    assert len(bench.to_peer(Open)) == 1
    bench.open()
    bench.assign(attempt=2)
    assert len(bench.to_peer(Reserve)) == 1


def test_two_workers_that_state_one_endpoint_have_links_of_their_own(bench):
    """The rogue's end must not end the handoff with the worker whose endpoint it stated."""
    mine, rogue = b"m" * 40, b"r" * 40
    bench.assign(decode_key=mine)
    bench.assign(key=SECOND, decode_key=rogue)
    links = [one.endpoint for one in bench.did(Connect)]
    assert links == [f"{DECODE} {key.decode()}" for key in (mine, rogue)]
    bench.hear(PeerDead(incarnation=77, endpoint=DECODE, key=rogue))
    bench.open(endpoint=links[0])
    (reserve,) = bench.to_peer(Reserve)
    assert reserve.request == KEY
