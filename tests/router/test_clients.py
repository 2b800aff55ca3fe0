"""Messages from clients and the router's answers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.wire.messages import (
    Abort,
    Adopt,
    Assign,
    Cancel,
    Describe,
    Described,
    Drain,
    Drained,
    FinalAck,
    Ping,
    Pong,
    Status,
    StatusReport,
    Submitted,
    Terminal,
    TokenRun,
    Tokens,
)
from baton.proto.wire.wire_context import WireSampling, WireTokens
from baton.router.core import RouterCore
from baton.router.events import ClientFull, ClientWritable, FromClient, StopRequested
from baton.router.records import TAKEOVER, Authentication, Caller
from baton.router.request_table import MAX_CANCELLED


def test_a_whole_life(bench):
    prefill, decode = bench.pair()
    key = bench.submit("r", prompt=10, new=3)
    submitted = bench.one(b"client", Submitted)
    assert (submitted.request, submitted.request_id, len(submitted.secret)) == (key, "r", 16)
    assign = bench.one(prefill, Assign)
    assert assign.decode == decode.endpoint
    assert assign.decode_incarnation == decode.hello.incarnation
    assert 599 < assign.deadline <= 600
    prefill.accept(assign)
    prefill.tokens(key, 10, 5)
    prefill.report(assign)
    decode.tokens(key, 10, 5)
    decode.tokens(key, 11, 6)
    decode.tokens(key, 12, 7)
    decode.end(key, 13, status="maximum_length", cached_tokens=4)
    assert bench.streamed(key) == [(10, 5), (11, 6), (12, 7)]
    terminal = bench.one(b"client", Terminal)
    assert (terminal.status, terminal.position, terminal.cached_tokens) == ("maximum_length", 13, 4)
    assert (terminal.prefill, terminal.decode, terminal.request_id) == (
        "prefill-0",
        "decode-0",
        "r",
    )
    bench.ack(key)
    bench.assert_nothing_kept()


def test_one_message_per_client_with_the_runs_as_they_came(bench):
    _, decode = bench.pair()
    keys = [bench.run(f"r{i}", identity=b"ab"[i % 2 : i % 2 + 1])[0] for i in range(6)]
    logprobs = [TokenLogProbs.of(-0.1, {5: -0.1})]
    runs = [TokenRun(key, 1, 10, [5], logprobs) for key in keys]
    decode.say(Tokens(runs=runs))
    for identity, mine in ((b"a", runs[0::2]), (b"b", runs[1::2])):
        message = bench.one(identity, Tokens)
        assert all(got is sent for got, sent in zip(message.runs, mine, strict=True))


def test_same_id_and_content_re_attaches_with_all_tokens(bench):
    _, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 5, 6)
    bench.sent.clear()
    bench.submit()
    assert bench.one(b"client", Submitted).request == key
    assert bench.streamed(key) == [(10, 5), (11, 6)]
    assert bench.core.unfinished == 1
    decode.end(key, 12)
    bench.sent.clear()
    bench.submit()
    assert bench.streamed(key) == [(10, 5), (11, 6)]
    assert len(bench.terminals(key)) == 1


@pytest.mark.parametrize("change", [{"new": 21}, {"prompt": 11}, {"pool": "x"}, {"pin": "strict"}])
def test_same_id_with_another_content_is_refused_and_the_first_goes_on(bench, change):
    _, decode = bench.pair()
    key, _ = bench.run()
    bench.submit(**change)
    refusal = bench.one(b"client", Terminal)
    assert (refusal.code, refusal.request, refusal.request_id) == ("duplicate_request", b"", "r")
    decode.tokens(key, 10, 5)
    decode.end(key, 11)
    assert bench.one(b"client", Terminal).request == key


def test_the_same_id_of_two_clients_is_two_requests(bench):
    bench.pair()
    assert bench.submit("r", b"one") != bench.submit("r", b"two")
    assert bench.core.unfinished == 2


def test_an_id_may_be_used_again_after_the_acknowledgement_under_a_higher_attempt(bench):
    prefill, _decode = bench.pair()
    key, _ = bench.run()
    prefill.tokens(key, 10, 5)
    prefill.end(key, 11)
    bench.ack(key)
    bench.submit(new=9)
    assert bench.one(prefill, Assign).attempt == 2


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": 0}, "input"),
        ({"prompt": 5000}, "context_length_exceeded"),
        ({"deadline": 0.0}, "deadline_exceeded"),
        ({"deadline": -3.0}, "deadline_exceeded"),
        ({"deadline": float("nan")}, "input"),
        ({"pin": "maybe"}, "input"),
        ({"request_id": ""}, "input"),
        ({"request_id": "x" * 257}, "input"),
        ({"target_endpoint": "ipc:///nowhere"}, "endpoint_unknown"),
        ({"target_endpoint": "nonsense"}, "input"),
    ],
)
def test_a_wrong_submit_gets_one_typed_terminal_and_leaves_nothing(served, fields, code):
    served.submit(**fields)
    assert [m.code for m in served.sent[b"client"] if isinstance(m, Terminal)] == [code]
    assert not [m for w in served.workers for m in served.take(w, Assign)]
    served.assert_nothing_kept()


def test_token_ids_out_of_range_are_refused(served, context):
    bad = msgspec.structs.replace(context(), tokens=WireTokens(np.array([1, 1000], np.int32)))
    served.submit(context=bad)
    terminal = served.one(b"client", Terminal)
    assert terminal.code == "input"
    assert "1000" in terminal.message


def test_a_request_submitted_before_any_worker_is_checked_when_the_model_is_known(bench, context):
    bad = msgspec.structs.replace(context(), tokens=WireTokens(np.array([1, 1000], np.int32)))
    bench.submit("bad", context=bad)
    bench.submit("good")
    assert not bench.take(b"client", Terminal)
    bench.pair()
    assert bench.one(b"client", Terminal).request_id == "bad"
    assert bench.find(Assign)[1].request_id == "good"


# ------------------------------------------------------------------ cancel and disconnect


def test_cancel_ends_the_request_and_frees_both_workers(bench):
    prefill, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 5)
    bench.client(Cancel(request_id="r"))
    terminal = bench.one(b"client", Terminal)
    assert (terminal.status, terminal.code, terminal.position) == ("cancelled", None, 11)
    assert bench.one(prefill, Abort).request == bench.one(decode, Abort).request == key
    decode.tokens(key, 11, 6)
    assert bench.streamed(key) == [(10, 5)]
    bench.client(Cancel(request=key))
    assert len(bench.terminals(key)) == 1  # the same terminal again, in case it was lost
    bench.ack(key)
    bench.assert_nothing_kept()


def test_cancel_of_a_queued_request(bench):
    key = bench.submit()
    bench.client(Cancel(request_id="r"))
    assert bench.terminals(key)[0].status == "cancelled"
    bench.pair()
    bench.advance(1.0)
    assert not [m for w in bench.workers for m in bench.take(w, Assign)]


def test_a_name_is_used_again_after_a_cancel_that_came_before_its_submit(bench):
    """The Cancel applies to one serial, whose Submit was lost, and not to the next serial."""
    bench.pair()
    bench.client(Cancel(request_id="r", serial=1))
    assert bench.one(b"client", Terminal).status == "cancelled"
    bench.submit(serial=1)
    assert bench.one(b"client", Terminal).status == "cancelled"
    bench.submit(serial=2)
    assert not bench.take(b"client", Terminal)
    assert bench.core.unfinished == 1


def test_cancel_of_nothing_and_of_anothers_request(bench):
    bench.pair()
    key, _ = bench.run(identity=b"owner")
    bench.client(Cancel(request=key), b"stranger")
    assert bench.one(b"stranger", Terminal).status == "cancelled"
    assert not bench.terminals(key, b"owner")
    assert bench.core.unfinished == 1


def test_an_absent_clients_request_is_ended_with_its_secret_alone(make_bench):
    """Cancel needs more than the key: workers, logs and operators see keys."""
    bench = make_bench(resume_window_s=30.0)
    bench.pair()
    key, _ = bench.run()
    secret = bench.one(b"client", Submitted).secret
    bench.client_gone()
    for wrong in (b"", b"?" * 16):
        bench.client(Cancel(request=key, secret=wrong), b"stranger")
    assert bench.core.unfinished == 1
    bench.client(Cancel(request=key, secret=secret), b"client, on another connection")
    assert bench.core.unfinished == 0


def test_the_end_of_an_absent_clients_request_is_kept_for_that_client(make_bench):
    bench = make_bench(resume_window_s=30.0)
    prefill, _ = bench.pair()
    key, _ = bench.run()
    submitted = bench.one(b"client", Submitted)
    bench.client_gone()
    prefill.end(key, 10)
    bench.client(FinalAck(requests=[key]), b"stranger")
    bench.client(bench.resume_message(submitted, []), b"again")
    assert bench.one(b"again", Terminal).status == "end_of_sequence"


def test_a_client_sees_its_own_requests_and_no_paths(make_bench):
    keys = {b"client": b"K1", b"second": b"K1", b"other": b"K2"}
    bench = make_bench(model_folder="/secret/place/tiny")
    callers = Authentication(lambda who: Caller(keys.get(who, b"K3"), operator=who == b"operator"))
    bench.core = RouterCore(bench.config, incarnation=77, now=bench.now, authentication=callers)
    prefill, _ = bench.pair()
    mine, assign = bench.run()
    prefill.report(assign)
    theirs, assign = bench.run(identity=b"other")
    prefill.report(assign)
    seen = {
        b"second": {mine}, b"other": {theirs}, b"stranger": set(), b"operator": {mine, theirs},
    }  # fmt: skip
    for who, expected in seen.items():
        bench.client(Status(), who)
        report = bench.one(who, StatusReport).report
        listed = msgspec.json.decode(report)["handoffs"]["last"]
        assert {bytes.fromhex(one["request"]) for one in listed} == expected
        assert all((key.hex().encode() in report) == (key in expected) for key in (mine, theirs))
        assert b"/secret" not in report
        bench.client(Describe(), who)
        folder = bench.one(who, Described).folder
        assert folder == ("/secret/place/tiny" if who == b"operator" else "tiny")


def test_a_vanished_client_frees_its_blocks_at_once(bench):
    prefill, decode = bench.pair()
    for i in range(3):
        bench.run(f"r{i}")
    bench.run("other", identity=b"other")
    bench.client_gone()
    assert len(bench.take(prefill, Abort)) == len(bench.take(decode, Abort)) == 3
    assert bench.core.unfinished == 1


def test_with_a_window_a_client_that_comes_back_in_time_continues(make_bench):
    bench = make_bench(resume_window_s=2.0)
    _prefill, decode = bench.pair()
    key, _ = bench.run()
    submitted = bench.one(b"client", Submitted)
    decode.tokens(key, 10, 5)
    bench.client_gone()
    decode.tokens(key, 11, 6)
    bench.advance(1.0)
    assert not bench.take(decode, Abort)
    bench.client(bench.resume_message(submitted, [5]), b"again")
    assert bench.streamed(key, b"again") == [(11, 6)]
    bench.advance(5.0)
    decode.tokens(key, 12, 7)
    assert bench.streamed(key, b"again") == [(11, 6), (12, 7)]


def test_with_a_window_a_client_that_stays_away_is_aborted(make_bench):
    bench = make_bench(resume_window_s=2.0)
    _, decode = bench.pair()
    bench.run()
    bench.client_gone()
    bench.advance(1.9)
    assert not bench.take(decode, Abort)
    bench.advance(0.2)
    assert bench.take(decode, Abort)
    assert bench.core.kept == 0


# ------------------------------------------------------------------ resume


def test_resume_after_the_abort_replays_under_a_higher_attempt(bench):
    _, decode = bench.pair()
    key, _ = bench.run()
    submitted = bench.one(b"client", Submitted)
    decode.tokens(key, 10, 5, 6)
    bench.client_gone()
    bench.advance(10.0)
    bench.client(bench.resume_message(submitted, [5]), b"again")
    bench.deny(key)
    _, assign = bench.find(Assign)
    assert (assign.attempt, assign.emitted) == (1 + TAKEOVER, [5])
    decode.tokens(key, 11, 6, attempt=1 + TAKEOVER)
    assert bench.streamed(key, b"again") == [(11, 6)]


def test_resume_of_a_running_request_moves_it_to_the_new_connection(bench):
    _, decode = bench.pair()
    key, _ = bench.run()
    submitted = bench.one(b"client", Submitted)
    decode.tokens(key, 10, 5, 6, 7)
    bench.sent.clear()
    bench.client(bench.resume_message(submitted, [5]), b"again")
    assert bench.one(b"again", Submitted).attempt == 1
    assert bench.streamed(key, b"again") == [(11, 6), (12, 7)]
    bench.client_gone()
    decode.tokens(key, 13, 8)
    decode.end(key, 14)
    assert not bench.sent[b"client"]
    assert len(bench.terminals(key, b"again")) == 1


def test_resume_of_an_ended_request_brings_the_rest_and_the_terminal(bench):
    _, decode = bench.pair()
    key, _ = bench.run()
    submitted = bench.one(b"client", Submitted)
    decode.tokens(key, 10, 5, 6)
    decode.end(key, 12)
    bench.client_gone()
    bench.client(bench.resume_message(submitted, [5]), b"again")
    assert bench.streamed(key, b"again") == [(11, 6)]
    assert len(bench.terminals(key, b"again")) == 1
    bench.ack(key, b"again")
    bench.assert_nothing_kept()


def test_resume_of_a_client_that_is_ahead_of_the_router(make_bench):
    """Another router may have sent the client tokens that arrive here late."""
    bench = make_bench()
    _, decode = bench.pair()
    key, _ = bench.run()
    submitted = bench.one(b"client", Submitted)
    decode.tokens(key, 10, 5)
    bench.client(bench.resume_message(submitted, [5, 6, 7]))
    decode.tokens(key, 11, 6, 7, 8)
    assert bench.streamed(key)[-1] == (13, 8)
    assert [p for p, _ in bench.streamed(key)] == [10, 13]


@pytest.mark.parametrize("wrong", ["secret", "position", "token"])
def test_a_resume_that_does_not_fit_is_refused(bench, wrong):
    bench.pair()
    _key, _ = bench.run()
    submitted = bench.one(b"client", Submitted)
    bench.client_gone()
    message = bench.resume_message(submitted, [5])
    change = {
        "secret": {"secret": bytes(16)},
        "position": {"position": 14},
        "token": {"emitted": [1 << 40]},
    }
    bench.client(msgspec.structs.replace(message, **change[wrong]), b"again")
    assert bench.one(b"again", Terminal).code == "input"
    assert bench.core.kept == 0


def test_another_cluster_key_makes_another_secret(make_bench):
    one, two = make_bench(), make_bench(cluster_key="77" * 32)
    one.pair()
    one.run()
    two.pair()
    two.client(two.resume_message(one.one(b"client", Submitted), []))
    assert two.one(b"client", Terminal).code == "input"


# ------------------------------------------------------------------ terminals kept


def test_a_terminal_is_repeated_until_acknowledged(bench):
    _, decode = bench.pair()
    key, _ = bench.run()
    decode.tokens(key, 10, 5)
    decode.end(key, 11)
    bench.advance(8.0)
    assert 3 <= len(bench.terminals(key)) <= 5
    assert len(set(map(str, bench.terminals(key)))) == 1
    bench.ack(key)
    count = len(bench.terminals(key))
    bench.advance(60.0)
    assert len(bench.terminals(key)) == count
    bench.assert_nothing_kept()


def test_an_answer_that_is_complete_after_its_deadline_is_late(bench):
    _, decode = bench.pair()
    key, _ = bench.run(deadline=1.0)
    decode.tokens(key, 10, 5)
    bench.now += 1.5  # no tick between the deadline and the end
    decode.end(key, 11)
    (terminal,) = bench.terminals(key)
    assert (terminal.code, terminal.status) == ("deadline_exceeded", None)
    bench.ack(key)
    bench.advance(60.0)
    bench.assert_nothing_kept()


def test_a_terminal_nobody_acknowledges_is_dropped_at_the_deadline(bench):
    _, decode = bench.pair()
    key, _ = bench.run(deadline=20.0)
    decode.tokens(key, 10, 5)
    decode.end(key, 11)
    bench.client_gone()
    bench.advance(19.0)
    assert bench.core.kept == 1
    bench.advance(2.0)
    bench.assert_nothing_kept()


def test_an_end_waits_for_a_client_that_is_gone_but_not_until_the_deadline(bench):
    _, decode = bench.pair()
    key, _ = bench.run("r", deadline=600.0)
    decode.tokens(key, 10, 5)
    decode.end(key, 11)
    submitted = bench.one(b"client", Submitted)
    bench.client_gone()
    bench.advance(20.0)
    bench.client(bench.resume_message(submitted, []), b"back")
    assert bench.streamed(key, b"back") == [(10, 5)]
    bench.advance(60.0)
    assert bench.core.kept == 1  # a connected client may acknowledge late
    bench.client_gone(b"back")
    bench.advance(31.0)
    bench.assert_nothing_kept()


def test_an_acknowledgement_of_a_running_or_foreign_request_changes_nothing(bench):
    bench.pair()
    key, _ = bench.run()
    bench.ack(key)
    bench.ack(b"?" * 16)
    assert bench.core.unfinished == 1
    bench.client(Cancel(request=key))
    bench.ack(key, b"stranger")
    assert bench.core.kept == 1


# ------------------------------------------------------------------ deadlines


def test_at_the_deadline_the_request_ends_and_both_workers_are_freed(bench):
    prefill, decode = bench.pair()
    key, _ = bench.run(deadline=3.0)
    decode.tokens(key, 10, 5)
    bench.advance(2.9)
    assert not bench.terminals(key)
    bench.advance(0.2)
    assert [t.code for t in bench.terminals(key)] == ["deadline_exceeded"]
    assert bench.take(prefill, Abort)
    assert bench.take(decode, Abort)
    decode.tokens(key, 11, 6)
    assert bench.streamed(key) == [(10, 5)]


def test_expired_work_is_never_started(bench):
    key = bench.submit(deadline=1.0)
    bench.advance(1.5)
    bench.pair()
    bench.advance(1.0)
    assert bench.terminals(key)[0].code == "deadline_exceeded"
    assert not [m for w in bench.workers for m in bench.take(w, Assign)]


# ------------------------------------------------------------------ whole answers


def test_a_whole_answer_comes_with_its_end(bench):
    _, decode = bench.pair()
    key, _ = bench.run(whole=True)
    for position in range(10, 15):
        decode.tokens(key, position, position)
        bench.advance(0.25)
    assert bench.streamed(key) == []
    decode.end(key, 15)
    assert [run.tokens for run in bench.one(b"client", Tokens).runs] == [[10, 11, 12, 13, 14]]
    assert bench.terminals(key)[0].tokens_s == pytest.approx(1.25)
    bench.advance(2.0)  # repeats the terminal alone
    assert len(bench.terminals(key)) > 1
    assert not bench.take(b"client", Tokens)
    bench.ack(key)
    bench.assert_nothing_kept()


def test_a_whole_answer_goes_on_after_a_lost_message_and_a_cancel(bench):
    _, decode = bench.pair()
    key, _ = bench.run(whole=True)
    submitted = bench.one(b"client", Submitted)
    decode.tokens(key, 10, 5)
    decode.tokens(key, 11, 6, 7)
    bench.client(bench.resume_message(submitted, [5]))
    assert bench.streamed(key) == [(11, 6), (12, 7)]
    decode.tokens(key, 13, 8)
    assert bench.streamed(key) == [(11, 6), (12, 7)]
    bench.client(Cancel(request_id="r"))
    assert bench.streamed(key) == [(11, 6), (12, 7), (13, 8)]
    assert [t.status for t in bench.terminals(key)] == ["cancelled"]


def test_a_slow_client_of_a_whole_answer_gets_it_when_it_reads_again(bench):
    _, decode = bench.pair()
    key, _ = bench.run(whole=True)
    decode.tokens(key, 10, 5)
    bench.feed(ClientFull(b"client"))
    decode.tokens(key, 11, 6)
    decode.end(key, 12)
    assert bench.streamed(key) == []
    bench.feed(ClientWritable(b"client"))
    assert bench.streamed(key) == [(10, 5), (11, 6)]
    assert len(bench.terminals(key)) == 1


# ------------------------------------------------------------------ slow clients


def test_a_slow_client_gets_everything_from_its_position_when_it_reads_again(bench):
    _, decode = bench.pair()
    key, _ = bench.run()
    ended, _ = bench.run("second")
    decode.tokens(key, 10, 5)
    bench.feed(ClientFull(b"client"))
    for position in range(11, 15):
        decode.tokens(key, position, position)
    decode.tokens(ended, 10, 1)
    decode.end(ended, 11)
    bench.client(Status())
    assert bench.streamed(key) == [(10, 5)]
    assert not bench.take(b"client", Terminal)
    assert not bench.take(b"client", StatusReport)
    bench.feed(ClientWritable(b"client"))
    assert bench.streamed(key) == [(10, 5), (11, 11), (12, 12), (13, 13), (14, 14)]
    assert bench.streamed(ended) == [(10, 1)]
    assert len(bench.terminals(ended)) == 1
    decode.tokens(key, 15, 15)
    assert bench.streamed(key)[-1] == (15, 15)


def test_a_client_that_stays_slow_gets_its_end_before_it_is_forgotten(bench):
    _, decode = bench.pair()
    key, _ = bench.run(deadline=3.0)
    bench.feed(ClientFull(b"client"))
    decode.tokens(key, 10, 5)
    bench.advance(20.0)
    assert bench.streamed(key) == [(10, 5)]
    assert [t.code for t in bench.terminals(key)] == ["deadline_exceeded"]
    assert bench.core.kept == 0


def test_a_slow_client_that_leaves_is_forgotten(bench):
    bench.feed(ClientFull(b"client"))
    bench.client_gone()
    bench.assert_nothing_kept()


# ------------------------------------------------------------------ queries


def test_describe_hands_out_the_card_and_the_files_asked_for(make_bench, card):
    bench = make_bench(files={"tokenizer.json": b"{}", "chat_template.jinja": b"x"})
    bench.client(Describe())
    assert bench.one(b"client", Described).model is None
    bench.pair()
    bench.client(Describe(files=["tokenizer.json", "config.json", "../secret"]))
    described = bench.one(b"client", Described)
    assert described.model == card
    assert described.files == {"tokenizer.json": b"{}"}
    assert described.available == ["tokenizer.json", "chat_template.jinja"]


def test_status_is_the_promised_object(bench):
    prefill, decode = bench.pair()
    for i in range(3):
        _, assign = bench.run(f"r{i}")
        prefill.report(assign, nbytes=100 + i)
    decode.gone()
    bench.client(Status(handoffs=2))
    report = msgspec.json.decode(bench.one(b"client", StatusReport).report)
    workers = {worker["id"]: worker for worker in report["workers"]}
    assert workers["prefill-0"]["state"] == "ready"
    assert workers["decode-0"]["state"] == "suspect"
    assert workers["decode-0"]["reason"] == "its connection closed"
    for field in (
        "role", "pid", "endpoint", "incarnation", "kv_blocks_total", "kv_blocks_used",
        "requests_running", "requests_waiting", "prefix_hit_tokens",
    ):  # fmt: skip
        assert field in workers["prefill-0"]
    handoffs = report["handoffs"]
    assert (handoffs["count"], handoffs["bytes_sent"], handoffs["bytes_received"]) == (3, 303, 303)
    assert [h["bytes"] for h in handoffs["last"]] == [101, 102]
    assert handoffs["last"][0].items() >= {
        "transport": "zmq", "blocks": 3, "cached_tokens": 16, "milliseconds": 2.0,
    }.items()  # fmt: skip
    assert report["router"]["requests"]["in_flight"] == 3


def test_ping(bench):
    bench.client(Ping(nonce=9))
    assert bench.one(b"client", Pong).nonce == 9


def test_drain_gives_no_new_work_and_tells_the_operator_when_done(served):
    _key, _assign = served.run()
    prefill = next(w for w in served.workers if w.id == "prefill-0")
    served.client(Drain(worker="prefill-0"), b"operator")
    assert served.one(b"operator", Drained).message == "draining"
    assert served.one(prefill, Drain)
    served.advance(5.0)
    assert served.take(prefill, Drain)  # repeated until the worker confirms
    for i in range(4):
        served.submit(f"more{i}")
    assert not served.take(prefill, Assign)
    prefill.say(Drained(worker="prefill-0"))
    assert served.one(b"operator", Drained).message == "drained"
    served.advance(5.0)
    assert not served.take(prefill, Drain)
    prefill.gone()
    served.take(b"operator", Drained)
    served.client(Drain(worker="prefill-0"), b"operator")
    answer = served.one(b"operator", Drained)
    assert (answer.code, answer.message) == (
        "endpoint_dead",
        "worker prefill-0 is dead: drained",
    )


def test_a_drain_is_confirmed_to_the_operators_who_asked_and_are_connected(served):
    """Each drain of a name is its own: earlier askers get nothing from the next one."""
    for operator in (b"left", b"first"):
        served.client(Drain(worker="decode-0"), operator)
    served.client_gone(b"left")
    served.workers[1].say(Drained(worker="decode-0"))
    assert [m.message for m in served.take(b"left", Drained)] == ["draining"]
    assert [m.message for m in served.take(b"first", Drained)] == ["draining", "drained"]
    served.workers[1].gone()
    again = served.join("decode", 0)
    served.client(Drain(worker="decode-0"), b"second")
    again.say(Drained(worker="decode-0"))
    assert [m.message for m in served.take(b"second", Drained)] == ["draining", "drained"]
    assert served.take(b"first", Drained) == []


def test_who_can_be_drained_is_said_in_one_line(served):
    served.client(Drain(worker="nobody"), b"operator")
    answer = served.one(b"operator", Drained)
    assert (answer.worker, answer.code) == ("nobody", "endpoint_unknown")
    assert answer.message == (
        "no worker 'nobody'; workers: decode-0, decode-1, prefill-0, prefill-1"
    )
    served.workers[1].gone()
    served.advance(5.2)
    served.client(Drain(worker="ipc:///run/decode-0"), b"operator")
    answer = served.one(b"operator", Drained)
    assert (answer.worker, answer.code) == ("ipc:///run/decode-0", "endpoint_dead")
    assert answer.message == "worker decode-0 is dead: its connection closed, silent for 5.0 s"


def test_a_suspect_worker_that_is_the_last_is_drained_only_by_force(bench):
    """A suspect worker may return; after its drain no worker would be left."""
    prefill, decode = bench.pair()
    for _ in range(24):
        bench.advance(0.05, beats=False)
        prefill.beat()
    bench.client(Drain(worker="decode-0"), b"operator")
    assert bench.one(b"operator", Drained).code == "input"
    decode.beat()
    _, assign = bench.run()
    assert assign.decode == decode.endpoint


def test_the_last_ready_worker_of_a_role_is_drained_only_by_force(served):
    served.client(Drain(worker="decode-0"), b"operator")
    assert served.one(b"operator", Drained).message == "draining"
    served.client(Drain(worker="decode-1"), b"operator")
    answer = served.one(b"operator", Drained)
    assert answer.code == "input"
    assert answer.message == (
        "decode must keep at least 1 ready worker, and decode-1 is the last: add another "
        "(baton scale decode=2), or drain it anyway (--force)"
    )
    last = next(w for w in served.workers if w.id == "decode-1")
    assert not served.take(last, Drain)
    served.client(Drain(worker="decode-1", force=True), b"operator")
    assert served.one(b"operator", Drained).message == "draining"


def test_a_worker_is_drained_by_its_endpoint_too(served):
    served.client(Drain(worker="ipc:///run/decode-1"), b"operator")
    answer = served.one(b"operator", Drained)
    assert (answer.worker, answer.message) == ("ipc:///run/decode-1", "draining")


def test_a_closing_router_refuses_new_requests_and_finishes_the_others(bench):
    _, decode = bench.pair()
    key, _ = bench.run()
    bench.feed(StopRequested())
    bench.submit("late")
    assert bench.one(b"client", Terminal).code == "router_closing"
    decode.tokens(key, 10, 5)
    decode.end(key, 11)
    assert bench.core.unfinished == 0
    bench.client(FinalAck(requests=[key]))
    assert bench.core.kept == 0
    assert not bench.take(decode, Adopt)


def test_questions_of_one_envelope_are_answered_once(make_bench):
    bench = make_bench(files={"tokenizer.json": b"t" * 1000, "generation_config.json": b"g"})
    questions = [Describe(files=["tokenizer.json"]), Describe(), Status(handoffs=3)] * 500
    questions.insert(7, Describe(files=["generation_config.json"]))
    actions = bench.core.handle(FromClient(b"client", questions), bench.now)
    described, report = [action.message for action in actions]
    assert set(described.files) == {"tokenizer.json", "generation_config.json"}
    assert isinstance(report, StatusReport)


def resumable(bench):
    """Return the key of a running request and its Submitted."""
    bench.pair()
    key, _ = bench.run("r")
    return key, bench.one(b"client", Submitted)


@pytest.mark.parametrize(
    "change",
    [
        {"emitted": [1, 2, 1 << 30]},
        {"emitted": [1, -2, 3]},
        {"emitted": [1] * 21},
        {"emitted": [1, 2, 3], "position": 12},
        {"emitted": [1, 2, 3], "pool": "x"},
        {"emitted": [1, 2, 3], "pin": "strict"},
    ],
    ids=str,
)
def test_a_resume_that_is_wrong_extends_nothing(bench, change):
    key, submitted = resumable(bench)
    request = bench.core.table.requests[key]
    bench.client(bench.resume_message(submitted, **change))
    assert bench.one(b"client", Terminal).code in ("input", "duplicate_request")
    assert (request.next, len(request.emitted)) == (10, 0)


def test_a_resume_of_other_tokens_extends_nothing(bench):
    key, submitted = resumable(bench)
    decode = bench.core.table.requests[key].attempt.decode
    bench.hear(decode.identity, Tokens(runs=[TokenRun(key, 1, 10, [5])]))
    bench.client(bench.resume_message(submitted, [6, 7]))
    assert bench.one(b"client", Terminal).code == "input"
    assert list(bench.core.table.requests[key].emitted) == [5]
    bench.client(bench.resume_message(submitted, [5, 7]))
    assert list(bench.core.table.requests[key].emitted) == [5, 7]


@pytest.mark.parametrize("emitted", [[1] * 21, [1 << 30], [-1]], ids=["many", "large", "negative"])
def test_an_unknown_request_resumed_with_impossible_tokens_is_refused(bench, emitted):
    refused_resume(bench, emitted)


def test_an_attempt_that_leaves_no_room_for_others_is_refused(bench):
    refused_resume(bench, [5], attempt=1 << 31)


def refused_resume(bench, emitted, **fields):
    """Check that a Resume of a dropped request is rejected and leaves no record."""
    key, submitted = resumable(bench)
    bench.client(Cancel(request=key))
    bench.ack(key)
    bench.take(b"client", Terminal)
    bench.client(bench.resume_message(submitted, emitted, **fields))
    assert bench.one(b"client", Terminal).code == "input"
    assert key not in bench.core.table.requests


def test_before_any_worker_a_context_is_checked_too(bench, context):
    wrong = [
        {"log_probabilities": -5000},
        {"log_probabilities": 21},
        {"cache_salt": "s" * 300},
        {"max_length": 1 << 50},
        {"sampling": WireSampling(temperature=float("nan"))},
    ]
    for number, fields in enumerate(wrong):
        bench.submit(f"r{number}", context=msgspec.structs.replace(context(), **fields))
        assert bench.one(b"client", Terminal).code == "input", fields
    assert bench.core.admission.context_bytes == 0


def test_names_of_pools_that_clients_invent_are_not_kept(bench):
    bench.submit("early", pool="nobody")
    bench.take(b"client", Submitted)
    bench.pair()
    kept = len(bench.core.registry._ready)
    for number in range(100):
        bench.submit(f"r{number}", pool=f"pool-{number}")
        assert bench.one(b"client", Terminal).code == "input"
    bench.submit("long", pool="p" * 300)
    assert bench.one(b"client", Terminal).code == "input"
    assert len(bench.core.registry._ready) <= kept + 2


def test_a_placed_request_keeps_no_hashes(make_bench):
    bench = make_bench()
    bench.pair()
    key, _ = bench.run("r", prompt=64)
    assert bench.core.table.requests[key].hashes is None


def test_cancels_that_are_forgotten_are_counted(bench):
    for number in range(MAX_CANCELLED + 3):
        bench.client(Cancel(request_id=f"r{number}"))
    assert bench.core.metrics.dropped["cancel_forgotten"] == 3
