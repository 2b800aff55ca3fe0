"""The router's samples of the last 15 minutes, and the failed requests kept apart."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from baton.proto.wire.messages import HandoffReport, Status, StatusReport, Terminal, WorkerLoad
from baton.router.config import AdmissionConfig
from baton.router.history import INTERVAL_S, SAMPLES
from baton.router.queries import merge_queries

OPERATOR = b"operator"


def report(bench, **asked: int) -> dict:
    bench.client(Status(**asked), OPERATOR)
    return msgspec.json.decode(bench.one(OPERATOR, StatusReport).report)


def serve(
    bench, prefill, decode, request_id: str, seconds: float, *, code: str = "", refused: str = ""
) -> None:
    """Serve two tokens, the first one after ``seconds``; with ``code`` the request fails.

    ``refused``: id of another request, which is submitted meanwhile.
    """
    key, _ = bench.run(request_id)
    if refused:
        bench.submit(refused)
    bench.advance(seconds)
    prefill.tokens(key, 10, 5)
    prefill.say(
        HandoffReport(
            request=key,
            attempt=1,
            prefill=prefill.id,
            decode=decode.id,
            transport="shm",
            bytes_sent=4000,
            bytes_received=4000,
            blocks=1,
            cached_tokens=0,
            frames=1,
            seconds=0.25,
        )
    )
    bench.advance(0.02)
    decode.tokens(key, 11, 6)
    decode.end(key, 12, decode=decode.id, **({"code": code} if code else {}))
    bench.ack(key)


def test_a_sample_has_the_numbers_of_its_interval_alone(bench):
    prefill, decode = bench.pair()
    bench.advance(INTERVAL_S + 0.1)
    serve(bench, prefill, decode, "a", 0.5)
    serve(bench, prefill, decode, "b", 0.5, code="internal_error")
    load = WorkerLoad(kv_blocks_total=100, kv_blocks_used=25, requests_waiting=3)
    decode.beat(load=load)
    bench.advance(INTERVAL_S, beats=False)
    bench.advance(INTERVAL_S)
    found = report(bench, history=9)["history"]["columns"]
    assert {len(column) for column in found.values()} == {3}
    assert found["age_s"] == pytest.approx([11.1, 6.1, 1.1], abs=0.1)
    for name, wanted in (
        ("requests_per_s", 2 / INTERVAL_S),
        ("prompt_tokens_per_s", 20 / INTERVAL_S),
        ("generated_tokens_per_s", 4 / INTERVAL_S),
        ("handoffs_per_s", 2 / INTERVAL_S),
        ("handoff_bytes_per_s", 8000 / INTERVAL_S),
    ):
        assert found[name] == pytest.approx([0, wanted, 0], rel=0.05), name
    assert found["handoff_s"] == [None, 0.25, None]
    assert found["ttft_p50_s"] == [None, pytest.approx(0.5, rel=0.03), None]
    assert found["itl_p99_s"] == [None, pytest.approx(0.02, rel=0.05), None]
    assert found["failed"] == [0, 1, 0]
    assert (found["decode_kv"][1], found["waiting"][1]) == (0.25, 3)


def test_at_most_15_minutes_are_kept_and_sent(bench):
    bench.pair()
    bench.advance(INTERVAL_S * (SAMPLES + 3))
    found = report(bench, history=10 * SAMPLES)["history"]["columns"]
    assert len(found["age_s"]) == SAMPLES
    assert found["age_s"][0] == pytest.approx(15 * 60, abs=2 * INTERVAL_S)
    newest = report(bench, history=2)["history"]["columns"]
    assert newest["age_s"] == found["age_s"][-2:]
    assert "history" not in report(bench)


def test_samples_after_a_pause_stay_on_the_grid(bench):
    bench.pair()
    bench.advance(INTERVAL_S * 2 + 0.1)
    bench.now += 4 * INTERVAL_S  # the process was stopped
    bench.advance(INTERVAL_S + 1)
    ages = report(bench, history=9)["history"]["columns"]["age_s"]
    gaps = [old - new for old, new in pairwise(ages)]
    assert gaps == pytest.approx([INTERVAL_S, 4 * INTERVAL_S, INTERVAL_S], abs=0.2)


def test_successes_do_not_push_out_failed_and_refused_requests(make_bench):
    bench = make_bench(trace_requests=3, admission=AdmissionConfig(max_requests=1))
    prefill, decode = bench.pair()
    for number in range(5):
        serve(bench, prefill, decode, f"bad-{number}", 0.1, code="internal_error")
    for number in range(5):
        serve(bench, prefill, decode, f"good-{number}", 0.1, refused=f"late-{number}")
    found = report(bench, failed=2)
    names = ["bad-3", "bad-4", "late-3", "late-4"]
    assert [one["request_id"] for one in found["failed"]] == names
    assert [one["state"] for one in found["failed"]] == ["failed"] * 2 + ["refused"] * 2
    assert len(report(bench, failed=50)["failed"]) == 6
    assert len(bench.core.stories) == 9


def test_a_request_that_is_refused_again_and_again_counts_once(make_bench):
    bench = make_bench(trace_requests=9, admission=AdmissionConfig(max_requests=1))
    bench.pair()
    bench.submit("first")
    for refusals in range(3):  # a client sends a refused request under another serial
        bench.submit("late", serial=refusals + 1, refusals=refusals)
    answers = [one for one in bench.sent[b"client"] if isinstance(one, Terminal) and one.code]
    assert [one.request_id for one in answers] == ["late"] * 3
    found = report(bench, failed=9)
    assert found["router"]["requests"]["refused_by_reason"] == {"overloaded": 1}
    assert [one["request_id"] for one in found["failed"]] == ["late"]


def test_queries_of_one_envelope_ask_for_the_longest_history():
    many = [Status(history=3, nonce=1), Status(failed=4), Status(history=9)]
    assert merge_queries(many) == [Status(history=9, failed=4, nonce=1)]
