"""The record of a request, its transition table, and the memory it is charged."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tracemalloc

import msgspec
import pytest

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.errors import InternalError
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import ClientToRouter, Submit, TokenRun
from baton.proto.work import work_of
from baton.router.admission import context_bytes
from baton.router.clients import runs_from
from baton.router.integrity import HOLDINGS, check_request
from baton.router.records import TAKEOVER, Attempt, Request
from baton.router.states import PLACED, RUNNING, TRANSITIONS, State, Step


@pytest.mark.parametrize(("state", "step"), list(itertools.product(State, Step)))
def test_every_step_is_in_the_table_or_raises(context, state, step):
    request = Request(b"k" * 16, "r", context(), 10.0, Attempt(1))
    request.state = state
    if (state, step) in TRANSITIONS:
        request.step(step)
        assert request.state is TRANSITIONS[state, step]
    else:
        with pytest.raises(InternalError, match=f"cannot {step.value} when {state.value}"):
            request.step(step)
        assert request.state is state


def test_every_state_can_reach_the_end():
    reachable = {State.FORGOTTEN}
    while True:
        more = {a for (a, _), b in TRANSITIONS.items() if b in reachable} - reachable
        if not more:
            break
        reachable |= more
    assert reachable == set(State)


def test_only_an_end_leads_out_and_only_once():
    into_end = {a for (a, step), _ in TRANSITIONS.items() if step is Step.END}
    assert into_end == set(State) - {State.ENDED, State.FORGOTTEN}


def test_the_table_of_holdings_has_every_state_and_a_server_exactly_while_running():
    assert set(HOLDINGS) == set(State)
    assert {state for state, held in HOLDINGS.items() if held.server} == RUNNING
    assert {a for (a, step), _ in TRANSITIONS.items() if step is Step.REQUEUE} == {
        *PLACED,
        State.RECOVERING,
    }


def test_an_attempt_without_what_its_state_says_is_a_bug(context):
    request = Request(b"k" * 16, "r", context(), 10.0, Attempt(1))
    request.slot = 0
    check_request(request)
    request.step(Step.ASSIGN)
    with pytest.raises(InternalError, match=r"assigned.*wrong load, assignee"):
        check_request(request)


def test_a_retry_starts_without_anything_of_the_failed_attempt(context):
    attempt = Request(b"k" * 16, "r", context(), 10.0, Attempt(1)).attempt
    attempt.answered, attempt.adopts, attempt.prefill_cost = False, 3, 10
    after = attempt.next()
    assert dataclasses.asdict(after) == dataclasses.asdict(Attempt(2))
    after.foreign = True
    assert after.next().number == 2 + TAKEOVER
    assert not after.next().foreign


def test_tokens_and_log_probabilities_are_kept_for_a_client_that_comes_back(context):
    request = Request(b"k" * 16, "r", context(log_probabilities=2), 10.0, Attempt(1))
    first = TokenLogProbs.of(-0.5, {1: -0.5})
    second = TokenLogProbs.of(-0.25, {2: -0.25})
    request.keep(TokenRun(request.key, 1, 10, [1], [first]))
    request.keep(TokenRun(request.key, 1, 11, [2], [second]))
    assert request.next == 12
    assert runs_from(request, 0) == [TokenRun(request.key, 1, 10, [1, 2], [first, second])]
    assert runs_from(request, 11) == [TokenRun(request.key, 1, 11, [2], [second])]
    assert runs_from(request, 12) == []
    assert request.remaining == 18


def test_media_are_kept_with_the_tokens_that_complete_them(context):
    request = Request(b"k" * 16, "r", context(), 10.0, Attempt(1))
    request.keep(TokenRun(request.key, 1, 10, [1, 2, 3], None, b"first"))
    request.keep(TokenRun(request.key, 1, 13, [4]))
    request.keep(TokenRun(request.key, 1, 14, [5, 6], None, b"second"))
    request.keep(TokenRun(request.key, 1, 16, [7]))

    def runs(position):
        return [(r.position, r.tokens, r.media) for r in runs_from(request, position)]

    last = (16, [7], None)
    assert runs(0) == [(10, [1, 2, 3], b"first"), (13, [4, 5, 6], b"second"), last]
    assert runs(12) == [(12, [3], b"first"), (13, [4, 5, 6], b"second"), last]
    assert runs(13) == [(13, [4, 5, 6], b"second"), last]
    assert runs(16) == [last]
    assert runs(17) == []


@pytest.mark.parametrize("tokens", [[1], [1, 2]])
def test_an_error_while_tokens_are_kept_leaves_none_without_its_media(context, tokens):
    entries = [TokenLogProbs.of(-0.5, {1: -0.5}) for _ in tokens]
    found = set()
    for lines in range(20):
        request = Request(b"k" * 16, "r", context(log_probabilities=1), 10.0, Attempt(1))
        run = TokenRun(request.key, 1, 10, tokens, entries, b"media")
        left = [lines]

        def trace(frame, event, _argument, left=left):
            if event == "line" and frame.f_code is Request.keep.__code__:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyError
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            request.keep(run)
        except KeyError:
            pass
        finally:
            sys.settrace(before)
        kept = runs_from(request, 0)
        assert kept in ([], [run])
        found.add(bool(kept))
    assert found == {False, True}


def test_a_text_costs_the_same_memory_made_here_or_received(context):
    made = context(10, 20)
    frames = EnvelopeEncoder().encode([Submit(request_id="r", context=made)])
    (came,) = EnvelopeDecoder(ClientToRouter).decode([bytes(frame) for frame in frames])
    assert context_bytes(came.context) == context_bytes(made)


def test_new_tokens_are_bounded_by_both_limits(context):
    assert work_of(context(10, 20)).tokens == 20
    assert work_of(context(10, None, max_length=50)).tokens == 40
    assert work_of(context(10, 100, max_length=50)).tokens == 40


def test_a_request_is_charged_for_all_it_may_grow_to(context):
    small, large = context_bytes(context(10, 20)), context_bytes(context(10, 2000))
    assert large - small == 4 * 1980


@pytest.mark.parametrize("likely", [1, 5, 20])
def test_log_probabilities_are_charged_with_what_they_take(context, likely):
    request = context(10, 1000, log_probabilities=likely)
    charged = context_bytes(request) - context_bytes(context(10, 1000))
    entry = TokenLogProbs.of(-0.5, {token << 16: -0.5 for token in range(likely)})
    sent = msgspec.msgpack.encode([entry] * 1000)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # keep other threads, such as pytest-xdist's, out of the trace
    tracemalloc.start()
    kept = msgspec.msgpack.decode(sent, type=list[TokenLogProbs])
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    sys.setswitchinterval(interval)
    assert len(kept) == 1000
    assert taken < charged < 1.5 * taken
