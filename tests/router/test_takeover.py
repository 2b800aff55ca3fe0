"""A router adopts a request of another router, after its death or after a client moved."""

from __future__ import annotations

import pytest

from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Assign,
    Busy,
    Moved,
    PeerDead,
    Rejected,
    RequestState,
    Resume,
    Submitted,
    Terminal,
    TerminalAck,
    TokenRun,
    Tokens,
    Welcome,
)
from baton.router.events import StopRequested
from baton.router.records import TAKEOVER
from baton.router.states import State

from .conftest import KEY

SECOND = b"second"


@pytest.fixture
def pair(make_bench):
    """A second router, its workers, and a Resume: the first router relayed tokens 5 and 6."""
    old = make_bench(name="router-0")
    old.pair()
    old.run()
    new = make_bench(name="router-1", recovery_s=0.0)
    new.join("prefill")
    new.join("decode")
    message = old.resume_message(old.one(b"client", Submitted), [5, 6])
    return new, *new.workers, message


def resumed(pair):
    new, prefill, decode, message = pair
    new.client(message, SECOND)
    assert new.one(SECOND, Submitted).request == KEY
    return new, prefill, decode, new.core.table.requests[KEY]


def no(worker):
    worker.say(Aborted(request=KEY, attempt=0))


# --------------------------------------------------------------------------- the search


def test_every_worker_is_asked_and_the_one_that_has_it_goes_on(pair):
    new, prefill, decode, request = resumed(pair)
    assert new.one(prefill, Adopt).position == 12
    assert new.one(decode, Adopt).position == 12
    no(prefill)
    decode.tokens(KEY, 12, 7)
    assert new.streamed(KEY, SECOND) == [(12, 7)]
    assert (request.state, request.attempt.number) == (State.DECODING, 1)
    assert not new.take(prefill, Assign)
    decode.end(KEY, 13)
    assert new.one(SECOND, Terminal).status == "end_of_sequence"
    new.ack(KEY, SECOND)
    new.assert_nothing_kept()


def test_a_prefill_worker_that_proves_itself_after_the_handoff_keeps_nothing(pair):
    """Its answer to the search was on its way while the decode worker's tokens arrived."""
    new, prefill, decode, request = resumed(pair)
    decode.tokens(KEY, 12, 7)
    proof = prefill.proof(TokenRun(KEY, 1, 12, []))
    prefill.say(Accepted(request=KEY, attempt=1, proof=proof))
    assert (request.attempt.server.id, request.state) == (decode.id, State.DECODING)
    decode.end(KEY, 13)
    new.ack(KEY, SECOND)
    new.assert_nothing_kept()


def test_a_later_attempt_of_another_router_replaces_one_that_was_handed_over(pair):
    new, prefill, decode, request = resumed(pair)
    decode.tokens(KEY, 12, 7)
    prefill.say(Accepted(request=KEY, attempt=2, proof=prefill.proof(TokenRun(KEY, 2, 12, []))))
    assert (request.attempt.number, request.attempt.server.id) == (2, prefill.id)
    assert request.state is State.PREFILLING
    prefill.end(KEY, 13, attempt=2)
    new.ack(KEY, SECOND)
    new.assert_nothing_kept()


def test_an_empty_run_says_that_it_is_here(pair):
    new, _prefill, decode, request = resumed(pair)
    decode.tokens(KEY, 12)
    assert request.attempt.server is new.core.registry.by_identity(decode.identity)


def test_the_end_is_taken_over_as_well(pair):
    new, _prefill, decode, _ = resumed(pair)
    decode.end(KEY, 12)
    assert new.one(SECOND, Terminal).status == "end_of_sequence"
    assert new.one(decode, TerminalAck).requests == [(KEY, 1)]


def test_what_is_on_its_way_from_prefill_to_decode_is_found_in_the_second_round(pair):
    """The decode worker denies before the Commit arrives, the prefill worker after sending it."""
    new, prefill, decode, _ = resumed(pair)
    new.take(decode, Adopt)
    no(decode)
    no(prefill)
    assert not new.take(prefill, Assign)
    new.one(decode, Adopt)
    decode.tokens(KEY, 12, 7)
    assert new.streamed(KEY, SECOND) == [(12, 7)]


def test_what_nobody_has_is_run_anew_far_above_the_other_routers_attempts(pair):
    new, prefill, _decode, _ = resumed(pair)
    new.deny(KEY)
    assign = new.one(prefill, Assign)
    assert (assign.attempt, assign.emitted) == (1 + TAKEOVER, [5, 6])


def test_a_silent_worker_is_asked_again_until_it_is_dead(pair):
    new, prefill, decode, _ = resumed(pair)
    new.join("decode", 1)
    new.take(decode, Adopt)
    no(prefill)
    new.advance(0.6)
    assert new.take(decode, Adopt)
    decode.gone()
    new.advance(0.6)
    new.deny(KEY)
    assert new.one(prefill, Assign).attempt == 1 + TAKEOVER


def test_the_search_ends_when_a_worker_stays_silent(pair):
    new, prefill, decode, _ = resumed(pair)
    no(prefill)
    new.advance(2.6)  # it still sends heartbeats
    new.take(decode, Adopt)
    assert new.one(prefill, Assign).attempt == 1 + TAKEOVER


def test_two_attempts_that_run_are_told_apart(pair):
    new, prefill, decode, request = resumed(pair)
    prefill.tokens(KEY, 12, attempt=1)
    decode.adopt(Tokens(runs=[TokenRun(KEY, 2, 12, [7])]))
    assert (request.attempt.number, request.state) == (2, State.DECODING)
    prefill.tokens(KEY, 12, 9, attempt=1)
    assert new.one(prefill, Abort).attempt == 1
    assert new.streamed(KEY, SECOND) == [(12, 7)]


def test_an_older_attempt_than_the_client_saw_is_let_go(pair):
    new, prefill, decode, message = pair
    newer = {f: getattr(message, f) for f in message.__struct_fields__} | {"attempt": 3}
    new.client(Resume(**newer), SECOND)
    decode.tokens(KEY, 12, 7, attempt=2)
    assert new.one(decode, Abort).attempt == 2
    assert not new.streamed(KEY, SECOND)
    new.deny(KEY)
    assert new.one(prefill, Assign).attempt == 3 + TAKEOVER


# --------------------------------------------------------------------------- in prefill, in handoff


def test_one_in_prefill_is_followed_to_the_decode_worker_that_knows_the_other_router(pair):
    new, prefill, decode, request = resumed(pair)
    no(decode)
    prefill.tokens(KEY, 12)
    assert request.state is State.FOLLOWED
    assign = Assign(request=KEY, attempt=1, context=request.context, decode=decode.id, deadline=5.0)
    new.take(decode, Adopt)
    prefill.report(assign)
    assert new.one(decode, Adopt).position == 12
    decode.tokens(KEY, 12, 7)
    assert new.streamed(KEY, SECOND) == [(12, 7)]
    assert request.state is not State.FOLLOWED


def test_a_report_that_overtakes_the_first_token_is_followed_all_the_same(pair):
    new, prefill, decode, message = pair
    hello_again(prefill, requests=[RequestState(KEY, 1, 13, 10, router="router-0")])
    new.client(message, SECOND)
    context = new.core.table.requests[KEY].context
    assign = Assign(request=KEY, attempt=1, context=context, decode=decode.id, deadline=5.0)
    prefill.report(assign)
    prefill.tokens(KEY, 12, 7)
    assert new.one(decode, Adopt).position == 12
    new.advance(0.6)
    assert new.take(decode, Adopt)


def test_one_in_prefill_is_asked_after_until_it_is_heard_of(pair):
    new, prefill, decode, _request = resumed(pair)
    no(decode)
    prefill.tokens(KEY, 12)
    new.take(prefill, Adopt)
    new.advance(1.1)
    assert len(new.take(prefill, Adopt)) == 2
    no(prefill)  # after the handoff, whose report was lost
    assert new.one(prefill, Assign).attempt == 1 + TAKEOVER


def test_one_given_back_in_prefill_is_placed_again_above(pair):
    new, prefill, _decode, _ = resumed(pair)
    prefill.tokens(KEY, 12)
    prefill.say(Busy(request=KEY, attempt=1, decode_full=True))
    new.advance(0.1)
    assert new.one(prefill, Assign).attempt == 1 + TAKEOVER


# --------------------------------------------------------------------------- the other router


def running(make_bench):
    old = make_bench(name="router-0")
    prefill, decode = old.pair()
    key, _ = old.run()
    decode.tokens(key, 10, 5)
    return old, prefill, decode, key


def test_what_has_moved_is_dropped_without_an_abort(make_bench):
    old, prefill, decode, key = running(make_bench)
    decode.say(Moved(request=key, router="router-1"))
    old.client_gone()
    old.advance(1.0)
    assert not old.take(decode, Abort) + old.take(prefill, Abort)
    old.assert_nothing_kept()


def test_word_of_a_move_from_another_worker_than_it_runs_on_does_not_count(make_bench):
    old, _prefill, decode, key = running(make_bench)
    old.join("decode", 1).say(Moved(request=key, router="router-1"))
    decode.tokens(key, 11, 6)
    assert old.streamed(key) == [(10, 5), (11, 6)]


def test_a_request_that_is_being_fetched_back_ignores_that_it_left(pair):
    new, _prefill, decode, request = resumed(pair)
    decode.say(Moved(request=KEY, router="router-0"))
    assert request.state is State.RECOVERING
    decode.tokens(KEY, 12, 7)
    assert new.streamed(KEY, SECOND) == [(12, 7)]


def test_a_paused_router_lets_go_what_its_workers_now_hold_for_another(make_bench):
    """The Moved message was lost; the worker's next Hello lists the other router."""
    old, _prefill, decode, key = running(make_bench)
    told = {f: getattr(decode.hello, f) for f in decode.hello.__struct_fields__}
    told["requests"] = [RequestState(key, 1, 12, 10, router="router-1")]
    decode.say(type(decode.hello)(**told))
    assert old.one(b"client", Moved).router == "router-1"
    assert not old.take(decode, Adopt) + old.take(decode, Abort)
    assert key not in old.core.table.requests


def test_a_hello_that_crosses_the_adopt_does_not_give_the_request_away(pair):
    new, _prefill, decode, message = pair
    held = [RequestState(KEY, 1, 12, 10, router="router-0")]
    hello_again(decode, requests=held)
    new.client(message, SECOND)
    assert new.one(decode, Adopt).position == 12
    hello_again(decode, requests=held)  # sent before the Adopt arrived
    assert not new.take(SECOND, Moved)
    decode.tokens(KEY, 12, 7)
    assert new.streamed(KEY, SECOND) == [(12, 7)]


def hello_again(worker, **changes):
    told = {f: getattr(worker.hello, f) for f in worker.hello.__struct_fields__}
    worker.say(type(worker.hello)(**told | changes))


def test_a_worker_another_router_has_comes_back_after_this_one_was_cut_off(make_bench):
    old, prefill, decode, key = running(make_bench)
    for worker in (prefill, decode):
        worker.gone()
    held = [RequestState(key, 1, 12, 10, router="router-0")]
    hello_again(decode, elsewhere=True, requests=held)
    hello_again(prefill, elsewhere=True)
    assert len(old.take(decode, Welcome)) == len(old.take(prefill, Welcome)) == 2
    assert old.one(prefill, Assign).attempt == 2
    decode.tokens(key, 11, 9, attempt=1)  # the superseded attempt
    assert {m.attempt for m in old.take(decode, Abort)} == {1}
    assert old.streamed(key) == [(10, 5)]
    assert not old.take(prefill, PeerDead)


def test_a_worker_that_no_other_router_has_stays_dead(make_bench):
    old, _prefill, decode, _key = running(make_bench)
    decode.gone()
    old.advance(5.2)
    hello_again(decode)
    assert old.one(decode, Rejected).code == "endpoint_dead"


def test_the_death_of_a_worker_that_another_router_kept_is_not_repeated(make_bench):
    """A repeated PeerDead would make decode workers release the worker's new grants."""
    old, prefill, decode, _key = running(make_bench)
    prefill.gone()
    for _ in range(54):
        decode.beat()
        old.advance(0.1, beats=False)
    assert len(old.take(decode, PeerDead)) == 1
    hello_again(prefill, elsewhere=True)
    assert old.take(prefill, Welcome)
    old.advance(3.0)
    assert not old.take(decode, PeerDead)


def test_a_worker_that_hung_stays_dead_whoever_has_it(make_bench):
    old, _prefill, decode, _key = running(make_bench)
    for _ in range(55):
        decode.beat(progress=1, busy=True)
        _prefill.beat()
        old.advance(0.1, beats=False)
    old.take(decode, Rejected)
    hello_again(decode, elsewhere=True)
    assert old.one(decode, Rejected).code == "endpoint_dead"


def test_requests_another_router_began_are_left_alone_after_a_restart(make_bench):
    new = make_bench(name="router-0")
    held = RequestState(KEY, 1, 12, 10, router="router-1")
    decode = new.join("decode", requests=[held])
    new.advance(6.0)
    assert not new.take(decode, Abort)


def test_a_client_that_comes_back_before_it_was_missed_gets_its_request_back(make_bench):
    """Meanwhile another router adopted the request."""
    old, _prefill, decode, key = running(make_bench)
    message = old.resume_message(old.one(b"client", Submitted), [5])
    old.client(message, SECOND)
    assert old.one(decode, Adopt).position == 11
    decode.tokens(key, 11, 6)
    assert old.streamed(key, SECOND) == [(11, 6)]


def test_a_router_that_ends_gives_clients_time_to_go_elsewhere(make_bench):
    old, _prefill, decode, key = running(make_bench)
    old.feed(StopRequested())
    old.client_gone()
    assert not old.take(decode, Abort)
    decode.say(Moved(request=key, router="router-1"))
    assert not old.core.unfinished
    old.advance(2.0)
    assert not old.take(decode, Abort)


def test_a_router_that_ends_frees_what_no_client_takes_along(make_bench):
    old, _prefill, decode, _key = running(make_bench)
    old.feed(StopRequested())
    old.client_gone()
    old.advance(1.2)
    assert old.one(decode, Abort).attempt == 1
