"""Registration, deaths, placement, and answers of workers."""

from __future__ import annotations

import msgspec
import pytest

from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Assign,
    Busy,
    PeerLost,
    Rejected,
    RequestState,
    Terminal,
    TerminalAck,
    Welcome,
)
from baton.proto.wire.proofs import Holder, worker_key
from baton.router.events import NotSent, Tick


def states(bench):
    return {w.id: w.state.value for w in bench.core.registry.listed()}


# ------------------------------------------------------------------ joining


def test_a_worker_is_welcomed(bench):
    worker = bench.join("decode")
    key = worker_key(bench.config.key, Holder(worker.hello.incarnation), 77)
    assert bench.one(worker, Welcome) == Welcome(router="router", incarnation=77, key=key)
    assert states(bench) == {"decode-0": "ready"}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"version": 1}, "version_mismatch"),
        ({"said_role": "oracle"}, "protocol"),
        ({"endpoint": "http://x"}, "input"),
    ],
)
def test_a_worker_that_cannot_take_part_is_told_why(bench, fields, code):
    worker = bench.join("decode", **fields)
    assert bench.one(worker, Rejected).code == code
    assert not bench.core.registry.live()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"fingerprint": "weights-2"}, "fingerprint"),
        ({"numerics": "other"}, "numerics"),
        ({"vocab_size": 7}, "vocab_size"),
    ],
)
def test_another_model_is_refused_with_the_field_and_listed(bench, card, change, field):
    bench.join("prefill")
    other = bench.join("decode", model=msgspec.structs.replace(card, **change))
    rejected = bench.one(other, Rejected)
    assert rejected.code == "model_mismatch"
    assert field in rejected.message
    assert states(bench) == {"prefill-0": "ready", "decode-0": "refused"}
    bench.join("decode")
    assert states(bench)["decode-0"] == "ready"


def test_the_smallest_worker_decides_the_longest_context(bench, card, context):
    def sized(length):
        return msgspec.structs.replace(card, max_length=length)

    bench.join("prefill", model=sized(512))
    small = bench.join("decode", model=sized(128))
    bench.join("decode", 1, model=sized(256))
    key = bench.submit("r", context=context(prompt=128, max_length=200))
    end = bench.terminals(key)[0]
    assert "prompt too long: 128 tokens, limit 127" in end.message
    assert end.code == "context_length_exceeded"
    bench.core.registry.declare_dead(bench.core.registry.find(small.id), "test")
    bench.submit("s", context=context(prompt=128, max_length=200))
    assert bench.find(Assign)[1].request_id == "s"


def test_the_model_may_change_once_nobody_serves_the_old_one(bench, card):
    prefill, decode = bench.pair()
    prefill.gone()
    decode.gone()
    new = msgspec.structs.replace(card, fingerprint="weights-2")
    assert bench.one(bench.join("prefill", model=new), Welcome)


def test_a_stranger_is_asked_for_its_hello(bench):
    worker = bench.join("decode")
    worker.identity = b"unknown"
    worker.beat()
    assert bench.one(b"unknown", Rejected).code == "endpoint_unknown"


def test_hello_again_of_the_same_incarnation_asks_for_what_was_lost(bench):
    _prefill, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 5)
    held = RequestState(key, 1, 14, 10)
    decode.say(msgspec.structs.replace(decode.hello, requests=[held]))
    assert bench.one(decode, Adopt).position == 11
    decode.tokens(key, 11, 6, 7, 8)
    decode.say(decode.hello)  # the request is lost there
    _, assign = bench.find(Assign)
    assert (assign.attempt, assign.emitted) == (2, [5, 6, 7, 8])


# ------------------------------------------------------------------ dying


def test_a_pause_of_the_router_itself_kills_nobody(bench):
    bench.pair()
    bench.now += 30.0
    bench.feed(Tick())
    bench.advance(0.2, beats=False)
    bench.beat_all()
    bench.advance(2.0)
    assert set(states(bench).values()) == {"ready"}


def test_connections_lost_in_a_pause_of_the_router_itself_are_no_deaths(bench):
    prefill, decode = bench.pair()
    key, assign = bench.run()
    prefill.report(assign)
    bench.now += 2.0  # a pause of the router, in which workers closed their connections
    prefill.gone()
    decode.gone()
    bench.feed(Tick())
    assert states(bench) == {"prefill-0": "suspect", "decode-0": "suspect"}
    held = [RequestState(key, 1, 12, 10)]
    decode.identity = b"another connection"
    decode.say(msgspec.structs.replace(decode.hello, requests=held))
    assert bench.one(decode, Adopt).position == 10
    decode.tokens(key, 10, 5, 6)
    assert bench.streamed(key) == [(10, 5), (11, 6)]
    bench.workers.remove(prefill)
    bench.advance(5.2)
    assert states(bench) == {"prefill-0": "dead", "decode-0": "ready"}
    assert bench.core.metrics.replayed == 0


def test_the_last_one_running_at_a_second_death_is_not_blamed_for_both(bench):
    bench.join("prefill")
    decode = bench.join("decode")
    keys = [bench.run(name)[0] for name in ("one", "two")]
    for key in keys:
        decode.tokens(key, 10, 5)
    decode.gone()
    decode = bench.join("decode")
    for key in keys:
        decode.tokens(key, 11, 6, attempt=2)
    decode.end(keys[0], 12, attempt=2)
    decode.gone()
    assert not bench.terminals(keys[1])


def test_company_at_two_deaths_is_no_guilt(served):
    keys = [served.run(f"r{i}")[0] for i in range(8)]
    for _ in range(2):
        decode = next(w for w in served.workers if w.id.startswith("decode"))
        for key in keys:
            request = served.core.table.requests[key]
            if request.attempt.decode.identity == decode.identity:
                decode.tokens(key, 10, 5, attempt=request.attempt.number)
        decode.gone()
        served.workers.remove(decode)
        served.join("decode", 5 + len(served.workers))
        for worker in served.workers:
            for assign in served.take(worker, Assign):
                worker.accept(assign)
    assert not [t for key in keys for t in served.terminals(key)]


def test_after_too_many_losses_the_request_fails(make_bench):
    bench = make_bench(max_attempts=3)
    bench.join("prefill")
    decode = bench.join("decode")
    key, _ = bench.run()
    for _ in range(3):
        assert not bench.terminals(key)
        decode.gone()
        decode = bench.join("decode")
        for worker in bench.workers:
            bench.take(worker, Assign)
    assert [t.code for t in bench.terminals(key)] == ["worker_lost"]
    bench.advance(1.0)
    bench.ack(key)
    bench.assert_nothing_kept()


def test_requests_wait_for_workers_within_the_grace(make_bench):
    bench = make_bench(start_grace_s=5.0, worker_grace_s=2.0)
    key = bench.submit("early")
    bench.advance(4.9)
    assert not bench.terminals(key)
    bench.advance(0.2)
    terminal = bench.terminals(key)[0]
    assert terminal.code == "overloaded"
    assert terminal.retry_after >= 1.0
    prefill, decode = bench.pair()
    decode.gone()
    key = bench.submit("later")
    bench.advance(1.9)
    bench.join("decode")
    assert bench.one(prefill, Assign).request == key


# ------------------------------------------------------------------ placing


def test_a_full_prefill_worker_makes_the_router_choose_again(served):
    key = served.submit()
    first, _assign = served.find(Assign)
    first.say(Busy(request=key, attempt=1, reason="queue full"))
    second, again = served.find(Assign)
    assert second is not first
    assert again.attempt == 2


def test_workers_hear_how_long_a_client_has_waited(served):
    key = served.submit()
    first, assign = served.find(Assign)
    assert assign.waited == 0
    served.advance(0.05)
    first.say(Busy(request=key, attempt=1, reason="queue full"))
    _, again = served.find(Assign)
    assert again.waited == pytest.approx(0.05)


def test_a_full_decode_worker_is_avoided_then_everyone_gets_time(served):
    key = served.submit()
    seen = []
    for _ in range(2):
        worker, assign = served.find(Assign)
        worker.accept(assign)
        seen.append(assign.decode)
        worker.say(Busy(request=key, attempt=assign.attempt, decode_full=True, retry_after=0.1))
    assert len(set(seen)) == 2
    assert not [m for w in served.workers for m in served.take(w, Assign)]
    served.advance(0.15)
    _, assign = served.find(Assign)
    assert assign.attempt == 3
    assert not served.terminals(key)


def test_busy_everywhere_ends_at_the_deadline(bench):
    prefill, _ = bench.pair()
    key = bench.submit(deadline=5.0)
    asked = 0
    for _ in range(60):
        for assign in bench.take(prefill, Assign):
            asked += 1
            prefill.say(Busy(request=key, attempt=assign.attempt, retry_after=0.05))
        bench.advance(0.1)
    assert [t.code for t in bench.terminals(key)] == ["deadline_exceeded"]
    assert 4 < asked < 20


def test_a_prefill_worker_that_cannot_reach_the_decode_worker(served):
    key, assign = served.run()
    prefill = next(
        w for w in served.workers
        if key in served.core.registry.by_identity(w.identity).requests and "prefill" in w.id
    )  # fmt: skip
    prefill.say(PeerLost(endpoint=assign.decode, request=key, attempt=1, reason="silent"))
    prefill.say(Busy(request=key, attempt=1, decode_full=True))
    another, again = served.find(Assign)
    assert again.attempt == 2
    assert again.decode != assign.decode and another is not prefill


def test_a_failed_handoff_is_tried_again_and_another_failure_is_final(served):
    key, assign = served.run()
    prefill = next(w for w in served.workers if "prefill" in w.id)
    decode = served.decode_of(assign)
    decode.end(key, 11, code="handoff_failed", message="damaged")
    assert served.one(decode, TerminalAck)
    worker, again = served.find(Assign)
    assert again.attempt == 2
    worker.end(key, 0, attempt=2, code="internal", message="oops")
    terminal = served.one(b"client", Terminal)
    assert (terminal.code, terminal.message) == ("internal", "oops")
    assert prefill


def test_an_attempt_the_worker_had_aborted_is_raised_above_it(bench):
    prefill, _ = bench.pair()
    key = bench.submit()
    bench.take(prefill, Assign)
    prefill.say(Aborted(request=key, attempt=6))
    assert bench.one(prefill, Assign).attempt == 7


def test_a_decode_worker_that_does_not_answer_an_adopt_loses_the_request(bench):
    prefill, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 1)
    decode.tokens(key, 12, 3)
    bench.advance(12.0)
    assert bench.take(prefill, Assign)[0].emitted == [1]


def test_an_unknown_adopt_is_answered_and_the_request_replayed_at_once(bench):
    prefill, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 1)
    decode.tokens(key, 12, 3)
    bench.take(decode, Abort)
    decode.say(Aborted(request=key, attempt=0))
    assert bench.one(prefill, Assign).attempt == 2


# ------------------------------------------------------------------ target_endpoint


def test_target_endpoint_pins_the_decode_side(served):
    for i in range(5):
        served.submit(f"r{i}", target_endpoint="ipc:///run/decode-1")
    assigns = [m for w in served.workers for m in served.take(w, Assign)]
    assert {m.decode for m in assigns} == {"ipc:///run/decode-1"}


def test_target_endpoint_pins_the_prefill_side(served):
    for i in range(5):
        served.submit(f"r{i}", target_endpoint="ipc:///run/prefill-1")
    pinned = next(w for w in served.workers if w.id == "prefill-1")
    assert len(served.take(pinned, Assign)) == 5


def test_unknown_dead_and_draining_targets_are_refused_or_fall_back(served):
    dead = next(w for w in served.workers if w.id == "decode-0")
    draining = next(w for w in served.workers if w.id == "decode-1")
    dead.gone()
    served.join("decode", 2)
    draining.beat(draining=True)
    cases = {
        "ipc:///run/decode-9": "endpoint_unknown",
        "ipc:///run/decode-0": "endpoint_dead",
        "ipc:///run/decode-1": "endpoint_draining",
    }
    for endpoint, code in cases.items():
        served.submit(code, target_endpoint=endpoint)
        assert served.one(b"client", Terminal).code == code
        served.submit(code, target_endpoint=endpoint, fallback=True)
        assert served.find(Assign)[1].decode == "ipc:///run/decode-2"


def test_a_busy_pinned_worker_is_waited_for(served):
    key = served.submit(target_endpoint="ipc:///run/prefill-1")
    pinned = next(w for w in served.workers if w.id == "prefill-1")
    served.take(pinned, Assign)
    pinned.say(Busy(request=key, attempt=1))
    assert not [m for w in served.workers for m in served.take(w, Assign)]
    served.advance(0.2)
    assert served.one(pinned, Assign).attempt > 1


def test_a_replay_may_leave_the_pin_unless_it_is_strict(served):
    free = served.submit("free", target_endpoint="ipc:///run/decode-1")
    strict = served.submit("strict", target_endpoint="ipc:///run/decode-1", pin="strict")
    for worker in served.workers:
        for assign in served.take(worker, Assign):
            worker.accept(assign)
    next(w for w in served.workers if w.id == "decode-1").gone()
    _, again = served.find(Assign)
    assert (again.request, again.decode) == (free, "ipc:///run/decode-0")
    assert not served.take(b"client", Terminal), "it may return"
    served.advance(5.2)
    assert served.one(b"client", Terminal).code == "worker_lost"
    assert served.core.table.requests[strict].done


def test_pools(served):
    served.join("prefill", 7, pool="gold")
    served.join("decode", 7, pool="gold")
    for i in range(3):
        served.submit(f"r{i}", pool="gold")
        worker, assign = served.find(Assign)
        assert (worker.id, assign.decode) == ("prefill-7", "ipc:///run/decode-7")
    served.submit("none", pool="silver")
    assert not [m for w in served.workers for m in served.take(w, Assign)]
    served.advance(31.0)
    assert "silver" in served.take(b"client", Terminal)[0].message


def test_accepted_is_no_use_twice(bench):
    prefill, _ = bench.pair()
    key, _assign = bench.run()
    prefill.say(Accepted(request=key, attempt=1))
    prefill.say(Accepted(request=b"?" * 16, attempt=1))
    assert not bench.take(prefill, Abort)


def test_an_assign_that_no_envelope_can_carry_ends_its_request(bench):
    prefill, _ = bench.pair()
    key = bench.submit()
    assign = bench.one(prefill, Assign)
    bench.feed(NotSent(assign, "Assign cannot be sent: too large"))
    terminal, *_ = bench.terminals(key)
    assert (terminal.code, terminal.message) == (
        "limit_exceeded", "Assign cannot be sent: too large",
    )  # fmt: skip
    assert bench.core.handle(NotSent(assign, "again"), bench.now) == []
