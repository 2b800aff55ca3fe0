"""The races of the handoff protocol, and that the router handles each of them."""

from __future__ import annotations

from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Assign,
    Moved,
    PeerDead,
    Rejected,
    RequestState,
    Submitted,
    Terminal,
    TerminalAck,
    TokenRun,
    Tokens,
)
from baton.router.records import TAKEOVER

from .conftest import KEY


def test_abort_before_a_late_reserve_is_repeated_until_the_worker_confirms(bench):
    prefill, decode = bench.pair()
    key, assign = bench.run()
    bench.client_gone()
    assert bench.one(prefill, Abort).attempt == assign.attempt
    assert bench.one(decode, Abort).request == key
    bench.advance(0.5)
    assert bench.take(prefill, Abort)
    assert bench.take(decode, Abort)
    prefill.say(Aborted(request=key, attempt=1))
    decode.say(Aborted(request=key, attempt=1))
    bench.advance(2.0)
    assert not bench.take(prefill, Abort)
    assert not bench.take(decode, Abort)
    bench.assert_nothing_kept()


def test_abort_crosses_commit(bench):
    """The decode worker took over before the Abort arrived: its tokens cause another Abort."""
    _prefill, decode = bench.pair()
    key, _assign = bench.run()
    bench.client_gone()
    decode.say(Aborted(request=key, attempt=1))
    bench.take(decode, Abort)
    decode.tokens(key, 10, 5)
    assert bench.one(decode, Abort).attempt == 1
    assert not bench.streamed(key)


def test_duplicate_assign_answers_and_terminals_count_once(bench):
    prefill, decode = bench.pair()
    key, assign = bench.run()
    prefill.accept(assign)
    prefill.tokens(key, 10, 5)
    prefill.report(assign)
    prefill.report(assign)
    decode.tokens(key, 10, 5)
    decode.tokens(key, 11, 6)
    decode.tokens(key, 11, 6)
    for _ in range(3):
        decode.end(key, 12)
    prefill.accept(assign)
    assert bench.streamed(key) == [(10, 5), (11, 6)]
    assert len(bench.terminals(key)) == 1
    assert len(bench.take(decode, TerminalAck)) == 3
    assert bench.core.handoffs.count == 1
    assert not bench.take(prefill, Abort)


def test_assign_is_repeated_with_back_off_until_accepted(bench):
    prefill, _ = bench.pair()
    bench.submit()
    bench.advance(3.0)
    sent = bench.take(prefill, Assign)
    assert 3 <= len(sent) <= 6
    assert {(m.request, m.attempt) for m in sent} == {(sent[0].request, 1)}
    assert sent[-1].deadline < sent[0].deadline - 1
    prefill.accept(sent[0])
    bench.advance(10.0)
    assert not bench.take(prefill, Assign)


def test_prefill_dies_half_way(served):
    key, _assign = served.run()
    first = next(w for w in served.workers if key in _requests(served, w, "prefill"))
    first.gone()
    second, again = served.find(Assign)
    assert second is not first
    assert again.attempt == 2
    assert again.emitted == []
    served.advance(5.2)
    for worker in served.workers:
        if worker is not first:
            dead = served.one(worker, PeerDead)
            assert dead.incarnation == first.hello.incarnation


def test_higher_attempt_while_the_old_prefill_was_only_stopped(served):
    """The worker continues after it was declared dead: no token of its old attempt is relayed."""
    key, _assign = served.run()
    first = next(w for w in served.workers if key in _requests(served, w, "prefill"))
    first.gone()
    second, again = served.find(Assign)
    second.accept(again)
    served.advance(5.2)
    first.tokens(key, 10, 999)
    assert served.one(first, Rejected).code == "endpoint_unknown"
    first.say(first.hello)
    assert served.one(first, Rejected).code == "endpoint_dead"
    assert served.core.registry.known(first.hello.incarnation) is None
    assert not served.streamed(key)
    renewed = served.join("prefill", int(first.id[-1]))
    assert served.core.registry.known(renewed.hello.incarnation) is not None


def test_lower_attempts_of_a_live_worker_are_ignored_and_aborted(served):
    key, assign = served.run()
    first = next(w for w in served.workers if key in _requests(served, w, "prefill"))
    decode = served.decode_of(assign)
    decode.gone()
    _worker, _again = served.find(Assign)
    served.take(first, Abort)
    first.tokens(key, 10, 999, attempt=1)
    first.end(key, 11, attempt=1)
    assert not served.streamed(key)
    assert not served.terminals(key)
    assert served.one(first, TerminalAck).requests == [(key, 1)]


def test_decode_dies_after_committed_before_its_first_token(served):
    key, assign = served.run()
    prefill = next(w for w in served.workers if key in _requests(served, w, "prefill"))
    decode = served.decode_of(assign)
    prefill.tokens(key, 10, 41)
    prefill.report(assign)
    decode.gone()
    worker, again = served.find(Assign)
    assert again.attempt == 2
    assert again.emitted == [41]
    assert again.decode != decode.endpoint
    worker.accept(again)
    worker.tokens(key, 11, 42, attempt=2)
    assert served.streamed(key) == [(10, 41), (11, 42)]


def test_decode_dies_in_mid_stream_and_the_replay_starts_behind_what_was_passed_on(served):
    key, assign = served.run()
    decode = served.decode_of(assign)
    decode.tokens(key, 10, 1, 2, 3)
    decode.gone()
    _, again = served.find(Assign)
    assert again.emitted == [1, 2, 3]
    other = next(w for w in served.workers if w.endpoint == again.decode)
    other.tokens(key, 12, 3, 4, attempt=2)
    other.end(key, 14, attempt=2)
    assert served.streamed(key) == [(10, 1), (11, 2), (12, 3), (13, 4)]
    assert served.terminals(key)[0].attempt == 2


def test_prefill_dies_after_commit_and_its_first_token_was_lost(bench):
    prefill, decode = bench.pair()
    key, assign = bench.run()
    prefill.report(assign)
    prefill.gone()
    decode.tokens(key, 10, 5)
    decode.tokens(key, 11, 6)
    decode.end(key, 12)
    assert bench.streamed(key) == [(10, 5), (11, 6)]
    assert bench.terminals(key)[0].status == "end_of_sequence"
    assert not [m for w in bench.workers for m in bench.take(w, Assign)]


def test_first_token_from_both_workers_passes_once(bench):
    prefill, decode = bench.pair()
    key, assign = bench.run()
    decode.tokens(key, 10, 5)
    prefill.tokens(key, 10, 5)
    prefill.report(assign)
    decode.tokens(key, 11, 6)
    prefill.gone()
    decode.tokens(key, 12, 7)
    assert bench.streamed(key) == [(10, 5), (11, 6), (12, 7)]


def test_router_dies_and_a_worker_that_has_the_request_is_found_by_its_hello(make_bench, submitted):
    new = make_bench()
    new.client(new.resume_message(submitted, [5, 6]))
    prefill = new.join("prefill")
    assert not new.take(prefill, Assign)
    decode = new.join("decode", requests=[RequestState(KEY, 1, 15, 10)])
    assert new.one(decode, Adopt).position == 12
    new.advance(3.0)
    assert not new.take(prefill, Assign)
    decode.tokens(KEY, 12, 7, 8, 9)
    decode.end(KEY, 15)
    assert new.streamed(KEY) == [(12, 7), (13, 8), (14, 9)]
    assert len(new.terminals(KEY)) == 1


def test_router_dies_and_the_hello_comes_before_the_client(make_bench, submitted):
    new = make_bench()
    new.join("prefill")
    decode = new.join("decode", requests=[RequestState(KEY, 3, 15, 10)])
    new.client(new.resume_message(submitted, [5], attempt=2), b"client-2")
    assert new.one(decode, Adopt).position == 11
    decode.tokens(KEY, 11, 6, attempt=3)
    assert new.streamed(KEY, b"client-2") == [(11, 6)]


def test_router_dies_between_assign_and_commit(make_bench, submitted):
    """Only the prefill worker lists the request; the decode worker proves its assignment later."""
    new = make_bench()
    new.client(new.resume_message(submitted, []))
    prefill = new.join("prefill", requests=[RequestState(KEY, 1, 10, 10)])
    decode = new.join("decode")
    assert new.one(prefill, Adopt).position == 10
    decode.tokens(KEY, 10, 5)
    assert not new.streamed(KEY), "the decode worker has not proved its assignment"
    assert new.one(decode, Adopt).position == 10
    decode.adopt(Tokens(runs=[TokenRun(KEY, 1, 10, [5])]))
    decode.tokens(KEY, 11, 6)
    decode.end(KEY, 12)
    assert new.streamed(KEY) == [(10, 5), (11, 6)]
    assert not new.take(prefill, Assign)


def test_router_dies_with_the_attempt_counter(make_bench, submitted):
    """No worker reports it: after ``recovery_s`` it runs again with a higher attempt number."""
    new = make_bench(recovery_s=1.5)
    new.client(new.resume_message(submitted, [5, 6], attempt=4))
    new.pair()
    new.advance(1.0)
    assert not [m for w in new.workers for m in new.take(w, Assign)]
    new.advance(0.55)
    _, assign = new.find(Assign)
    assert (assign.attempt, assign.emitted) == (4 + TAKEOVER, [5, 6])


def test_a_stale_attempt_in_a_hello_is_not_adopted(make_bench, submitted):
    new = make_bench(recovery_s=0.0)
    new.join("prefill")
    decode = new.join("decode", requests=[RequestState(KEY, 1, 15, 10)])
    new.client(new.resume_message(submitted, [5], attempt=2))
    decode.tokens(KEY, 11, 6)  # the answer to the search
    assert new.one(decode, Abort).attempt == 1
    new.deny(KEY)
    _, assign = new.find(Assign)
    assert assign.attempt == 2 + TAKEOVER
    assert not new.streamed(KEY)


def test_resume_at_another_router_moves_the_request(make_bench):
    old = make_bench()
    _prefill, decode = old.pair()
    key, _assign = old.run()
    decode.tokens(key, 10, 5)
    decode.say(Moved(request=key, router="router-2"))
    assert old.one(b"client", Moved).router == "router-2"
    old.assert_nothing_kept()
    assert not old.take(decode, Abort)
    decode.tokens(key, 11, 6)
    assert old.streamed(key) == [(10, 5)]


def test_late_tokens_of_a_freed_attempt_are_no_sign_of_life(bench):
    """The client reconnected: its request was aborted, and the router searches for it."""
    prefill, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 5)
    submitted = bench.one(b"client", Submitted)
    bench.client_gone()
    bench.client(bench.resume_message(submitted, [5]), b"client-2")
    decode.tokens(key, 11, 6)  # sent before the Abort arrived
    for worker in (prefill, decode):
        worker.say(Aborted(request=key, attempt=1))
    bench.deny(key)
    bench.advance(3.0)
    again = bench.take(prefill, Assign)[0]
    assert again.attempt > 1 and again.emitted == [5]


def test_a_client_that_doubts_has_the_worker_asked(bench):
    """A Resume over the same connection with all tokens shows that the client suspects a stall."""
    _prefill, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 5)
    submitted = bench.one(b"client", Submitted)
    bench.client(bench.resume_message(submitted, []))
    assert not bench.take(decode, Adopt), "the router has tokens that the client lacks"
    bench.client(bench.resume_message(submitted, [5]))
    assert bench.one(decode, Adopt).position == 11
    decode.say(Aborted(request=key, attempt=0))
    _, again = bench.find(Assign)
    assert again.attempt == 2 and again.emitted == [5]


def test_tokens_twice_or_overlapping_reach_the_client_once(bench):
    _prefill, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 1, 2)
    decode.tokens(key, 10, 1, 2)
    decode.tokens(key, 11, 2, 3, 4)
    decode.tokens(key, 9, 0, 1)
    assert bench.streamed(key) == [(10, 1), (11, 2), (12, 3), (13, 4)]


def test_a_gap_is_asked_for_again_and_nothing_behind_it_passes(bench):
    _prefill, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 1)
    decode.tokens(key, 12, 3)
    decode.tokens(key, 13, 4)
    assert bench.one(decode, Adopt).position == 11
    assert bench.streamed(key) == [(10, 1)]
    bench.advance(0.6)
    assert bench.take(decode, Adopt)  # repeated, in case it was lost
    decode.tokens(key, 11, 2, 3, 4)
    bench.advance(5.0)
    assert not bench.take(decode, Adopt)
    assert [t for _, t in bench.streamed(key)] == [1, 2, 3, 4]


def test_a_terminal_waits_for_tokens_that_are_missing(bench):
    _prefill, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 1)
    decode.end(key, 13)
    assert not bench.terminals(key)
    assert not bench.take(decode, TerminalAck)
    assert bench.one(decode, Adopt).position == 11
    decode.say(Tokens(runs=[TokenRun(key, 1, 11, [2, 3])]))
    assert bench.streamed(key) == [(10, 1), (11, 2), (12, 3)]
    assert bench.terminals(key)[0].position == 13
    assert isinstance(bench.sent[b"client"][-1], Terminal)
    assert bench.one(decode, TerminalAck).requests == [(key, 1)]


def test_an_accepted_for_a_forgotten_request_is_aborted(bench):
    """A delayed Assign may start an ended request again at the prefill worker."""
    prefill, _decode = bench.pair()
    key, _assign = bench.run()
    prefill.tokens(key, 10, 5)
    prefill.end(key, 11)
    bench.ack(key)
    bench.take(prefill, Abort)
    prefill.say(Accepted(request=key, attempt=1))
    assert bench.one(prefill, Abort).attempt == 1


def _requests(bench, worker, role):
    found = bench.core.registry.by_identity(worker.identity)
    return found.requests if found is not None and found.role == role else {}
