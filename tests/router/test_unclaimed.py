"""Cancels before their Submit, and requests that outlive their router."""

from __future__ import annotations

from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Adopt,
    Assign,
    Cancel,
    RequestState,
    Terminal,
    TerminalAck,
)
from baton.router.records import TAKEOVER
from baton.router.request_table import CANCELLED_KEEP_S

from .conftest import KEY


def held(router="router", attempt=1, done=False, key=KEY):
    return RequestState(key, attempt, 15, 10, done, router)


def test_a_submit_behind_its_cancel_does_not_start_it(bench):
    prefill, _ = bench.pair()
    bench.client(Cancel(request_id="r"))
    bench.submit()
    assert [m.status for m in bench.terminals(KEY)] == ["cancelled", "cancelled"]
    assert not bench.take(prefill, Assign)
    bench.assert_nothing_kept()


def test_a_resume_behind_its_cancel_does_not_start_it(make_bench, submitted):
    new = make_bench()
    prefill, _ = new.pair()
    new.client(Cancel(request_id="r", request=KEY))
    new.client(new.resume_message(submitted, [5]))
    new.advance(10.0)
    assert {m.status for m in new.terminals(KEY)} == {"cancelled"}
    assert not new.take(prefill, Assign)
    new.assert_nothing_kept()


def test_the_id_can_be_used_again_a_while_after_an_early_cancel(bench):
    bench.pair()
    bench.client(Cancel(request_id="r"))
    bench.advance(CANCELLED_KEEP_S + 1)
    bench.run()
    assert bench.core.unfinished == 1


def test_a_repeated_cancel_of_an_ended_request_does_not_block_its_id(bench):
    prefill, _ = bench.pair()
    key, assign = bench.run()
    prefill.tokens(key, 10, 5)
    prefill.end(key, 11)
    bench.ack(key)
    bench.client(Cancel(request_id="r", request=key))
    bench.submit(new=9)
    assert bench.one(prefill, Assign).attempt == assign.attempt + 1


def test_nobody_cancels_the_request_of_another_connection(bench):
    bench.pair()
    bench.client(Cancel(request_id="r", request=KEY), b"stranger")
    bench.run()
    assert bench.core.unfinished == 1


def test_a_cancel_after_a_restart_frees_what_a_worker_reported(bench):
    decode = bench.join("decode", requests=[held(attempt=2)])
    bench.client(Cancel(request_id="r", request=KEY))
    assert bench.one(decode, Abort).attempt == 2


def test_a_cancel_after_a_restart_frees_what_a_worker_reports_later(bench):
    bench.client(Cancel(request_id="r", request=KEY))
    decode = bench.join("decode", requests=[held()])
    assert bench.one(decode, Abort).request == KEY


def test_what_nobody_resumes_is_freed_after_a_while(make_bench):
    bench = make_bench(orphan_grace_s=5.0)
    decode = bench.join("decode", requests=[held(), held(key=b"x" * 16, done=True)])
    bench.advance(4.9)
    assert not bench.take(decode, Abort)
    bench.advance(0.2)
    assert {m.request for m in bench.take(decode, Abort)} == {KEY, b"x" * 16}
    bench.advance(1.0)
    assert bench.take(decode, Abort)  # repeated until confirmed
    for key in (KEY, b"x" * 16):
        decode.say(Aborted(request=key, attempt=1))
    bench.take(decode, Abort)
    bench.advance(5.0)
    assert not bench.take(decode, Abort)


def test_a_later_hello_with_an_unknown_request_is_answered_by_an_abort(bench):
    bench.advance(6.0)
    decode = bench.join("decode", requests=[held()])
    assert bench.one(decode, Abort).request == KEY


def test_requests_of_another_router_are_left_alone(bench):
    decode = bench.join("decode", requests=[held(router="router-2")])
    bench.advance(20.0)
    assert not bench.take(decode, Abort)


def test_a_request_that_was_resumed_in_time_runs_on(make_bench, submitted):
    new = make_bench()
    decode = new.join("decode", requests=[held()])
    new.advance(4.0)
    new.client(new.resume_message(submitted, [5]))
    assert new.one(decode, Adopt).position == 11
    decode.tokens(KEY, 11, 6)
    new.advance(10.0)
    assert not new.take(decode, Abort)


def test_a_client_that_comes_after_the_grace_is_replayed_above_the_orphan(make_bench, submitted):
    new = make_bench()
    prefill = new.join("prefill")
    decode = new.join("decode", requests=[held(attempt=3)])
    new.advance(6.0)
    assert {m.attempt for m in new.take(decode, Abort)} == {3}
    decode.say(Aborted(request=KEY, attempt=3))
    new.client(new.resume_message(submitted, [5], attempt=2))
    new.deny(KEY)
    assign = new.one(prefill, Assign)
    assert (assign.attempt, assign.emitted) == (3 + TAKEOVER, [5])


def test_the_end_of_a_reported_request_waits_for_its_client(make_bench, submitted):
    """An early TerminalAck would make the worker drop tokens that the client still needs."""
    new = make_bench()
    decode = new.join("decode", requests=[held(done=True)])
    decode.end(KEY, 12)
    assert not new.take(decode, TerminalAck)
    new.client(new.resume_message(submitted, [5]))
    assert new.one(decode, Adopt).position == 11
    decode.tokens(KEY, 11, 6)
    decode.end(KEY, 12)
    assert new.one(decode, TerminalAck).requests == [(KEY, 1)]
    assert new.streamed(KEY) == [(11, 6)]
    assert isinstance(new.sent[b"client"][-1], Terminal)


def test_tokens_of_an_unknown_request_are_aborted_after_the_grace(bench):
    _, decode = bench.pair()
    decode.tokens(KEY, 12, 5)
    assert not bench.take(decode, Abort)
    bench.advance(6.0)
    decode.tokens(KEY, 13, 5)
    assert bench.one(decode, Abort).request == KEY
