"""What the router keeps of ended requests: why the workers, waits, handoff, replays, refusals."""

from __future__ import annotations

import gc
import tracemalloc

import msgspec
import pytest

from baton.proto.errors import CapacityError
from baton.proto.wire.messages import (
    Assign,
    Busy,
    Cancel,
    HandoffReport,
    Moved,
    Status,
    StatusReport,
    Submit,
    Terminal,
    WorkerTimes,
)
from baton.router import handoffs, status
from baton.router.config import AdmissionConfig
from baton.router.queries import merge_queries
from baton.router.records import Caller
from baton.router.stories import MAX_PAST, STORY_BYTES
from baton.router.story_report import request_line

from .conftest import make_context

PREFILL = WorkerTimes(0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1)
DECODE = WorkerTimes(computing=0.25, computed=0.5, ended=1.0, preemptions=2)


def told(bench, name: str = "", last: int = 0, identity: bytes = b"operator") -> list[dict]:
    bench.client(Status(requests=last, request=name), identity)
    return msgspec.json.decode(bench.one(identity, StatusReport).report)["requests"]


def handoff(assign: Assign, **fields) -> HandoffReport:
    settings = {
        "request": assign.request, "attempt": assign.attempt, "prefill": "prefill-0",
        "decode": "decode-0", "transport": "shm", "bytes_sent": 4096, "bytes_received": 4000,
        "blocks": 3, "cached_tokens": 16, "frames": 2, "seconds": 1.25, "times": PREFILL,
    }  # fmt: skip
    return HandoffReport(**{**settings, **fields})


def start(bench, request_id: str = "r", **fields):
    """Submit a request and accept its Assign; return its prefill and decode worker with it."""
    bench.submit(request_id, **fields)
    prefill, assign = bench.find(Assign)
    prefill.accept(assign)
    return prefill, bench.decode_of(assign), assign


def serve(bench, request_id: str = "r", **fields) -> bytes:
    """Run one request to its end: first token after 1.75 s, the second 1 s later."""
    prefill, decode, assign = start(bench, request_id, **fields)
    key, attempt, prompt = assign.request, assign.attempt, len(assign.context.tokens)
    bench.advance(1.75)
    prefill.tokens(key, prompt, 5, attempt=attempt)
    prefill.say(handoff(assign))
    bench.advance(1.0)
    decode.tokens(key, prompt + 1, 6, attempt=attempt)
    bench.advance(0.25)
    decode.end(key, prompt + 2, attempt=attempt, decode=decode.id, cached_tokens=16, times=DECODE)
    return key


def near(value: float):
    return pytest.approx(value, abs=0.01)


def test_a_story_has_tokens_times_workers_and_the_handoff(bench):
    bench.pair()
    key = serve(bench, gateway="gateway-1", traceparent="00-" + "ab" * 16 + "-" + "cd" * 8 + "-01")
    for record in (told(bench, "r"), told(bench, key.hex()[:10]), told(bench, last=5)):
        (story,) = record
        assert story["request_id"] == "r"
        assert story["request"] == key.hex()
        assert (story["state"], story["finish_reason"]) == ("finished", "end_of_sequence")
        assert story["gateway"] == "gateway-1"
        assert story["traceparent"].startswith("00-abab")
        assert (story["prompt_tokens"], story["cached_tokens"], story["new_tokens"]) == (10, 16, 2)
        assert story["ttft_s"] == near(1.75)
        assert story["itl_s"] == near(1.0)
        assert story["queue_s"] == near(0.75)
        assert story["seconds"] == near(3.0)
        (attempt,) = story["attempts"]
        assert (attempt["prefill"], attempt["decode"]) == ("prefill-0", "decode-0")
        assert attempt["handoff"]["transport"] == "shm"
        assert attempt["handoff"]["bytes_sent"] == 4096
        assert attempt["handoff"]["seconds"] == 1.25
        assert attempt["handoff"]["reported_s"] == near(1.75)
        # The report came 0.25 s later than the worker's own times explain: half of it each way.
        assert attempt["prefill_times"]["received_s"] == near(0.125)
        assert attempt["prefill_times"]["granted_s"] == near(0.625)
        assert attempt["prefill_times"]["refusals"] == 1
        assert attempt["decode_times"]["taken_over_s"] == near(2.0)
        assert attempt["decode_times"]["preemptions"] == 2


def test_a_story_tells_why_its_workers_were_chosen(served):
    prompt = 256
    serve(served, "first", prompt=prompt)
    prefill, decode, _ = start(served, "second", prompt=prompt)
    (story,) = told(served, "second")
    assert story["state"] == "prefilling"
    route = story["attempts"][0]["route"]
    assert (route["policy"], route["pinned"]) == ("prefix_aware", "")
    assert route["prefill"]["cached_tokens"] == prompt
    assert route["prefill"]["candidates"] == 2
    assert route["prefill"]["cost"] < route["prefill"]["next_cost"]
    other = {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[prefill.id]
    assert route["prefill"]["next_best"] == other
    assert story["attempts"][0]["decode"] == decode.id


def test_a_target_endpoint_is_told(served):
    endpoint = served.workers[0].endpoint
    start(served, target_endpoint=endpoint)
    (story,) = told(served, "r")
    route = story["attempts"][0]["route"]
    assert route["pinned"] == "prefill"
    assert "cost" not in route["prefill"]  # without a choice


def test_a_replay_keeps_its_earlier_attempt_and_the_cause(served):
    prefill, _decode, _ = start(served)
    served.advance(0.5)
    prefill.gone()
    _, assign = served.find(Assign)
    again = next(w for w in served.workers if w.endpoint == assign.decode)
    again.end(assign.request, 10, attempt=assign.attempt, decode=again.id)
    (story,) = told(served, "r")
    first, second = story["attempts"]
    assert "connection of worker" in first["cause"]
    assert first["ended_s"] == near(0.5)
    assert second["number"] == 2
    assert second["assigned_s"] == near(0.5)


def test_refusals_by_workers_are_causes_and_only_the_last_attempts_are_kept(make_bench):
    bench = make_bench(busy_backoff_s=0.01, busy_ceiling_s=0.01)
    bench.pair()
    bench.submit()
    for _ in range(MAX_PAST + 5):
        bench.advance(0.1)
        prefill, assign = bench.find(Assign)
        prefill.say(Busy(request=assign.request, attempt=assign.attempt, reason="queue full"))
    (story,) = told(bench, "r")
    assert {one["cause"] for one in story["attempts"][:-1]} == {"prefill-0: queue full"}
    assert len(story["attempts"]) <= MAX_PAST + 1


def test_a_late_report_of_a_handoff_joins_the_story(bench):
    bench.pair()
    prefill, decode, assign = start(bench)
    key = assign.request
    decode.tokens(key, 10, 5, 6)
    decode.end(key, 12, decode=decode.id)
    bench.ack(key)
    assert told(bench, "r")[0]["attempts"][0]["handoff"] is None
    prefill.say(handoff(assign))
    assert told(bench, "r")[0]["attempts"][0]["handoff"]["bytes_sent"] == 4096


def test_a_late_report_joins_a_story_that_the_log_has_not_taken(make_bench):
    bench = make_bench(fresh_stories=True)
    bench.pair()
    prefill, decode, assign = start(bench)
    decode.tokens(assign.request, 10, 5, 6)
    decode.end(assign.request, 12, decode=decode.id)
    bench.ack(assign.request)
    prefill.say(handoff(assign))
    (story,) = bench.core.stories.take_fresh()
    assert story.attempts[0].report.bytes_sent == 4096
    assert told(bench, "r")[0]["attempts"][0]["handoff"]["frames"] == 2


def test_a_story_that_no_report_can_join_need_not_wait_for_the_tick(make_bench):
    bench = make_bench(fresh_stories=True)
    prefill, decode = bench.pair()
    for name in ("one", "two"):
        bench.ack(serve(bench, name))
    _, _, assign = start(bench, "unreported")
    decode.tokens(assign.request, 10, 5, 6)
    decode.end(assign.request, 12, decode=decode.id)
    bench.ack(assign.request)
    kept = bench.core.stories
    assert kept.take_complete(at_least=3) == []
    assert [one.request_id for one in kept.take_complete(at_least=2)] == ["one", "two"]
    prefill.say(handoff(assign))
    (story,) = kept.take_fresh()
    assert (story.request_id, story.attempts[0].report.frames) == ("unreported", 2)
    assert kept.take_fresh() == kept.take_complete() == []


def test_a_story_is_fresh_once_though_its_record_is_kept(make_bench):
    bench = make_bench(fresh_stories=True)
    bench.pair()
    key = serve(bench)
    assert [one.request_id for one in bench.core.stories.take_fresh()] == ["r"]
    bench.ack(key)
    assert bench.core.stories.take_fresh() == []
    assert told(bench, "r")[0]["state"] == "finished"


def test_stories_are_the_same_before_and_after_they_are_encoded(make_bench):
    bench = make_bench(trace_requests=4)
    bench.pair()
    for number in range(6):
        key = serve(bench, f"request-{number}")
        before = told(bench, f"request-{number}")
        assert len(before) == 1
        bench.ack(key)
        assert told(bench, f"request-{number}") == before
        assert told(bench, key.hex()[:9]) == before
    kept = [f"request-{number}" for number in range(2, 6)]
    assert [one["request_id"] for one in told(bench, last=9)] == kept
    assert [one["request_id"] for one in told(bench, "request-")] == kept
    assert [one["request_id"] for one in told(bench, last=2)] == kept[2:]


def test_a_handoff_of_an_ended_request_is_reported_by_its_prefill_worker_alone(bench):
    bench.pair()
    _, decode, assign = start(bench)
    rogue = bench.join("prefill", 1)
    key = assign.request
    decode.tokens(key, 10, 5, 6)
    decode.end(key, 12)
    bench.ack(key)
    rogue.say(handoff(assign))
    assert bench.core.metrics.dropped["unproven"] == 1
    rogue.say(handoff(assign, prefill=rogue.id))
    assert told(bench, "r")[0]["attempts"][0]["handoff"] is None


def test_a_running_request_s_handoff_names_its_prefill_worker(bench):
    bench.pair()
    prefill, _, assign = start(bench)
    prefill.say(handoff(assign, prefill="prefill-7"))
    assert bench.core.metrics.dropped["unproven"] == 1
    assert bench.core.handoffs.count == 0


def test_reports_with_invented_names_displace_no_worker_s_bytes(bench, monkeypatch):
    monkeypatch.setattr(handoffs, "MAX_WORKERS", 3)
    bench.pair()
    prefill, _, assign = start(bench)
    for number in range(9):
        prefill.say(handoff(assign, request=bytes([number] * 16), decode=f"invented-{number}"))
    prefill.say(handoff(assign))
    found = {name: one.bytes for name, one in bench.core.handoffs.metrics.by_worker.items()}
    assert found == {"prefill-0": 10 * 4096, "decode-0": 4096}


def test_a_refused_request_has_a_story_with_its_reason(make_bench):
    bench = make_bench(admission=AdmissionConfig(max_requests=1))
    bench.pair()
    start(bench)
    bench.submit("too-many")
    (story,) = told(bench, "too-many")
    assert (story["state"], story["code"]) == ("refused", CapacityError.code)
    assert "1 requests are in flight" in story["message"]
    assert story["attempts"] == []
    states = [one["state"] for one in told(bench, last=9)]
    assert states == ["refused", "prefilling"]


def test_cancelled_and_moved_requests_are_told(bench):
    bench.pair()
    start(bench)
    bench.client(Cancel(request_id="r"))
    assert told(bench, "r")[0]["state"] == "cancelled"
    assert told(bench, "r")[0]["message"] == "cancelled"
    prefill, _, assign = start(bench, "r2")
    prefill.say(Moved(request=assign.request, router="router-1"))
    assert told(bench, "r2")[0]["state"] == "moved"


def test_the_id_of_an_http_client_finds_every_choice(bench):
    bench.pair()
    own = "my-request-17"
    for choice in range(2):
        serve(bench, f"chatcmpl-{own}-00ff00ff-{choice}")
    serve(bench, "chatcmpl-other")
    assert len(told(bench, own)) == 2
    assert told(bench, "my-re") == []  # too short for a part


def test_a_client_sees_its_own_requests_only(make_bench):
    keys = {b"client": Caller(b"A", operator=False), b"operator": Caller(b"C", operator=True)}
    keys[b"other"] = Caller(b"B", operator=False)
    bench = make_bench(caller_of=keys.__getitem__)
    bench.pair()
    key = serve(bench)
    for _ in ("with its record", "without its record"):
        assert len(told(bench, "r", identity=b"operator")) == 1
        assert len(told(bench, "r", identity=b"client")) == 1
        assert told(bench, "r", identity=b"other") == []
        assert told(bench, last=9, identity=b"other") == []
        bench.ack(key)


def test_requests_of_others_take_no_places_in_a_client_s_list(make_bench, monkeypatch):
    keys = {b"client": Caller(b"A", operator=False), b"other": Caller(b"B", operator=False)}
    bench = make_bench(caller_of=keys.__getitem__)
    bench.pair()
    monkeypatch.setattr(status, "MAX_REPORTED_REQUESTS", 3)
    for who in (b"client", b"other"):
        for number in range(4):
            bench.client(Submit(request_id=f"request-{number}", context=make_context()), who)
            _, assign = bench.find(Assign)
            bench.decode_of(assign).end(assign.request, 10, attempt=assign.attempt)
            bench.advance(0.1)
    for asked in ({"last": 3}, {"name": "request-"}):
        found = told(bench, identity=b"client", **asked)
        assert [one["request_id"] for one in found] == ["request-1", "request-2", "request-3"]
        assert {one["client"] for one in found} == {b"client".hex()}


def test_the_last_requests_are_kept_without_prompt_and_tokens(make_bench):
    bench = make_bench(trace_requests=3)
    bench.pair()
    for number in range(5):
        bench.ack(serve(bench, f"r{number}", prompt=1000))
    assert [one["request_id"] for one in told(bench, last=9)] == ["r2", "r3", "r4"]
    assert not bench.core.table.requests
    assert [len(one) < 1000 for one in bench.core.stories._kept] == [True] * 3


def test_nothing_is_kept_if_it_is_turned_off(make_bench):
    bench = make_bench(trace_requests=0)
    bench.pair()
    key = serve(bench)
    assert told(bench, "r") == told(bench, last=9) == []
    assert bench.core.table.requests[key].ended_at == float("inf")


WIDE = "\U0001f600"


def widest(kind: type[msgspec.Struct], **fields):
    """Return a message with the longest texts that the decoder admits, from its bytes.

    A text of more than 5,000 characters would only take the test's time.
    """
    found = dict(fields)
    for one in msgspec.inspect.type_info(kind).fields:
        kinds = getattr(one.type, "types", (one.type,))
        text = next((t for t in kinds if isinstance(t, msgspec.inspect.StrType)), None)
        if text is not None:
            found[one.name] = WIDE * min(text.max_length, 5000)
    return msgspec.msgpack.decode(
        msgspec.msgpack.encode({"type": kind.__name__} | found), type=kind
    )


def test_the_memory_of_a_story_is_bounded_whatever_workers_report(make_bench):
    bench = make_bench(busy_backoff_s=0.01, busy_ceiling_s=0.01, trace_requests=20)
    prefill, decode = bench.pair()

    huge = {"bytes_sent": 1 << 50, "bytes_received": 1 << 50, "blocks": 1 << 50, "times": PREFILL}

    def serve_long(name: str) -> None:
        bench.submit(name, gateway=WIDE * 999, traceparent=WIDE * 999)
        for last in [False] * (MAX_PAST + 1) + [True]:
            _, assign = bench.find(Assign)
            again = {"request": assign.request, "attempt": assign.attempt}
            report = widest(HandoffReport, **again, **huge, cached_tokens=1 << 50)
            if not last:
                bench.core.table.requests[assign.request].attempt.report = report
                prefill.say(widest(Busy, **again))
                bench.advance(0.1)
        prefill.accept(assign)
        prefill.say(msgspec.structs.replace(report, prefill=prefill.id))
        decode.say(widest(Terminal, **again, position=10, times=DECODE))
        bench.ack(assign.request)
        bench.sent.clear()
        bench.logs.clear()

    serve_long("first")
    tracemalloc.start()
    try:
        for number in range(20):
            serve_long(f"{number:02}" + WIDE * 250)
        bench.advance(10.0)
        bench.sent.clear()
        gc.collect()
        found = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    # msgspec.inspect, which only the test calls, keeps what it was asked for in a growing table.
    kept = found.filter_traces([tracemalloc.Filter(False, "*/msgspec/*")])
    used = sum(one.size for one in kept.statistics("filename")) / 20
    assert len(bench.core.stories) == 20
    assert used < STORY_BYTES


def test_fresh_stories_are_taken_once_and_make_log_lines(make_bench):
    bench = make_bench(fresh_stories=True, trace_requests=0)
    bench.pair()
    key = serve(bench)
    (story,) = bench.core.stories.take_fresh()
    assert bench.core.stories.take_fresh() == []
    assert msgspec.to_builtins(request_line(story)) == {
        "outcome": "finished", "request_id": "r", "request": key.hex(),
        "client": b"client".hex(), "finish_reason": "end_of_sequence",
        "prompt_tokens": 10, "cached_tokens": 16, "new_tokens": 2,
        "seconds": near(3.0), "queue_s": near(0.75), "ttft_s": near(1.75), "itl_s": near(1.0),
        "prefill": "prefill-0", "decode": "decode-0", "transport": "shm",
        "way": "handed_over",
    }  # fmt: skip


def test_the_line_of_a_request_that_ended_at_its_prefill_worker_names_no_decode_worker(make_bench):
    bench = make_bench(fresh_stories=True)
    bench.pair()
    prefill, _, assign = start(bench)
    prefill.tokens(assign.request, 10, 5)
    prefill.end(assign.request, 11, times=PREFILL)
    (story,) = bench.core.stories.take_fresh()
    line = msgspec.to_builtins(request_line(story))
    assert (line["outcome"], line["new_tokens"], line["prefill"]) == ("finished", 1, "prefill-0")
    assert line["way"] == "prefill"
    assert "decode" not in line


def test_the_line_of_a_request_that_reached_no_worker_has_no_way(make_bench):
    bench = make_bench(fresh_stories=True)
    bench.submit()
    bench.client(Cancel(request_id="r"))
    (story,) = bench.core.stories.take_fresh()
    line = request_line(story)
    assert (line.outcome, line.way, line.prefill, line.decode) == ("cancelled", "", "", "")
    assert line.attempts == 0


def test_queries_of_one_envelope_are_merged():
    many = [Status(), Status(requests=1), Status(request="r")]
    assert merge_queries(many) == [Status(handoffs=16, requests=1, request="r")]
    many = [Status(nonce=1), Status(request="r", nonce=2), Status(metrics=True, nonce=3)]
    assert merge_queries(many) == [Status(request="r", metrics=True, nonce=2)]


def test_a_status_report_repeats_the_nonce_of_its_status(bench):
    bench.client(Status(nonce=7), b"operator")
    assert bench.one(b"operator", StatusReport).nonce == 7


def test_a_short_id_of_an_http_client_finds_its_request(make_bench):
    bench = make_bench()
    for name in ("chatcmpl-7-0123456789ab-0", "chatcmpl-17-0123456789ab"):
        bench.submit(name)
    assert [one["request_id"] for one in told(bench, "7")] == ["chatcmpl-7-0123456789ab-0"]
    assert told(bench, "8") == told(bench, "") == []
