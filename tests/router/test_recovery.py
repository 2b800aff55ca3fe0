"""Requests refused by workers, repeated deaths, and attempts from before a restart."""

from __future__ import annotations

import pytest

from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Adopt,
    Assign,
    Busy,
    PeerDead,
    PeerLost,
    RequestState,
    TerminalAck,
)

from .conftest import KEY


def held(attempt=1, key=KEY):
    return RequestState(key, attempt, 15, 10, router="router")


def place(bench):
    """Accept every Assign; return the Assigns by request id."""
    found = {}
    for worker in bench.workers:
        for assign in bench.take(worker, Assign):
            worker.accept(assign)
            found[assign.request_id] = assign
    return found


# ------------------------------------------------------------------ refused by a worker


def test_an_attempt_given_back_twice_is_placed_once(served):
    key, assign = served.run()
    prefill = next(w for w in served.workers if w.hello.role == "prefill")
    request = served.core.table.requests[key]
    prefill = next(w for w in served.workers if w.identity == request.attempt.prefill.identity)
    busy = Busy(request=key, attempt=1, decode_full=True)
    prefill.say(busy)
    _, again = served.find(Assign)
    assert (again.attempt, again.decode != assign.decode) == (2, True)
    prefill.say(busy)
    assert not [m for w in served.workers for m in served.take(w, Assign)]


@pytest.mark.parametrize("message", [Busy, PeerLost])
def test_what_is_given_back_too_late_is_answered_by_an_abort(bench, message):
    """Without the Abort, the worker would repeat its message until the deadline."""
    prefill, _ = bench.pair()
    key, _ = bench.run()
    prefill.tokens(key, 10, 5)
    prefill.end(key, 11)
    bench.ack(key)
    bench.take(prefill, Abort)
    more = {"endpoint": "ipc:///d"} if message is PeerLost else {}
    prefill.say(message(request=key, attempt=1, **more))
    assert bench.one(prefill, Abort).attempt == 1


def test_what_is_given_back_of_a_lower_attempt_is_let_go_while_the_request_waits(bench):
    """Otherwise a draining worker waits for the Abort, and the request for its successor."""
    prefill, decode = bench.pair()
    key, _ = bench.run()
    decode.gone()
    bench.take(prefill, Abort)
    prefill.say(Aborted(request=key, attempt=1))
    assert bench.core.table.requests[key].state.value == "queued"
    prefill.say(Busy(request=key, attempt=1, decode_full=True))
    assert bench.one(prefill, Abort).attempt == 1


def test_what_is_given_back_after_the_handover_does_not_stop_the_decode_worker(bench):
    prefill, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 5)
    prefill.say(Busy(request=key, attempt=1, decode_full=True))
    assert bench.one(prefill, Abort).attempt == 1
    assert not bench.take(decode, Abort)
    decode.tokens(key, 11, 6)
    assert bench.streamed(key) == [(10, 5), (11, 6)]


def test_the_prefill_workers_end_does_not_count_after_the_handover(bench):
    prefill, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 5)
    prefill.end(key, 10, code="deadline_exceeded")
    assert bench.one(prefill, TerminalAck).requests == [(key, 1)]
    decode.tokens(key, 11, 6)
    decode.end(key, 12)
    assert [t.status for t in bench.terminals(key)] == ["end_of_sequence"]
    bench.ack(key)
    bench.assert_nothing_kept()


def test_the_end_of_a_drained_worker_is_no_loss_for_what_was_to_come_to_it(bench):
    """Otherwise a request that waits during a rollout would use up its attempts."""
    prefill, decode = bench.pair()
    key, _ = bench.run()
    bench.join("decode", 1)
    decode.beat(draining=True)
    decode.gone()
    request = bench.core.table.requests[key]
    assert (request.losses, bench.core.metrics.replayed) == (0, 0)
    assert bench.one(prefill, Assign).attempt == 2


# ------------------------------------------------------------------ attempts of before a restart


def test_what_an_earlier_life_assigned_is_let_go_while_the_request_waits(bench):
    """A draining worker waits for the Abort of its attempt, whatever its number."""
    draining = bench.join("prefill", draining=True)
    bench.join("decode")
    key = bench.submit()
    assert bench.core.table.requests[key].state.value == "queued"
    proof = draining.proof(held(attempt=3, key=key))
    draining.say(Busy(request=key, attempt=3, decode_full=True, proof=proof))
    assert bench.one(draining, Abort).attempt == 3
    _, assign = bench.join("prefill", 1), bench.find(Assign)[1]
    assert assign.attempt == 4


def test_a_submit_goes_above_what_workers_report(bench):
    """The client sends Submit and not Resume, since Submitted was lost before the restart."""
    bench.join("decode", requests=[held(attempt=2)])
    prefill = bench.join("prefill")
    bench.submit()
    assert bench.one(prefill, Assign).attempt == 3


def test_tokens_of_a_resume_are_checked_once_the_model_is_known(bench, submitted):
    """A new router without workers has no model yet, so it accepts what any model may have."""
    bench.client(bench.resume_message(submitted, [7, 1000]))
    assert bench.terminals(KEY) == []
    prefill, _ = bench.pair()
    bench.deny(KEY)
    bench.advance(5.0)
    end = bench.terminals(KEY)[0]
    assert (end.code, end.message) == ("input", "an emitted token id is outside 0 to 999")
    assert not bench.take(prefill, Assign)


def test_a_worker_that_joins_with_the_same_attempt_is_no_holder(bench):
    prefill = bench.join("prefill")
    bench.join("decode", 0)
    key, assign = bench.run()
    assert assign.attempt == 1
    other = bench.join("decode", 1, requests=[held()])
    assert bench.one(other, Abort).attempt == 1
    assert not bench.take(other, Adopt)
    again = bench.one(prefill, Assign)
    assert (again.request, again.attempt) == (key, 2)


def test_a_queued_request_rises_above_what_a_joining_worker_reports(bench):
    bench.submit()
    bench.join("decode", requests=[held(attempt=4)])
    prefill = bench.join("prefill")
    assert bench.one(prefill, Assign).attempt == 5


def test_a_prefill_worker_found_later_takes_over_from_the_first(make_bench):
    old = make_bench()
    old.pair()
    old.run()
    submitted = old.sent[b"client"][0]
    new = make_bench()
    first = new.join("prefill", 0, requests=[held(attempt=1)])
    new.client(new.resume_message(submitted, []))
    assert new.take(first, Adopt)
    second = new.join("prefill", 1, requests=[held(attempt=2)])
    new.join("decode")
    new.advance(1.0)
    assert {m.position for m in new.take(second, Adopt)} == {10}
    second.tokens(KEY, 10, 5, attempt=2)
    second.end(KEY, 11, attempt=2)
    new.ack(KEY)
    new.assert_nothing_kept()


# ------------------------------------------------------------------ poisoned requests


def decode_worker(bench):
    return next(w for w in bench.workers if w.hello.role == "decode")


def say_tokens(bench, request, count):
    attempt = request.attempt.number
    decode_worker(bench).tokens(request.key, request.next, *range(count), attempt=attempt)


def kill_decode(bench):
    """Crash the decode worker and its requests; join a successor."""
    for request in list(bench.core.table.requests.values()):
        if request.running:
            say_tokens(bench, request, 1)
    decode = decode_worker(bench)
    decode.gone()
    bench.workers.remove(decode)
    bench.join("decode")


def test_suspects_run_one_by_one_so_only_the_guilty_one_is_given_up(bench):
    bench.pair()
    keys = {name: bench.run(name)[0] for name in "abcd"}
    running, deaths, alone = set(keys), 0, False
    while not bench.terminals(keys["c"]):
        if "c" in running:
            kill_decode(bench)
            deaths += 1
            running = set()
        for name in running:
            say_tokens(bench, bench.core.table.requests[keys[name]], 9)
        bench.advance(1.0)
        running = set(place(bench))
        alone = alone or (deaths == 2 and len(running) == 1)
    assert {t.code for t in bench.terminals(keys["c"])} == {"poisoned"}
    assert deaths <= 4
    assert alone
    assert not [t for name in ("a", "b", "d") for t in bench.terminals(keys[name])]


def test_the_next_suspect_is_placed_as_soon_as_one_ends(bench):
    """Not after its back-off, which has reached a second by then."""
    bench.pair()
    keys = {name: bench.run(name)[0] for name in "abcdef"}
    kill_decode(bench)
    place(bench)
    kill_decode(bench)
    bench.advance(4.0)
    order = []
    for _ in keys:
        order += place(bench)
        request = bench.core.table.requests[keys[order[-1]]]
        say_tokens(bench, request, 1)
        decode_worker(bench).end(request.key, request.next, attempt=request.attempt.number)
        bench.advance(0.1)
    assert sorted(order) == sorted(keys)


def test_tokens_made_since_the_last_death_clear_a_request(served):
    key, _ = served.run()
    for number in range(6):
        request = served.core.table.requests[key]
        decode = next(w for w in served.workers if w.identity == request.attempt.decode.identity)
        start = request.next
        decode.tokens(key, start, *range(9), attempt=request.attempt.number)
        decode.gone()
        served.join("decode", 10 + number)
        place(served)
    assert not served.terminals(key)


def test_a_death_is_said_again_a_few_times(served):
    first = next(w for w in served.workers if w.hello.role == "prefill")
    other = next(w for w in served.workers if w.hello.role == "decode")
    first.gone()
    served.advance(15.0)
    dead = served.take(other, PeerDead)
    assert {m.incarnation for m in dead} == {first.hello.incarnation}
    assert 2 <= len(dead) <= 4
