"""Alive, suspect, dead and returned workers, and the effect of each state on requests."""

from __future__ import annotations

import msgspec
import pytest

from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Adopt,
    Assign,
    Hello,
    PeerDead,
    Rejected,
    RequestState,
)
from baton.router.events import WorkersGone


def states(bench):
    return {worker.id: worker.state.value for worker in bench.core.registry.listed()}


def silence(bench, seconds, *heard):
    """Advance the clock; only the workers in ``heard`` send heartbeats."""
    for _ in range(round(seconds / 0.05)):
        bench.advance(0.05, beats=False)
        for worker in heard:
            worker.beat()


def hello_again(worker, *held, identity=b"another connection", **changes):
    """Reconnect the same incarnation, which lists ``held`` in its Hello."""
    worker.identity = identity
    worker.say(msgspec.structs.replace(worker.hello, requests=list(held), **changes))


def running(bench, *tokens):
    """Run a request on the decode worker of a pair, and send its first tokens."""
    prefill, decode = bench.pair()
    key, assign = bench.run()
    prefill.report(assign)
    decode.tokens(key, 10, *tokens)
    return prefill, decode, key


def queued_prompt(served):
    """Assign a request; return key, Assign, prefill worker and all other workers."""
    key, assign = served.run()
    identity = served.core.table.requests[key].attempt.prefill.identity
    first = next(w for w in served.workers if w.identity == identity)
    return key, assign, first, [w for w in served.workers if w is not first]


# ------------------------------------------------------------------ suspect and back


def test_a_pause_makes_a_worker_suspect_and_its_next_heartbeat_clears_it(bench):
    prefill, decode, key = running(bench, 5)
    silence(bench, 1.2, prefill)
    assert states(bench) == {"prefill-0": "ready", "decode-0": "suspect"}
    silence(bench, 3.0, prefill)
    assert states(bench)["decode-0"] == "suspect"
    decode.beat()
    assert states(bench)["decode-0"] == "ready"
    decode.tokens(key, 11, 6)
    assert bench.streamed(key) == [(10, 5), (11, 6)]
    assert bench.core.metrics.replayed == 0
    assert not bench.take(prefill, PeerDead)


def test_a_suspect_worker_gets_no_new_requests(served):
    stopped = next(w for w in served.workers if w.id == "prefill-0")
    others = [w for w in served.workers if w is not stopped]
    silence(served, 1.2, *others)
    for number in range(6):
        served.submit(f"r{number}")
    assert not served.take(stopped, Assign)
    assert len(served.take(others[1], Assign)) == 6


def test_with_only_suspects_left_requests_wait_for_their_return(bench):
    prefill, decode = bench.pair()
    silence(bench, 1.2, prefill)
    key = bench.submit()
    assert not bench.take(prefill, Assign)
    decode.beat()
    assert bench.one(prefill, Assign).request == key


def test_prompts_that_only_wait_at_a_suspect_worker_move(served):
    key, assign, first, others = queued_prompt(served)
    silence(served, 1.2, *others)
    second, again = served.find(Assign)
    assert (second.id != first.id, again.attempt) == (True, assign.attempt + 1)
    silence(served, 1.0, *others)
    served.take(first, Abort)
    first.beat()
    served.advance(0.5)
    assert served.take(first, Abort)[0].attempt == assign.attempt, "the old attempt is fenced"
    assert not served.core.table.requests[key].losses


def test_prompts_also_move_once_a_worker_is_ready_again(served):
    """While both prefill workers are suspect, the prompt cannot move."""
    _key, assign, _first, others = queued_prompt(served)
    (second,) = (w for w in others if w.hello.role == "prefill")
    decodes = [w for w in others if w is not second]
    silence(served, 1.2, *decodes)
    assert not served.take(second, Assign)
    second.beat()
    assert served.one(second, Assign).attempt == assign.attempt + 1


def test_prompts_also_move_to_a_worker_that_joins(bench):
    first, decode = bench.pair()
    key = bench.submit()
    assign = bench.one(first, Assign)
    silence(bench, 1.2, decode)
    second = bench.join("prefill", 1)
    assert bench.one(second, Assign).request == key == assign.request


def test_prompts_also_move_if_the_connection_closes_before_silence_is_suspect(served):
    """The connection closed too late for the end of a process, but before the suspect timeout."""
    key, _assign, first, others = queued_prompt(served)
    silence(served, 0.95, *others)
    first.gone()
    second, _ = served.find(Assign)
    assert second.id != first.id
    assert not served.core.table.requests[key].losses


def test_a_prompt_that_is_computed_stays_where_it_is(served):
    key, _assign, first, others = queued_prompt(served)
    first.tokens(key, 10, 5)
    silence(served, 3.0, *others)
    assert not [m for w in served.workers for m in served.take(w, Assign)]


def test_a_closed_connection_moves_requests_at_once_and_buries_nobody(served):
    key, assign = served.run()
    decode = served.decode_of(assign)
    decode.tokens(key, 10, 5)
    decode.gone()
    _, again = served.find(Assign)
    assert (again.attempt, again.emitted) == (2, [5])
    assert states(served)[decode.id] == "suspect"
    assert not [m for w in served.workers for m in served.take(w, PeerDead)]


def test_the_same_incarnation_is_taken_back_and_what_moved_is_fenced(served):
    key, assign = served.run()
    decode = served.decode_of(assign)
    decode.tokens(key, 10, 5)
    decode.gone()
    worker, again = served.find(Assign)
    worker.accept(again)
    hello_again(decode, RequestState(key, 1, 14, 10))
    assert states(served)[decode.id] == "ready"
    decode.tokens(key, 11, 99, attempt=1)
    assert served.streamed(key) == [(10, 5)], "no token of the old attempt is relayed"
    assert {m.attempt for m in served.take(decode, Abort)} == {1}
    assert served.core.table.requests[key].doubts == set()
    assert not served.core.table.requests[key].deaths


def test_a_connection_that_timed_out_keeps_its_requests(bench):
    """A network outage at the router is not the end of a worker's process."""
    prefill, decode, key = running(bench, 5)
    silence(bench, 1.6, prefill)
    decode.gone()
    assert bench.core.metrics.replayed == 0
    silence(bench, 2.0, prefill)
    hello_again(decode, RequestState(key, 1, 13, 10))
    assert bench.one(decode, Adopt).position == 11
    decode.tokens(key, 11, 6, 7)
    assert bench.streamed(key) == [(10, 5), (11, 6), (12, 7)]
    assert bench.core.metrics.replayed == 0


def test_what_a_returned_worker_does_not_have_any_more_is_replayed(bench):
    prefill, decode, key = running(bench, 5)
    silence(bench, 1.6, prefill)
    decode.gone()
    hello_again(decode)
    assert bench.one(prefill, Assign).attempt == 2
    assert not bench.terminals(key)


# ------------------------------------------------------------------ dead


def test_after_the_worker_timeout_a_silent_worker_is_dead_for_good(bench):
    prefill, decode = bench.pair()
    silence(bench, 5.2, prefill)
    assert states(bench) == {"prefill-0": "ready", "decode-0": "dead"}
    assert bench.one(prefill, PeerDead).incarnation == decode.hello.incarnation
    decode.beat()
    assert bench.one(decode, Rejected).code == "endpoint_unknown"
    decode.say(decode.hello)
    refused = bench.one(decode, Rejected)
    assert refused.code == "endpoint_dead"
    assert "decode-0 was declared dead" in refused.message


@pytest.mark.parametrize(("timeout", "alive"), [(2.0, 1.8), (20.0, 19.5)])
def test_the_worker_timeout_is_one_setting(make_bench, timeout, alive):
    bench = make_bench(worker_timeout_s=timeout)
    prefill, _decode = bench.pair()
    silence(bench, alive, prefill)
    assert states(bench)["decode-0"] == "suspect"
    silence(bench, timeout - alive + 0.2, prefill)
    assert states(bench)["decode-0"] == "dead"


def test_a_busy_engine_without_progress_is_suspect_then_dead(bench):
    prefill, decode = bench.pair()
    for seconds, state in ((1.2, "suspect"), (4.0, "dead")):
        for _ in range(round(seconds / 0.05)):
            bench.advance(0.05, beats=False)
            prefill.beat(progress=1)  # idle: no progress expected
            decode.beat(progress=1, busy=True, step_s=0.01)
        assert states(bench) == {"prefill-0": "ready", "decode-0": state}


def test_progress_clears_a_suspect(bench):
    prefill, decode = bench.pair()
    for _ in range(30):
        bench.advance(0.05, beats=False)
        prefill.beat()
        decode.beat(progress=1, busy=True, step_s=0.01)
    assert states(bench)["decode-0"] == "suspect"
    decode.beat(progress=2, busy=True, step_s=0.01)
    assert states(bench)["decode-0"] == "ready"


def test_a_step_is_judged_by_its_predicted_time(bench):
    prefill, decode = bench.pair()
    for _ in range(73):
        bench.advance(0.1, beats=False)
        prefill.beat()
        decode.beat(progress=1, busy=True, step_s=1.5)
    assert states(bench)["decode-0"] == "ready"
    for _ in range(4):
        bench.advance(0.1, beats=False)
        prefill.beat()
        decode.beat(progress=1, busy=True, step_s=1.5)
    assert states(bench)["decode-0"] == "dead"


def test_a_router_that_hears_nobody_blames_itself_first(bench):
    _prefill, decode, key = running(bench, 5)
    bench.advance(20.0, beats=False)
    assert set(states(bench).values()) == {"suspect"}
    silence(bench, 1.8, decode)
    assert states(bench) == {"prefill-0": "suspect", "decode-0": "ready"}, "it may return too"
    silence(bench, 0.4, decode)
    assert states(bench) == {"prefill-0": "dead", "decode-0": "ready"}
    decode.tokens(key, 11, 6)
    assert bench.streamed(key) == [(10, 5), (11, 6)]


def test_workers_that_stay_silent_all_together_are_dead_in_the_end(bench):
    bench.pair()
    bench.advance(31.0, beats=False)
    assert set(states(bench).values()) == {"dead"}


# ------------------------------------------------------------------ poison


def lose_two(served):
    """Run a request, and close the connections of two of its workers; return key and workers."""
    key, assign = served.run()
    decode = served.decode_of(assign)
    decode.tokens(key, 10, 5)
    decode.gone()
    worker, again = served.find(Assign)
    worker.accept(again)
    worker.gone()
    return key, decode, worker


def test_two_lost_connections_poison_no_request(served):
    key, assign = served.run()
    for attempt in (1, 2, 3):
        decode = served.decode_of(assign)
        decode.tokens(key, 10, 5, attempt=attempt)
        decode.gone()
        hello_again(decode, identity=f"connection {attempt}".encode())
        served.advance(0.3)
        worker, assign = next(
            (w, found[-1]) for w in served.workers if (found := served.take(w, Assign))
        )
        worker.accept(assign)
    assert not served.terminals(key)


def test_a_request_that_kills_two_workers_alone_is_poison(served):
    key, decode, worker = lose_two(served)
    assert not served.terminals(key), "the processes may return"
    assert not [m for w in served.workers for m in served.take(w, Assign)], "a third may die"
    served.join("decode", int(decode.id[-1]))
    served.join("prefill", int(worker.id[-1]))
    assert [t.code for t in served.terminals(key)] == ["poisoned"]


def test_a_deadly_request_waits_until_its_victims_are_known_to_be_dead(served):
    key, _decode, _worker = lose_two(served)
    served.advance(5.2)
    assert [t.code for t in served.terminals(key)] == ["poisoned"]


def test_workers_that_lose_their_names_while_they_are_silent_poison_no_request(served):
    key, assign = served.run()
    for attempt in (1, 2):
        decode = served.decode_of(assign)
        decode.tokens(key, 10, 5, attempt=attempt)
        silence(served, 1.2, *(worker for worker in served.workers if worker is not decode))
        served.hear(b"life %d" % attempt, hello_of(decode, incarnation=999_000 + attempt))
        worker, assign = next(
            (w, found[-1]) for w in served.workers if (found := served.take(w, Assign))
        )
        worker.accept(assign)
    assert not served.terminals(key)


# ------------------------------------------------------------------ two lives of one name


def hello_of(worker, **changes):
    return msgspec.structs.replace(worker.hello, **{"incarnation": 999_999, **changes})


def test_a_healthy_worker_keeps_its_name(bench):
    prefill, decode, key = running(bench, 5)
    bench.hear(b"newcomer", hello_of(decode))
    refused = bench.one(b"newcomer", Rejected)
    assert refused.code == "name_taken"
    assert "decode-0" in refused.message
    decode.tokens(key, 11, 6)
    assert bench.streamed(key) == [(10, 5), (11, 6)]
    silence(bench, 1.2, prefill)
    bench.hear(b"newcomer", hello_of(decode))
    assert bench.core.registry.by_identity(b"newcomer") is not None
    assert bench.one(prefill, Assign).decode_incarnation == 999_999


def test_a_worker_that_asks_again_and_again_is_logged_once(bench):
    _prefill, decode = bench.pair()
    for _ in range(5):
        bench.hear(b"newcomer", hello_of(decode))
    assert len(bench.take(b"newcomer", Rejected)) == 5
    refused = [log for log in bench.logs if log.event == "worker.refused"]
    assert [log.fields["worker"] for log in refused] == ["decode-0"]
    bench.hear(b"newcomer", hello_of(decode, version=1))
    assert len([log for log in bench.logs if log.event == "worker.refused"]) == 2


def test_a_successor_takes_the_name_of_a_closed_connection_at_once(bench):
    bench.join("prefill")
    old = bench.join("decode")
    bench.run()
    old.gone()
    new = bench.join("decode")
    assert bench.core.registry.by_identity(old.identity) is None
    _, assign = bench.find(Assign)
    assert assign.decode_incarnation == new.hello.incarnation


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"version": 1}, "version_mismatch"),
        ({"role": "cook"}, "protocol"),
        ({"fingerprint": "another model"}, "name_taken"),
        ({"endpoint": "nowhere"}, "input"),
    ],
)
def test_a_refused_hello_harms_nobody(bench, changes, code, idle):
    prefill, decode, key = running(bench, 5)
    if idle:
        decode.end(key, 11)
        bench.ack(key)
    changes = dict(changes)
    fingerprint = changes.pop("fingerprint", None)
    if fingerprint:
        changes["model"] = msgspec.structs.replace(decode.hello.model, fingerprint=fingerprint)
    card = bench.core.registry.card
    bench.hear(b"newcomer", hello_of(decode, **changes))
    assert bench.one(b"newcomer", Rejected).code == code
    assert bench.core.registry.by_identity(decode.identity) is not None
    assert bench.core.registry.card == card
    assert not bench.take(prefill, PeerDead)
    bench.hear(decode.identity, decode.hello)
    assert not bench.take(decode, Rejected), "the healthy worker is still accepted"


def test_a_zombie_of_an_earlier_life_harms_nobody(bench):
    prefill, zombie, _key = running(bench, 5)
    zombie.gone()
    successor = bench.join("decode")
    bench.take(prefill, PeerDead)
    bench.hear(b"zombie", zombie.hello)
    assert bench.one(b"zombie", Rejected).code == "endpoint_dead"
    assert bench.core.registry.by_identity(successor.identity) is not None
    assert not bench.take(prefill, PeerDead)


def test_another_model_under_a_dead_name_is_refused_while_others_serve(bench):
    _prefill, decode, _key = running(bench, 5)
    decode.gone()
    other = msgspec.structs.replace(decode.hello.model, fingerprint="another")
    bench.hear(b"newcomer", hello_of(decode, model=other))
    rejected = bench.one(b"newcomer", Rejected)
    assert rejected.code == "model_mismatch"
    assert "the files are not those of the model that the cluster serves" in rejected.message
    hello_again(decode)
    assert states(bench)["decode-0"] == "ready"


def test_with_every_worker_gone_and_nothing_to_do_the_model_may_change(bench):
    prefill, decode = bench.pair()
    prefill.gone()
    decode.gone()
    other = msgspec.structs.replace(decode.hello.model, fingerprint="another")
    bench.join("decode", model=other)
    bench.join("prefill", model=other)
    assert states(bench) == {"prefill-0": "ready", "decode-0": "ready"}
    assert bench.core.registry.card.fingerprint == "another"


def test_an_incarnation_belongs_to_one_worker(bench):
    _prefill, decode = bench.pair()
    stolen = msgspec.structs.replace(decode.hello, worker="decode-7", endpoint="ipc:///run/d7")
    bench.hear(b"thief", stolen)
    assert bench.one(b"thief", Rejected).code == "access_denied"
    assert isinstance(decode.hello, Hello)
    assert bench.core.registry.by_identity(b"thief") is None


# ------------------------------------------------------------------ draining


def test_a_draining_worker_that_was_suspect_drains_on(bench):
    prefill, decode, _key = running(bench, 5)
    decode.beat(draining=True)
    silence(bench, 1.2, prefill)
    assert states(bench)["decode-0"] == "suspect"
    decode.beat(draining=True)
    assert states(bench)["decode-0"] == "draining"


def test_a_suspect_that_confirms_its_aborts_is_asked_no_more(served):
    key, assign = served.run()
    decode = served.decode_of(assign)
    decode.gone()
    hello_again(decode, RequestState(key, 1, 10, 10))
    served.advance(0.5)
    assert served.take(decode, Abort)
    decode.say(Aborted(request=key, attempt=1))
    served.advance(2.0)
    assert not served.take(decode, Abort)


# ------------------------------------------------------------------ several lost at once


def spread(bench, count):
    """Run ``count`` requests on four decode workers; return the workers and the requests."""
    bench.join("prefill")
    decodes = [bench.join("decode", number) for number in range(4)]
    for number in range(count):
        key = bench.submit(f"r{number}")
        prefill, assign = bench.find(Assign)
        prefill.accept(assign)
        prefill.report(assign)
        bench.decode_of(assign).tokens(key, 10, 5)
    return decodes, list(bench.core.table.requests.values())


def lose_together(bench, decodes, requests, lose):
    """Lose the first two decode workers by ``lose``; no request may move from one to the other."""
    there = [
        request for request in requests if request.attempt.decode.id in ("decode-0", "decode-1")
    ]
    assert {request.attempt.decode.id for request in there} == {"decode-0", "decode-1"}
    lost = {worker.endpoint for worker in decodes[:2]}
    bench.workers = [worker for worker in bench.workers if worker.endpoint not in lost]
    bench.sent.clear()
    lose()
    moved = [m for messages in bench.sent.values() for m in messages if isinstance(m, Assign)]
    assert {m.request for m in moved} == {request.key for request in there}
    assert not {m.decode for m in moved} & lost
    assert {request.losses for request in there} == {1}


def test_workers_lost_during_a_pause_of_the_router_do_not_get_each_others_requests(bench):
    decodes, requests = spread(bench, 12)

    def lose():
        bench.now += 6.0
        bench.advance(6.0)

    lose_together(bench, decodes, requests, lose)
    assert {request.deaths for request in requests} == {0, 1}


def test_workers_whose_connections_close_together_do_not_get_each_others_requests(bench):
    decodes, requests = spread(bench, 12)
    gone = WorkersGone([worker.identity for worker in decodes[:2]])
    lose_together(bench, decodes, requests, lambda: bench.feed(gone))


def test_workers_that_one_process_replaces_do_not_get_each_others_requests(bench):
    """It has the name of one worker and the address of another."""
    decodes, requests = spread(bench, 12)

    def lose():
        silence(bench, 1.2, *bench.workers)
        bench.join("decode", 0, identity=b"new", endpoint=decodes[1].endpoint)

    lose_together(bench, decodes, requests, lose)


def test_requests_of_a_lost_worker_prefer_workers_that_were_heard_lately(bench):
    """The host of two workers is lost, and only one connection shows it yet."""
    decodes, _requests = spread(bench, 12)
    lost, other = decodes[:2]
    silence(bench, 0.8, *(worker for worker in bench.workers if worker is not other))
    bench.sent.clear()
    lost.gone()
    moved = [m for messages in bench.sent.values() for m in messages if isinstance(m, Assign)]
    assert moved
    assert other.endpoint not in {m.decode for m in moved}
