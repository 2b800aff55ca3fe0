"""The decode worker's decisions, without sockets, threads or a model."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np
import pytest

from baton.decode_worker.core import DecodeCore
from baton.decode_worker.events import FrameStored, FromPeer, MapPool, PeerGone, PoolMapped, ToPeer
from baton.decode_worker.handoffs import GrantStore
from baton.engine.cache.paged_cache import PagedCache
from baton.engine.grammar.constraint import CompileGrammar, DropGrammar, GrammarDone
from baton.engine.scheduling.plan import Sampled, StepPlan, StepResult, abandoned_step
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduling.step_time import StepTime
from baton.kv_transfer.receiver import Receiver, ReceiverConfig
from baton.proto.contexts.outputs import LogProbabilities, TokenLogProbs
from baton.proto.errors import CapacityError, InputError, InternalError, SchemaTooComplex
from baton.proto.hashing import block_hashes, cache_salt
from baton.proto.layout import KVLayout, ModelCard
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.context_maps import grown_map
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Busy,
    Commit,
    Committed,
    DeviceTicket,
    Drained,
    GrammarSpec,
    Grant,
    Heartbeat,
    Hello,
    KVFrame,
    Message,
    Moved,
    Open,
    Opened,
    OpenRefused,
    PeerDead,
    Ping,
    Pong,
    PoolTicket,
    Probe,
    ProbeReply,
    Rejected,
    Release,
    Released,
    Reserve,
    Share,
    Stale,
    Terminal,
    TerminalAck,
    Tokens,
    Welcome,
)
from baton.proto.wire.proofs import reserve_ticket
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens
from baton.worker.events import (
    AbandonStep,
    DrainRequested,
    Exit,
    FromRouter,
    Note,
    RouterDown,
    RouterUp,
    RunStep,
    StepDone,
    Tick,
    ToRouter,
)
from baton.worker.membership import Membership, WorkerIdentity

M = TypeVar("M", bound=Message)

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=1, block_size=4)
CARD = ModelCard(
    name="toy",
    architecture="Toy",
    fingerprint="toy",
    numerics="exact",
    vocab_size=100,
    max_length=200,
    eos_token_ids=[0],
    layout=LAYOUT,
)
KEY, OTHER = b"r" * 16, b"s" * 16
ROUTER, PEER = "router", b"prefill-0:5"
PROMPT = 10
WORKER_KEY, PROOF = b"k" * 16, b"p" * 16


def make_context(prompt: int = PROMPT, new: int = 8) -> WireContext:
    return WireContext(
        tokens=WireTokens(np.arange(1, prompt + 1, dtype=np.int32)),
        max_length=200,
        sampling=WireSampling(temperature=0.0, max_new_tokens=new),
        eos_token_ids=[0],
    )


def ticket(key: bytes = KEY, attempt: int = 1, incarnation: int = 5) -> bytes:
    return reserve_ticket(WORKER_KEY, key, attempt, incarnation)


def hashes_of(tokens: int) -> list[bytes]:
    return block_hashes(np.arange(1, tokens + 1, dtype=np.int32), 4, cache_salt("toy", ""))


class Bench:
    """A core on a clock that tests move; what it does, sorted."""

    def __init__(self, blocks: int = 64, *, welcomed: bool = True, **receiver) -> None:
        me = WorkerIdentity("decode-0", "decode", 9, 1, "ipc:///d", "default", CARD, 8)
        self.member = Membership(me, (ROUTER, "router-2"))
        self.cache = PagedCache(blocks, LAYOUT.block_size)
        config = SchedulerConfig(max_batch=8, token_budget=16, growth=4)
        self.scheduler = Scheduler(config, self.cache)
        store = GrantStore(self.cache, self.scheduler)
        self.receiver = Receiver(9, LAYOUT, store, ReceiverConfig(**receiver))
        times = StepTime()
        times.learn(8, 0.01)
        self.core = DecodeCore(
            self.member, self.scheduler, self.receiver, "ipc:///data", 1 << 20, times
        )
        self.now = 100.0
        self.said: list[Message] = []
        self.routers: list[tuple[str, Message]] = []
        self.peers: list[Message] = []
        self.plans: list[StepPlan] = []
        self.other: list[object] = []
        self.serial = 0
        self.feed(RouterUp(ROUTER))
        if welcomed:
            self.hear(Welcome(router=ROUTER, incarnation=3, key=WORKER_KEY))
        self.take(Hello)

    def feed(self, event) -> None:
        for action in self.core.handle(event, self.now):
            match action:
                case ToRouter(router=router, message=message):
                    self.said.append(message)
                    self.routers.append((router, message))
                case ToPeer(message=message):
                    self.peers.append(message)
                case RunStep(plan=plan):
                    self.plans.append(plan)
                case _:
                    self.other.append(action)
        self.core.check_integrity()

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
        found = [m for m in self.peers if isinstance(m, kind)]
        self.peers = [m for m in self.peers if not isinstance(m, kind)]
        return found

    def hear(self, message: Message, router: str = ROUTER) -> None:
        self.feed(FromRouter(router, message))

    def ask(self, message: Message, peer: bytes = PEER) -> None:
        self.feed(FromPeer(peer, message))

    def later(self, seconds: float, step: float = 0.05) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + step)
            self.feed(Tick())

    # ------------------------------------------------------------------ the usual way

    def reserve(
        self, key: bytes = KEY, attempt: int = 1, tokens: int = PROMPT, **fields
    ) -> Reserve:
        self.serial += 1
        message = Reserve(
            request=key,
            attempt=attempt,
            incarnation=5,
            hashes=hashes_of(tokens),
            num_tokens=tokens,
            growth=4,
            serial=self.serial,
            deadline=60.0,
            ticket=ticket(key, attempt),
            **fields,
        )
        self.ask(message)
        return message

    def send(self, grant: Grant, tokens: int = PROMPT) -> tuple[int, int, int]:
        """Deliver what the grant lacks in one frame; returns frames, bytes and digest."""
        first, last = grant.cached_tokens // 4, LAYOUT.blocks_for(tokens)
        if first == last:
            return 0, 0, 0
        size = 2 * (last - first) * LAYOUT.block_bytes
        frame = KVFrame(grant.grant, 0, 0, 2, first, last - first, size, 77)
        assert self.receiver.locate(frame) is not None
        self.feed(FrameStored(frame, True))
        return 1, size, 77

    def commit(self, grant: Grant, manifest: tuple[int, int, int], **fields) -> Commit:
        tokens = fields.pop("tokens", PROMPT)
        settings = {
            "request": grant.request,
            "attempt": grant.attempt,
            "context": grown_map(
                fields.pop("context", None) or make_context(tokens, fields.pop("new", 8)),
                fields.pop("emitted", [42]),
            ),
            "router": ROUTER,
            "deadline": 60.0,
            "prefill": "prefill-0",
            "proof": PROOF,
        }
        frames, nbytes, digest = manifest
        message = Commit(
            grant=grant.grant,
            frames=frames,
            bytes=nbytes,
            digest=digest,
            **{**settings, **fields},
        )
        self.ask(message)
        return message

    def run(self, key: bytes = KEY, attempt: int = 1, **fields) -> Commit:
        tokens = fields.get("tokens", PROMPT)
        self.reserve(key, attempt, tokens)
        (grant,) = self.to_peer(Grant)
        message = self.commit(grant, self.send(grant, tokens), **fields)
        assert self.to_peer(Committed)
        return message

    def step(self, token: int = 43) -> None:
        plan = self.plans.pop(0)
        drawn = tuple(Sampled(c.request, token) for c in plan.chunks if c.sample is not None)
        self.feed(StepDone(StepResult(plan.step, drawn, 0.01, plan.num_tokens)))

    def finish(self) -> None:
        """All steps that are out now."""
        for _ in range(len(self.plans)):
            self.step()

    def streamed(self) -> list[tuple[int, int]]:
        return [
            (run.position + i, token)
            for message in self.take(Tokens)
            for run in message.runs
            for i, token in enumerate(run.tokens)
        ]


@pytest.fixture
def bench() -> Bench:
    return Bench()


# ------------------------------------------------------------------ from Reserve to the end


@pytest.mark.parametrize(
    "wrong",
    [
        {"ticket": b""},
        {"ticket": ticket(OTHER)},
        {"ticket": ticket(attempt=2)},
        {"incarnation": 6},
        {"attempt": 7},
    ],
    ids=str,
)
def test_a_reserve_takes_the_ticket_of_its_sender_and_attempt(bench, wrong):
    """Without it nothing is taken, nothing of others is touched and nothing is remembered."""
    bench.run()
    used = bench.cache.pool.used
    good = Reserve(
        request=KEY, attempt=2, incarnation=5, hashes=[], num_tokens=4, growth=4, serial=99,
        deadline=60.0, ticket=ticket(attempt=2),
    )  # fmt: skip
    change = {"ticket": ticket()} if wrong == {"ticket": ticket(attempt=2)} else wrong
    bench.ask(msgspec.structs.replace(good, **change))
    assert len(bench.to_peer(Aborted)) == 1 and not bench.to_peer(Grant)
    assert bench.cache.pool.used == used
    bench.step()
    assert bench.streamed() == [(10, 42), (11, 43)]
    bench.ask(good)
    assert bench.to_peer(Grant), "the right one is let in afterwards"


def test_a_release_of_another_sender_changes_nothing(bench):
    bench.reserve()
    (grant,) = bench.to_peer(Grant)
    bench.ask(Release(request=KEY, attempt=9, incarnation=6, ticket=ticket(incarnation=5)))
    bench.ask(Release(request=KEY, attempt=1, grant=grant.grant, incarnation=6))
    assert len(bench.to_peer(Released)) == 2
    bench.commit(grant, bench.send(grant))
    assert bench.to_peer(Committed), "the grant stands"
    bench.reserve(attempt=2)
    assert bench.to_peer(Grant), "no later attempt was buried"


def test_a_grant_takes_no_commit_of_another_request(bench):
    bench.reserve()
    (grant,) = bench.to_peer(Grant)
    bench.commit(grant, bench.send(grant), request=OTHER)
    assert bench.to_peer(Stale) and not bench.take(Tokens)


def test_blocks_are_granted_once_a_router_has_welcomed_the_worker(bench):
    fresh = Bench(welcomed=False)
    fresh.reserve()
    assert fresh.to_peer(Busy) and not fresh.to_peer(Grant)
    fresh.later(2.0)
    assert fresh.take(Hello), "the missing Welcome is asked for"


def test_a_whole_life(bench):
    bench.run()
    assert bench.streamed() == [(10, 42)]  # said again, in case prefill's word was lost
    for _ in range(7):
        bench.step()
    assert bench.streamed() == [(position, 43) for position in range(11, 18)]
    terminal = bench.one(Terminal)
    assert (terminal.status, terminal.position) == ("maximum_length", 18)
    assert (terminal.prefill, terminal.decode) == ("prefill-0", "decode-0")
    assert bench.cache.pool.used == 0
    bench.hear(TerminalAck(requests=[(KEY, 1)]))
    bench.later(2.0)
    assert not bench.take(Terminal)
    assert bench.core.idle


def test_the_tokens_of_a_step_leave_in_one_message_per_router(bench):
    bench.run(KEY)
    bench.step()
    bench.run(OTHER, tokens=7)
    bench.run(b"t" * 16, tokens=5, router="router-2")
    bench.step()
    bench.take(Tokens)
    bench.step()  # planned before the newcomers were here
    bench.take(Tokens)
    bench.routers.clear()
    bench.step()
    sizes = {r: len(m.runs) for r, m in bench.routers if isinstance(m, Tokens)}
    assert sizes == {ROUTER: 2, "router-2": 1}


def test_the_end_of_sequence_ends_it(bench):
    bench.run()
    bench.step(token=0)
    assert bench.one(Terminal).status == "end_of_sequence"


def test_a_prefix_is_found_and_need_not_be_sent_again(bench):
    bench.run()
    bench.reserve(OTHER, tokens=12)
    (grant,) = bench.to_peer(Grant)
    assert grant.cached_tokens == 8
    assert bench.send(grant, 12)[1] == 2 * LAYOUT.block_bytes


def test_a_repeated_reserve_and_commit_get_the_same_answers(bench):
    message = bench.reserve()
    bench.ask(message)
    first, second = bench.to_peer(Grant)
    assert first == second
    commit = bench.commit(first, bench.send(first))
    bench.ask(commit)
    one, two = bench.to_peer(Committed)
    assert one == two
    assert len(bench.streamed()) == 1


def test_what_belongs_to_a_router_that_is_gone_for_good_is_freed_at_last(bench):
    bench.feed(RouterUp("router-2"))
    bench.run(new=100, deadline=600.0)
    bench.run(OTHER, new=100, router="router-2", deadline=600.0)
    bench.finish()
    bench.feed(RouterDown("router-2"))
    bench.later(59.0, step=0.5)
    assert len(bench.core._held()) == 2
    bench.take(Aborted)
    bench.later(2.0, step=0.5)
    assert [held.router for held in bench.core._held()] == [ROUTER]
    assert not bench.take(Aborted), "nobody is there to hear it"


def test_no_room_is_busy():
    bench = Bench(blocks=3)
    bench.reserve(tokens=40)
    assert bench.to_peer(Busy)


def test_requests_that_were_preempted_come_before_new_grants():
    bench = Bench(blocks=8)
    bench.run(KEY, new=30)
    bench.run(OTHER, tokens=9, new=30)
    while not bench.core.load().preemptions:
        bench.step()
    bench.reserve(b"t" * 16, tokens=16)
    assert bench.to_peer(Busy)
    bench.hear(Abort(request=KEY, attempt=1))
    bench.hear(Abort(request=OTHER, attempt=1))
    while bench.plans:
        bench.step()
    assert bench.cache.pool.used == 0


def test_a_request_that_outgrows_the_whole_pool_fails_alone():
    bench = Bench(blocks=5)
    bench.run(new=100)
    while bench.plans:
        bench.step()
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.position) == ("overloaded", 21)
    assert bench.cache.pool.used == 0


def test_the_deadline_ends_a_request(bench):
    bench.run(deadline=1.0)
    bench.later(1.1)
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.position) == ("deadline_exceeded", 11)
    bench.finish()
    assert bench.cache.pool.used == 0


def test_a_failed_step_fails_its_requests_only(bench):
    bench.run()
    bench.run(OTHER)
    plan = bench.plans.pop(0)
    failed = {chunk.request: InternalError("boom") for chunk in plan.chunks}
    bench.feed(StepDone(StepResult(plan.step, (), 0.01, plan.num_tokens, failed)))
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.request, "boom" in terminal.message) == ("internal", KEY, True)
    bench.finish()
    bench.step()
    assert bench.streamed()[-1] == (11, 43)


# ------------------------------------------------------------------ Abort in every state


def test_abort_of_a_grant_frees_at_once(bench):
    bench.reserve()
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.one(Aborted).attempt == 1
    assert bench.cache.pool.used == 0
    (grant,) = bench.to_peer(Grant)
    frame = KVFrame(grant.grant, 0, 0, 2, 0, 3, 6 * LAYOUT.block_bytes, 77)
    assert bench.receiver.locate(frame) is None  # late bytes go nowhere


def test_abort_of_a_running_request_frees_after_its_step(bench):
    bench.run()
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.one(Aborted).attempt == 1
    assert bench.cache.pool.used
    bench.take(Tokens)
    assert not [each for each in bench.other if isinstance(each, Note)]
    heard, bench.now = bench.now, bench.now + 0.03
    assert len(bench.plans) == 2  # the one that runs and the one behind it
    bench.step()
    assert bench.cache.pool.used
    assert not [each for each in bench.other if isinstance(each, Note)]
    bench.now += 0.02
    bench.step()
    assert bench.cache.pool.used == 0
    assert not bench.take(Tokens) + bench.take(Terminal)
    (note,) = [each for each in bench.other if isinstance(each, Note)]
    assert note.event == "request.freed"
    assert (note.fields["heard"], note.fields["at"]) == (heard, bench.now)


def test_steps_that_nobody_waits_for_are_abandoned_and_teach_nothing(bench):
    bench.run(KEY, new=100)
    bench.finish()
    bench.run(OTHER, new=100)
    bench.finish()
    two = [plan.step for plan in bench.plans if len(plan.chunks) == 2]
    assert len(two) == len(bench.plans) == 2
    bench.hear(Abort(request=KEY, attempt=1))
    assert not [each for each in bench.other if isinstance(each, AbandonStep)]
    bench.hear(Abort(request=OTHER, attempt=1))
    abandoned = [each.step for each in bench.other if isinstance(each, AbandonStep)]
    assert abandoned == two
    known = bench.core._steps._times.predict(2)
    for plan in bench.plans:
        bench.feed(StepDone(abandoned_step(plan, 1e-6)))
    assert bench.cache.pool.used == 0
    assert bench.core._steps._times.predict(2) == known


def test_abort_of_an_unknown_request_is_answered_and_remembered(bench):
    bench.hear(Abort(request=KEY, attempt=2))
    assert bench.one(Aborted).attempt == 2
    bench.reserve(attempt=2)
    assert bench.to_peer(Aborted)
    bench.reserve(attempt=3)
    assert bench.to_peer(Grant)


def test_abort_of_an_ended_request_ends_its_terminal(bench):
    bench.run(new=2)
    bench.step()
    bench.take(Terminal)
    bench.hear(Abort(request=KEY, attempt=1))
    bench.later(2.0)
    assert not bench.take(Terminal)
    assert bench.member.unacknowledged == 0


def test_a_higher_attempt_takes_the_place_of_the_lower(bench):
    bench.run()
    bench.reserve(attempt=2)
    assert bench.to_peer(Grant)
    bench.take(Tokens)
    bench.step()
    assert not bench.take(Tokens)
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.receiver.granted == 1


# ------------------------------------------------------------------ the router


def test_the_terminal_is_repeated_until_the_router_has_it(bench):
    bench.run(new=2)
    bench.step()
    bench.take(Terminal)
    bench.later(1.6)
    assert len(bench.take(Terminal)) == 3
    bench.hear(TerminalAck(requests=[(KEY, 1)]))
    bench.later(2.0)
    assert not bench.take(Terminal)


def test_adopt_says_the_tokens_again_and_moves_the_request(bench):
    bench.run()
    bench.step()
    bench.said.clear()
    bench.routers.clear()
    bench.hear(Adopt(request=KEY, position=11), "router-2")
    said = [(r, type(m)) for r, m in bench.routers]
    assert said == [("router-2", Accepted), (ROUTER, Moved), ("router-2", Tokens)]
    assert bench.one(Accepted) == Accepted(request=KEY, attempt=1, proof=PROOF)
    assert bench.streamed() == [(11, 43)]
    bench.routers.clear()
    bench.step()
    assert [r for r, m in bench.routers if isinstance(m, Tokens)] == ["router-2"]


def test_an_abort_of_the_router_it_was_taken_from_frees_nothing(bench):
    bench.run()
    bench.hear(Adopt(request=KEY, position=11), "router-2")
    bench.routers.clear()
    bench.hear(Abort(request=KEY, attempt=1))
    assert [(r, type(m)) for r, m in bench.routers] == [(ROUTER, Moved), (ROUTER, Aborted)]
    bench.routers.clear()
    bench.step()
    assert [r for r, m in bench.routers if isinstance(m, Tokens)] == ["router-2"]
    bench.hear(Abort(request=KEY, attempt=1), "router-2")
    bench.step()
    assert not bench.core.load().requests_running


def test_an_end_that_was_taken_over_outlasts_an_abort_of_the_router_before(bench):
    bench.run(new=3)
    bench.step()
    bench.step()
    bench.hear(Adopt(request=KEY, position=11), "router-2")
    bench.hear(Abort(request=KEY, attempt=1))
    bench.said.clear()
    bench.hear(Adopt(request=KEY, position=11), "router-2")
    assert [type(m) for m in bench.said] == [Accepted, Tokens, Terminal]


def test_heartbeats_say_what_each_router_has_here(bench):
    assert bench.core.load().shares == {}
    bench.run(new=8)
    (total,) = bench.core.load().shares.values()
    assert bench.core.load().shares == {ROUTER: Share(1, total.tokens)}
    assert total.tokens == 10 + 8
    bench.hear(Adopt(request=KEY, position=11), "router-2")
    assert bench.core.load().shares == {"router-2": Share(1, 18)}


def test_adopt_from_the_front_says_no_prompt(bench):
    bench.run()
    bench.said.clear()
    bench.hear(Adopt(request=KEY, position=0))
    assert bench.streamed() == [(10, 42)]


def test_adopt_at_the_end_says_that_it_is_here(bench):
    bench.run()
    bench.said.clear()
    bench.hear(Adopt(request=KEY, position=11))
    run = bench.one(Tokens).runs[0]
    assert (run.position, run.tokens) == (11, [])


def test_adopt_of_an_ended_request_repeats_tokens_and_terminal(bench):
    bench.run(new=3)
    bench.step()
    bench.step()
    bench.said.clear()
    bench.hear(Adopt(request=KEY, position=11), "router-2")
    assert [type(m) for m in bench.said] == [Accepted, Moved, Tokens, Terminal]
    assert bench.one(Accepted).proof == PROOF
    assert bench.streamed() == [(11, 43), (12, 43)]


def draw(bench, number: int) -> None:
    """A step whose token, 43, has a log-probability that says which step it was."""
    plan = bench.plans.pop(0)
    entry = TokenLogProbs.of(float(number), {43: float(number)})
    drawn = tuple(Sampled(c.request, 43, logprobs=entry) for c in plan.chunks)
    bench.feed(StepDone(StepResult(plan.step, drawn, 0.01, plan.num_tokens)))


@pytest.mark.parametrize("ended", [False, True])
def test_adopt_says_log_probabilities_again(bench, ended):
    new = 5 if ended else 8
    first = {PROMPT: LogProbabilities([0.0], [{}])}
    context = msgspec.structs.replace(make_context(PROMPT - 2, new), _log_probabilities_data=first)
    bench.reserve()
    (grant,) = bench.to_peer(Grant)
    bench.commit(grant, bench.send(grant), context=context, emitted=[41, 42, 42])
    draw(bench, 1)
    draw(bench, 2)
    assert len(bench.take(Terminal)) == ended
    bench.take(Tokens)
    bench.hear(Adopt(request=KEY, position=9), "router-2")
    runs = bench.one(Tokens).runs
    # What an earlier attempt drew nobody here knows; the rest is said as it was.
    assert [(r.position, r.tokens) for r in runs] == [(9, [42]), (10, [42, 43, 43])]
    assert runs[0].logprobs is None
    assert [entry.logprob for entry in runs[1].logprobs] == [0.0, 1.0, 2.0]


def test_adopt_of_an_unknown_request_is_answered(bench):
    bench.hear(Adopt(request=KEY, position=11))
    assert bench.one(Aborted).attempt == 0


def test_hello_lists_what_runs_and_what_ended(bench):
    bench.run(new=2)
    bench.step()
    bench.run(OTHER)
    bench.feed(RouterUp("router-2"))
    states = {r.request: r for r in bench.one(Hello).requests}
    assert (states[KEY].done, states[KEY].position, states[KEY].router) == (True, 12, ROUTER)
    assert (states[OTHER].done, states[OTHER].position, states[OTHER].prompt_length) == (
        False,
        11,
        10,
    )


def test_a_router_without_memory_gets_a_hello_but_not_for_every_word(bench):
    for _ in range(5):
        bench.hear(Rejected(code="endpoint_unknown", message="say Hello first"))
    assert len(bench.take(Hello)) == 1


@pytest.mark.parametrize(("code", "restart"), [("endpoint_dead", True), ("config", False)])
def test_a_final_rejection_ends_the_process(bench, code, restart):
    bench.hear(Rejected(code=code, message="no"))
    if not restart:
        assert not [a for a in bench.other if isinstance(a, Exit)]  # another router may take it
        bench.hear(Rejected(code=code, message="no"), "router-2")
    (action,) = [a for a in bench.other if isinstance(a, Exit)]
    assert action.restart is restart


def test_another_rejection_does_not(bench):
    bench.hear(Rejected(code="decode_failed", message="what"))
    assert not [a for a in bench.other if isinstance(a, Exit)]


def test_heartbeats_tell_progress_and_load(bench):
    bench.run()
    bench.later(0.25)
    beat = bench.take(Heartbeat)[-1]
    assert beat.busy and beat.load.kv_blocks_used and beat.load.requests_running == 1
    for _ in range(7):
        bench.step()
    bench.later(0.25)
    beat = bench.take(Heartbeat)[-1]
    assert (beat.busy, beat.progress, beat.load.kv_blocks_used) == (False, 7, 0)


# ------------------------------------------------------------------ prefill workers


def test_opening_compares_models(bench):
    opening = Open(
        version=PROTOCOL_VERSION, worker="p", incarnation=5, model=CARD, transports=["zmq"]
    )
    bench.ask(opening)
    assert bench.to_peer(Opened)[0].data_endpoint == "ipc:///data"
    for change in ({"fingerprint": "x"}, {"numerics": "x"}, {"vocab_size": 7}):
        other = msgspec.structs.replace(CARD, **change)
        bench.ask(msgspec.structs.replace(opening, model=other))
        (refused,) = bench.to_peer(OpenRefused)
        assert refused.field == next(iter(change))
    bench.ask(msgspec.structs.replace(opening, transports=["pigeon"]))
    assert bench.to_peer(OpenRefused)[0].field == "transports"
    bench.ask(msgspec.structs.replace(opening, version=99))
    assert bench.to_peer(Rejected)[0].code == "version_mismatch"


@pytest.mark.parametrize("failure", ["", "no such process"])
@pytest.mark.parametrize(
    ("transport", "where"),
    [
        ("shm", {"pool": PoolTicket(1, 2, 4096, b"m" * 16)}),
        ("cuda_ipc", {"device_pool": DeviceTicket("host", b"h" * 64, 512, 4096)}),
    ],
)
def test_a_pool_is_mapped_before_the_link_is_open(bench, failure, transport, where):
    opening = Open(
        version=PROTOCOL_VERSION, worker="p", incarnation=5, model=CARD,
        transports=[transport, "zmq"], **where,
    )  # fmt: skip
    bench.ask(opening)
    assert not bench.to_peer(Opened)
    (wanted,) = [each for each in bench.other if isinstance(each, MapPool)]
    assert (wanted.incarnation, wanted.ticket) == (5, *where.values())
    bench.feed(PoolMapped(wanted.peer, failure, wanted.transport))
    assert bench.to_peer(Opened)[0].transport == ("zmq" if failure else transport)
    bench.ask(msgspec.structs.replace(opening, transports=["zmq"]))
    assert bench.to_peer(Opened)[0].transport == "zmq"
    bench.ask(msgspec.structs.replace(opening, model=msgspec.structs.replace(CARD, vocab_size=7)))
    assert bench.to_peer(OpenRefused)


def test_anyone_may_ask_who_listens(bench):
    bench.ask(Probe(nonce=7), b"anyone")
    (reply,) = bench.to_peer(ProbeReply)
    assert (reply.nonce, reply.worker, reply.incarnation) == (7, "decode-0", 9)
    bench.ask(Ping(nonce=8), b"anyone")
    assert bench.to_peer(Pong)[0].nonce == 8


def test_a_released_grant_is_free(bench):
    bench.reserve()
    bench.ask(Release(request=KEY, attempt=1, incarnation=5, ticket=ticket()))
    assert bench.to_peer(Released)
    assert bench.cache.pool.used == 0


def test_a_prefill_worker_that_stays_away_holds_no_blocks():
    bench = Bench(timeout=1.0, lease=100.0)
    bench.reserve()
    bench.later(0.1)
    bench.feed(PeerGone(PEER))
    bench.later(0.5)
    assert bench.to_peer(Ping)
    for _ in range(4):
        bench.ask(Pong())
        bench.later(0.5)
    assert bench.cache.pool.used  # it was there all the time
    bench.feed(PeerGone(PEER))
    bench.later(1.1)
    assert bench.cache.pool.used == 0


def test_a_dead_prefill_worker_holds_no_blocks_and_what_it_committed_runs_on(bench):
    bench.run()
    bench.reserve(OTHER)
    bench.hear(PeerDead(incarnation=5))
    assert bench.receiver.granted == 0
    bench.take(Tokens)
    bench.step()
    assert bench.streamed() == [(11, 43)]


# ------------------------------------------------------------------ drain


def test_a_draining_worker_finishes_what_it_has_and_takes_no_more(bench):
    bench.run(new=2)
    bench.feed(DrainRequested())
    bench.reserve(OTHER)
    assert bench.to_peer(Busy)[0].reason == "draining"
    bench.step()
    assert not bench.core.is_drained
    bench.hear(TerminalAck(requests=[(KEY, 1)]))
    assert bench.core.is_drained
    assert len(bench.take(Drained)) == 2  # one per router


def test_a_draining_worker_takes_over_what_it_has_granted(bench):
    bench.reserve()
    (grant,) = bench.to_peer(Grant)
    bench.feed(DrainRequested())
    assert not bench.core.is_drained
    bench.commit(grant, bench.send(grant))
    assert bench.to_peer(Committed)
    bench.step()
    assert (11, 43) in bench.streamed()


def test_a_draining_worker_repeats_the_credit_of_what_it_has_granted(bench):
    """A sender whose frames were lost asks with its Reserve; Busy would stop it for ever."""
    message = bench.reserve()
    (grant,) = bench.to_peer(Grant)
    bench.feed(DrainRequested())
    bench.later(1.0)
    bench.to_peer(Grant)
    bench.ask(message)
    (again,) = bench.to_peer(Grant)
    assert (again.grant, again.credit > grant.credit) == (grant.grant, True)
    assert not bench.to_peer(Busy)


def test_tables_forget(bench):
    bench.run(new=2)
    bench.step()
    bench.hear(TerminalAck(requests=[(KEY, 1)]))
    bench.hear(Abort(request=OTHER, attempt=1))
    assert bench.core.remembered
    bench.now += 1000.0
    bench.feed(Tick())
    assert bench.core.remembered == 0


# ------------------------------------------------------------------ grammars


class Digits:
    """A grammar of tokens; what it was shown."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def consume_token(self, token: int) -> bool:
        self.seen.append(token)
        return token < 50

    def allowed(self) -> np.ndarray:
        return np.arange(100) < 50


STRUCTURED = msgspec.structs.replace(make_context(), json_schema='{"type":"integer"}')


def test_a_request_runs_once_its_grammar_is_rebuilt(bench):
    bench.run(context=STRUCTURED)
    assert bench.streamed() == [(10, 42)]
    (wanted,) = bench.other
    assert isinstance(wanted, CompileGrammar)
    assert (wanted.key, wanted.task.emitted) == ((KEY, 1), (42,))
    assert wanted.task.eos == frozenset({0})
    bench.later(0.5)
    assert not bench.plans
    assert not bench.core.idle
    matcher = Digits()
    bench.feed(GrammarDone(wanted.key, matcher))
    assert bench.plans[0].chunks[0].sample.mask is matcher
    bench.step()
    assert (bench.streamed(), matcher.seen) == ([(11, 43)], [43])
    bench.feed(GrammarDone(wanted.key, Digits()))  # said twice
    for _ in range(6):
        bench.step()
    assert bench.one(Terminal).status == "maximum_length"
    assert bench.cache.pool.used == 0


SPEC = GrammarSpec(STRUCTURED.json_schema, [0], [])


def wanted(bench, kind=CompileGrammar) -> list:
    """Actions of a kind since the last look."""
    found = [action for action in bench.other if isinstance(action, kind)]
    bench.other = [action for action in bench.other if not isinstance(action, kind)]
    return found


def granted(bench, **fields) -> Grant:
    bench.reserve(grammar=SPEC, **fields)
    (grant,) = bench.to_peer(Grant)
    return grant


def test_a_grammar_compiles_from_the_reserve_on_and_is_there_with_the_kv(bench):
    grant = granted(bench)
    (first,) = wanted(bench)
    assert (first.key, first.task.emitted) == ((KEY, 1), ())
    matcher = Digits()
    bench.feed(GrammarDone(first.key, matcher))
    assert not bench.plans
    bench.commit(grant, bench.send(grant), context=STRUCTURED)
    assert (wanted(bench), matcher.seen) == ([], [42]), "no other grammar, behind prefill's token"
    assert bench.plans[0].chunks[0].sample.mask is matcher, "runs in the turn of the commit"
    assert bench.streamed() == [(10, 42)]


def test_a_commit_before_its_grammar_waits_for_the_one_that_compiles(bench):
    grant = granted(bench)
    bench.commit(grant, bench.send(grant), context=STRUCTURED)
    (first,) = wanted(bench)
    assert not bench.plans
    matcher = Digits()
    bench.feed(GrammarDone(first.key, matcher))
    assert (matcher.seen, len(bench.plans)) == ([42], 1)


def test_a_replays_grammar_compiles_behind_its_tokens(bench):
    bench.reserve(tokens=PROMPT + 2, grammar=GrammarSpec(SPEC.schema, [0], [7, 8]))
    (grant,) = bench.to_peer(Grant)
    (first,) = wanted(bench)
    assert first.task.emitted == (7, 8)
    matcher = Digits()
    bench.feed(GrammarDone(first.key, matcher))
    manifest = bench.send(grant, PROMPT + 2)
    bench.commit(grant, manifest, context=STRUCTURED, emitted=[7, 8, 9])
    assert (matcher.seen, len(bench.plans)) == ([9], 1)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec('{"type":"null"}', [0], []),
        GrammarSpec(SPEC.schema, [0, 1], []),
        GrammarSpec(SPEC.schema, [0], [41]),
    ],
)
def test_a_commit_of_another_grammar_than_reserved_gets_its_own(bench, spec):
    bench.reserve(grammar=spec)
    (grant,) = bench.to_peer(Grant)
    (first,) = wanted(bench)
    bench.feed(GrammarDone(first.key, Digits()))
    bench.commit(grant, bench.send(grant), context=STRUCTURED)
    (second,) = wanted(bench)
    assert second.task.emitted == (42,)
    assert not bench.plans
    bench.feed(GrammarDone(second.key, Digits()))
    assert bench.plans


def test_a_reserve_said_twice_compiles_once_and_a_busy_one_nothing():
    bench = Bench(blocks=5)
    message = bench.reserve(grammar=SPEC)
    bench.ask(message)
    assert len(wanted(bench)) == 1
    bench.reserve(OTHER, tokens=16, grammar=SPEC)
    assert bench.to_peer(Busy)
    assert not wanted(bench)


def end_by_abort(bench, grant):
    bench.hear(Abort(request=KEY, attempt=1))


def end_by_release(bench, grant):
    bench.ask(Release(request=KEY, attempt=1, grant=grant.grant, incarnation=5))


def end_by_death(bench, grant):
    bench.hear(PeerDead(endpoint="ipc:///prefill", incarnation=5))


def end_by_absence(bench, grant):
    bench.feed(PeerGone(PEER))
    bench.later(6.0, step=0.5)


def end_by_deadline(bench, grant):
    bench.later(61.0, step=1.0)


def end_by_higher_attempt(bench, grant):
    bench.reserve(attempt=2)


def end_by_damage(bench, grant):
    bench.commit(grant, (0, 0, 0), context=STRUCTURED)  # a manifest that does not agree


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(
    "end",
    [
        end_by_abort,
        end_by_release,
        end_by_death,
        end_by_absence,
        end_by_deadline,
        end_by_higher_attempt,
        end_by_damage,
    ],
)
def test_a_handoff_that_ends_drops_its_grammar(bench, end, ready):
    grant = granted(bench)
    (first,) = wanted(bench)
    if ready:
        bench.feed(GrammarDone(first.key, Digits()))
    end(bench, grant)
    dropped = wanted(bench, DropGrammar)
    assert dropped == ([] if ready else [DropGrammar((KEY, 1))])
    assert not bench.core._grammars
    bench.feed(GrammarDone(first.key, Digits()))
    assert not bench.core._grammars


def test_an_abort_of_a_request_taken_over_drops_its_compile(bench):
    grant = granted(bench)
    bench.commit(grant, bench.send(grant), context=STRUCTURED)
    bench.hear(Abort(request=KEY, attempt=1))
    assert wanted(bench, DropGrammar) == [DropGrammar((KEY, 1))]
    assert bench.cache.pool.used == 0


def test_a_first_token_the_grammar_refuses_ends_the_request(bench):
    grant = granted(bench)
    bench.feed(GrammarDone((KEY, 1), Digits()))
    bench.commit(grant, bench.send(grant), context=STRUCTURED, emitted=[60])
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.position) == ("input", 11)
    assert bench.cache.pool.used == 0


def test_an_error_found_before_the_commit_ends_the_request_with_it(bench):
    grant = granted(bench)
    bench.feed(GrammarDone((KEY, 1), SchemaTooComplex("too much")))
    assert not bench.take(Terminal)
    bench.commit(grant, bench.send(grant), context=STRUCTURED)
    assert bench.one(Terminal).code == "schema_too_complex"
    assert bench.cache.pool.used == 0


def test_nobody_waits_for_anothers_grammar(bench):
    bench.run(context=STRUCTURED)
    bench.run(OTHER)
    bench.step()
    assert (11, 43) in bench.streamed()


def test_a_grammar_that_cannot_be_rebuilt_ends_its_request(bench):
    bench.run(context=STRUCTURED)
    bench.feed(GrammarDone((KEY, 1), InputError("json_schema: not like this")))
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.position) == ("input", 11)
    assert bench.cache.pool.used == 0
    assert bench.core.idle


def test_no_memory_for_a_grammar_now_says_when_to_come_back(bench):
    bench.run(context=STRUCTURED)
    bench.feed(GrammarDone((KEY, 1), CapacityError("schemas take it all", retry_after=1.5)))
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.retry_after) == ("overloaded", 1.5)


def test_an_abort_while_the_grammar_is_rebuilt_frees_its_blocks(bench):
    bench.run(context=STRUCTURED)
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.one(Aborted).attempt == 1
    assert bench.cache.pool.used == 0
    bench.feed(GrammarDone((KEY, 1), Digits()))
    assert not bench.plans
    assert bench.core.idle


def test_a_deadline_passes_while_the_grammar_is_rebuilt(bench):
    bench.run(context=STRUCTURED, deadline=0.5)
    bench.later(1.0)
    assert bench.one(Terminal).code == "deadline_exceeded"
    assert bench.cache.pool.used == 0


def test_a_new_router_hears_of_a_request_whose_grammar_is_rebuilt(bench):
    bench.run(context=STRUCTURED)
    bench.take(Tokens)
    bench.hear(Adopt(request=KEY, position=10), "router-2")
    assert bench.streamed() == [(10, 42)]


def test_a_token_its_grammar_refuses_fails_the_request_alone(bench):
    bench.run(context=STRUCTURED)
    bench.run(OTHER)
    bench.step()
    bench.feed(GrammarDone((KEY, 1), Digits()))
    bench.finish()
    bench.step(token=60)
    terminal = bench.one(Terminal)
    assert (terminal.request, terminal.code) == (KEY, "internal")
    bench.step()
    assert bench.cache.pool.used > 0
