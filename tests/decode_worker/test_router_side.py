"""The decode worker's messages to routers, also while it drains."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.scheduling.plan import Sampled, StepResult
from baton.proto.contexts.outputs import LogProbabilities, TokenLogProbs
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Busy,
    Committed,
    Drained,
    Grant,
    Heartbeat,
    Hello,
    Moved,
    Rejected,
    Share,
    Terminal,
    TerminalAck,
    Tokens,
)
from baton.worker.events import DrainRequested, Exit, RouterUp, StepDone, Tick

from .bench import KEY, OTHER, PROMPT, PROOF, ROUTER, make_context

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
    """A step whose token, 43, has a log-probability that names the step."""
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
    # This worker lacks what an earlier attempt drew; the rest is sent as it was.
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
