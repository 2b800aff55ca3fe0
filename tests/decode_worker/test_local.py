"""Requests that a router assigns to a decode worker alone: it computes the prompt itself."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.decode_worker.events import FromPeer
from baton.decode_worker.job import with_local_prompts
from baton.engine.grammar.constraint import CompileGrammar, DropGrammar, GrammarDone
from baton.engine.scheduling.plan import Sampled, StepResult
from baton.proto.errors import BatonError, HandoffFailed, InternalError, SchemaTooComplex
from baton.proto.requests import prompt_feature
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Assign,
    Busy,
    Committed,
    Grant,
    Hello,
    Moved,
    Reserve,
    Terminal,
    TerminalAck,
    Tokens,
)
from baton.proto.wire.proofs import Holder, reserve_ticket
from baton.worker.events import DrainRequested, RouterUp, StepDone

from .bench import (
    CARD,
    KEY,
    OTHER,
    PROMPT,
    PROOF,
    ROUTER,
    TERMS,
    WORKER_KEY,
    Bench,
    hashes_of,
    make_context,
    ticket,
    wanted,
)

LOCAL = msgspec.structs.replace(CARD, features=[prompt_feature("TextContext")])
ME = 9  # the incarnation of the bench's worker


@pytest.fixture
def bench() -> Bench:
    return Bench(card=LOCAL)


def local(key: bytes = KEY, attempt: int = 1, **fields) -> Assign:
    context = make_context(fields.pop("tokens", PROMPT), fields.pop("new", 8))
    settings = {"context": context, "decode": "ipc:///d", "decode_incarnation": ME, "proof": PROOF}
    return Assign(request=key, attempt=attempt, deadline=60.0, **{**settings, **fields})


def test_a_local_request_is_computed_and_streamed_by_the_decode_worker_alone(bench):
    bench.hear(local(new=3, request_id="mine"))
    assert bench.one(Accepted) == Accepted(request=KEY, attempt=1)
    assert [(c.start, len(c.tokens)) for c in bench.plans[0].chunks] == [(0, PROMPT)]
    for token in (41, 42, 43):
        bench.step(token)
    assert bench.streamed() == [(10, 41), (11, 42), (12, 43)]
    terminal = bench.one(Terminal)
    assert (terminal.prefill, terminal.decode) == ("decode-0", "decode-0")
    assert (terminal.status, terminal.position) == ("maximum_length", 13)
    assert terminal.request_id == "mine"
    bench.hear(TerminalAck(requests=[(KEY, 1)]))
    bench.later(1.0)
    assert not bench.take(Terminal)
    assert bench.core.idle
    assert not bench.cache.pool.used


def test_a_long_prompt_is_computed_in_chunks_between_the_tokens_of_running_streams(bench):
    bench.run(new=50)
    bench.hear(local(OTHER, tokens=60))
    sizes = []
    for _ in range(8):
        bench.step()
        plan = bench.plans[0]
        assert (KEY + (1).to_bytes(8, "little")) in [c.request for c in plan.chunks]
        sizes += [len(c.tokens) for c in plan.chunks if len(c.tokens) > 1]
    assert sum(sizes) == 60 - 8  # two blocks are cached
    assert max(sizes) <= 16  # the token budget of a step


def test_a_repeated_assign_is_accepted_and_runs_once(bench):
    bench.hear(local())
    bench.hear(local())
    assert len(bench.take(Accepted)) == 2
    assert bench.core.load().requests_running == 1
    bench.hear(local(), "router-2")  # taken over by another router
    assert [(r, type(m)) for r, m in bench.routers[-2:]] == [
        (ROUTER, Moved),
        ("router-2", Accepted),
    ]
    bench.step()
    assert [r for r, m in bench.routers if isinstance(m, Tokens)] == ["router-2"]


@pytest.mark.parametrize("fields", [{"decode_incarnation": 8}, {"decode_incarnation": 0}])
def test_an_assignment_for_another_decode_worker_is_returned(bench, fields):
    bench.hear(local(**fields))
    assert bench.one(Terminal).code == HandoffFailed.code  # the router assigns it again
    assert not bench.plans


def test_a_worker_without_the_feature_returns_the_request():
    bench = Bench()
    bench.hear(local())
    assert bench.one(Terminal).code == HandoffFailed.code


def test_the_features_name_the_kinds_of_prompts_that_the_loaded_parts_compute():
    kinds = ["TextContext", "TextAndVisionContext", "PixelContext"]
    card = msgspec.structs.replace(CARD, kinds=kinds, features=["logit_bias"])
    assert with_local_prompts(card, vision=False).features == ["logit_bias", "prompts:TextContext"]
    assert with_local_prompts(card, vision=True).features == [
        "logit_bias", "prompts:TextContext", "prompts:TextAndVisionContext",
    ]  # fmt: skip


def test_a_context_that_cannot_run_ends_the_request(bench):
    bench.hear(local(context=msgspec.structs.replace(make_context(), task="embed")))
    assert bench.one(Terminal).code == "task_mismatch"
    assert not bench.plans


def test_a_cached_prefix_is_used_again(bench):
    bench.hear(local(new=1))
    bench.step(41)
    bench.hear(local(OTHER, new=1))
    assert [c.start for c in bench.plans[0].chunks] == [8]
    bench.step(41)
    assert [t.cached_tokens for t in bench.take(Terminal)] == [0, 8]


def test_blocks_that_a_prefill_worker_sent_are_never_used_for_local_prompts(bench):
    key = b"a" * 40  # its key's worker may have sent false KV
    reserve = Reserve(
        request=OTHER, attempt=1, incarnation=5, hashes=hashes_of(PROMPT), num_tokens=PROMPT,
        growth=4, serial=1, deadline=60.0,
        ticket=reserve_ticket(WORKER_KEY, OTHER, 1, Holder(5, key), TERMS),
    )  # fmt: skip
    bench.feed(FromPeer(b"p", reserve, key))
    (grant,) = bench.to_peer(Grant)
    manifest = bench.send(grant)
    commit = {"request": OTHER, "attempt": 1, "emitted": [42]}
    ask, bench.ask = bench.ask, lambda message: bench.feed(FromPeer(b"p", message, key))
    bench.commit(grant, manifest, **commit)
    bench.ask = ask
    assert bench.to_peer(Committed)
    bench.hear(local())
    while not any(c.request.startswith(KEY) for c in bench.plans[0].chunks):
        bench.step()
    assert [c.start for c in bench.plans[0].chunks if c.request.startswith(KEY)] == [0]


def test_an_abort_frees_the_blocks_and_a_late_assign_does_not_begin_again(bench):
    bench.hear(local(tokens=60))
    bench.step()
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.one(Aborted) == Aborted(request=KEY, attempt=1)
    bench.finish()
    assert not bench.cache.pool.used
    bench.hear(local())
    assert bench.one(Aborted) == Aborted(request=KEY, attempt=1)
    assert bench.core.idle


def test_an_attempt_that_ended_does_not_begin_again(bench):
    bench.hear(local(new=1))
    bench.step()
    bench.hear(local())
    assert len(bench.take(Accepted)) == 2  # its terminal is not acknowledged yet
    bench.hear(TerminalAck(requests=[(KEY, 1)]))
    bench.hear(local())
    assert bench.one(Aborted) == Aborted(request=KEY, attempt=1)


def test_the_limit_of_steps_is_that_of_the_assign_or_the_commit(bench):
    bench.hear(local(step_limit=0.02))
    bench.run(OTHER, step_limit=0.03)
    found = {job.key[0]: job.sequence.step_limit for job in bench.core._jobs}
    assert found == {KEY: 0.02, OTHER: 0.03}


def crowd(slo_ttft: float) -> tuple[Bench, dict[bytes, str]]:
    """Return a worker with a running prompt of 16 tokens a step, and four that wait for it."""
    bench, names = Bench(card=LOCAL, slo_ttft=slo_ttft), {}
    for number, tokens in enumerate((60, 90, 50, 20, 20)):
        key = bytes([65 + number]) * 16
        names[key] = chr(97 + number)
        assign = local(key, tokens=tokens, new=1, waited=0.0)
        assign.context.tokens.array[:] = np.arange(tokens) + 1 + 100 * number  # no shared prefix
        bench.hear(assign)
    return bench, names


def started(bench: Bench, names: dict[bytes, str]) -> str:
    """Compute everything; return the requests in the order of their first tokens."""
    order = ""
    while bench.plans:
        bench.now += 0.01
        bench.step()
        bench.core.check_integrity()
        order += "".join(names[one.request] for one in bench.take(Terminal))
    return order


def test_local_prompts_start_by_their_limit_and_else_by_arrival():
    bench, names = crowd(0.0)
    assert started(bench, names) == "abcde"
    bench, names = crowd(0.12)  # a step takes 10 ms: 240 tokens are 15 of them
    assert bench.core.load().requests_waiting + bench.core.load().requests_running == 5
    assert bench.core.load().tokens_waiting == 240
    assert started(bench, names)[-1] == "b"  # the longest one is given up


def test_a_local_prompt_that_waits_for_its_turn_can_end():
    bench, names = crowd(0.12)
    keys = list(names)
    bench.hear(Abort(request=keys[1], attempt=1))
    assert bench.one(Aborted).request == keys[1]
    bench.core.check_integrity()
    assert bench.core.load().tokens_waiting == 150
    bench.hear(local(keys[3], attempt=2, tokens=20, new=1))
    bench.core.check_integrity()
    assert set(started(bench, names)) == set("acde")
    assert bench.core.idle


def test_a_higher_attempt_replaces_a_local_one(bench):
    bench.hear(local(tokens=60))
    bench.hear(local(attempt=2, emitted=[41]))
    while not (streamed := bench.streamed()):
        bench.step()
    assert streamed == [(11, 43)]
    assert bench.core.load().requests_running == 1


def test_a_grant_for_a_higher_attempt_ends_a_local_one(bench):
    bench.hear(local(tokens=60))
    bench.reserve(attempt=2)
    assert bench.one(Aborted) == Aborted(request=KEY, attempt=1)
    assert bench.to_peer(Grant)
    bench.finish()
    assert not bench.plans


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_ticket_of_the_same_or_a_lower_attempt_gets_no_blocks_beside_a_local_one(bench, attempt):
    bench.hear(local(attempt=2))
    bench.reserve(attempt=attempt)
    assert bench.to_peer(Aborted) == [Aborted(request=KEY, attempt=attempt)]
    assert not bench.to_peer(Grant)
    bench.step()
    assert bench.streamed() == [(10, 43)]


def test_a_local_attempt_ends_the_grant_of_a_lower_one(bench):
    bench.reserve()
    bench.hear(local(attempt=2))
    assert bench.receiver.granted == 0
    bench.step()
    assert bench.streamed() == [(10, 43)]


def test_a_local_attempt_ends_a_lower_one_that_was_handed_over(bench):
    bench.run()
    bench.streamed()
    bench.hear(local(attempt=2, emitted=[42]))
    assert not bench.receiver.held()
    while not (streamed := bench.streamed()):
        bench.step()
    assert streamed == [(11, 43)]
    assert bench.core.load().requests_running == 1


def test_a_draining_worker_takes_no_local_request(bench):
    bench.hear(local(OTHER))
    bench.feed(DrainRequested())
    bench.hear(local())
    assert (bench.one(Busy).reason, bench.core.is_drained) == ("draining", False)


def test_a_full_queue_is_busy(bench, monkeypatch):
    monkeypatch.setattr(bench.core, "_max_queue", 2)
    for request in (KEY, OTHER):
        bench.hear(local(request))
    third = b"t" * 16
    bench.hear(local(third))
    assert bench.one(Busy).request == third
    bench.step()  # both have their first tokens
    bench.hear(local(third))
    assert bench.take(Accepted)[-1].request == third


def test_a_deadline_ends_a_prompt_that_waits(bench):
    bench.hear(local())
    bench.later(60.5)
    assert bench.one(Terminal).code == "deadline_exceeded"
    bench.finish()
    assert not bench.cache.pool.used


def test_a_replay_continues_after_the_tokens_that_the_client_has(bench):
    bench.hear(local(emitted=[41, 42], new=4))
    assert sum(len(c.tokens) for c in bench.plans[0].chunks) == PROMPT + 2
    bench.step(43)
    bench.step(44)
    assert bench.streamed() == [(12, 43), (13, 44)]
    assert bench.one(Terminal).position == 14


@pytest.mark.parametrize(
    ("emitted", "status"), [([41, 0], "end_of_sequence"), ([41, 42], "maximum_length")]
)
def test_a_replay_whose_tokens_already_end_the_request_computes_nothing(bench, emitted, status):
    bench.hear(local(emitted=emitted, new=2))
    terminal = bench.one(Terminal)
    assert (terminal.position, terminal.code, terminal.status) == (12, None, status)
    assert not bench.plans


def test_a_grammar_is_compiled_before_the_prompt_begins(bench):
    context = msgspec.structs.replace(make_context(), json_schema='{"type":"integer"}')
    bench.hear(local(context=context))
    (task,) = wanted(bench)
    assert (task.key, bench.plans) == ((KEY, 1), [])

    class Any:
        def consume_token(self, token: int) -> bool:
            return True

        def allowed(self) -> np.ndarray:
            return np.ones(100, np.bool_)

    bench.feed(GrammarDone((KEY, 1), Any()))
    bench.step()
    assert bench.streamed() == [(10, 43)]

    bench.hear(local(OTHER, context=context))
    bench.feed(GrammarDone((OTHER, 1), SchemaTooComplex("too large")))
    assert bench.one(Terminal).code == SchemaTooComplex.code


def test_an_abort_drops_the_grammar_of_a_local_request(bench):
    context = msgspec.structs.replace(make_context(), json_schema='{"type":"integer"}')
    bench.hear(local(context=context))
    bench.hear(Abort(request=KEY, attempt=1))
    assert [type(a) for a in bench.other if isinstance(a, CompileGrammar | DropGrammar)] == [
        CompileGrammar, DropGrammar,
    ]  # fmt: skip
    assert bench.core.idle


def test_another_router_adopts_a_local_request_with_its_proof(bench):
    bench.hear(local())
    bench.hear(Adopt(request=KEY, position=10), "router-2")
    assert bench.take(Accepted)[-1] == Accepted(request=KEY, attempt=1, proof=PROOF)
    assert [run.tokens for run in bench.one(Tokens).runs] == [[]]  # its prompt is not computed yet
    bench.step()
    assert [r for r, m in bench.routers if isinstance(m, Tokens)][-1] == "router-2"
    bench.feed(RouterUp("router-2"))
    (held,) = bench.one(Hello).requests
    assert (held.attempt, held.position, held.router, held.proof) == (1, 11, "router-2", PROOF)


def test_a_local_prompt_that_is_preempted_is_computed_again():
    bench = Bench(blocks=8, card=LOCAL)
    bench.hear(local(new=14))
    bench.hear(local(OTHER, new=14))
    while bench.plans:
        bench.step()
    assert bench.core.load().preemptions
    streamed = bench.streamed()
    assert len(streamed) == 28
    assert len(bench.take(Terminal)) == 2
    assert not bench.cache.pool.used


def test_a_failed_prompt_ends_its_request_alone(bench):
    bench.run(OTHER, new=50)
    bench.hear(local())
    mine = KEY + (1).to_bytes(8, "little")
    while mine not in [chunk.request for chunk in bench.plans[0].chunks]:
        bench.step()
    plan = bench.plans.pop(0)
    drawn = tuple(Sampled(c.request, 43) for c in plan.chunks if c.request != mine)
    failed: dict[bytes, BatonError] = {mine: InternalError("the step failed")}
    bench.feed(StepDone(StepResult(plan.step, drawn, 0.01, plan.num_tokens, failed)))
    assert bench.one(Terminal).request == KEY
    assert bench.core.load().requests_running == 1


def test_the_ticket_of_the_bench_is_valid(bench):
    """The refusals above are about attempts, not about tickets."""
    bench.ask(msgspec.structs.replace(bench.reserve(OTHER), ticket=ticket(OTHER)))
    assert bench.to_peer(Grant)
