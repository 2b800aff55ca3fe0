"""Histograms of durations, and the TTFT and ITL that the router measures."""

from __future__ import annotations

import random

import msgspec
import pytest

from baton.proto.errors import DecodeFailed, LimitExceeded
from baton.proto.wire.messages import Heartbeat, Status, StatusReport, TokenRun, Tokens
from baton.router.events import ClientInputRejected, WorkerInputRejected
from baton.runtime.metrics.latency import BUCKETS, PERIOD_S, SHORTEST_S, Latency, bucket, percentile


def report(bench) -> dict:
    bench.client(Status(), b"operator")
    return msgspec.json.decode(bench.one(b"operator", StatusReport).report)


def test_percentiles_are_within_three_percent_of_the_sorted_durations():
    rng = random.Random(7)
    durations = sorted(rng.lognormvariate(-4, 1.5) for _ in range(5000))
    latency = Latency()
    for seconds in durations:
        latency.add(seconds, now=1.0)
    found = latency.summary(now=2.0)
    assert found["count"] == 5000
    for percent in (50, 90, 99):
        assert found[f"p{percent}"] == pytest.approx(durations[50 * percent - 1], rel=0.03)


def test_what_is_too_short_or_too_long_counts_in_the_outer_buckets():
    assert [bucket(s) for s in (-1.0, 0.0, SHORTEST_S)] == [0, 0, 0]
    assert bucket(1e9) == BUCKETS - 1
    assert percentile([0] * BUCKETS, 99) is None


def test_old_durations_are_forgotten_and_their_count_is_not():
    latency = Latency()
    latency.add(1.0, now=0.0, count=10)
    latency.add(0.001, now=PERIOD_S, count=9)
    assert latency.summary(PERIOD_S)["p50"] == pytest.approx(1.0, rel=0.03)
    assert latency.summary(2 * PERIOD_S)["p99"] == pytest.approx(0.001, rel=0.03)
    assert latency.summary(9 * PERIOD_S) == {"count": 19, "p50": None, "p90": None, "p99": None}


def test_histograms_that_began_at_other_times_cover_the_same_durations():
    """`baton status` shows the TTFT of the cluster above that of its only prefill worker."""
    cluster, worker = Latency(), Latency()
    cluster.summary(0.2 * PERIOD_S)  # before the worker has registered
    for at in range(5, 40):
        for latency in (cluster, worker):
            latency.add(0.001 * at, now=PERIOD_S * at / 10)
        if at % 3 == 0:
            assert cluster.summary(PERIOD_S * at / 10) == worker.summary(PERIOD_S * at / 10)
    assert cluster.summary(4.3 * PERIOD_S) == worker.summary(4.3 * PERIOD_S)


def test_a_first_token_is_counted_once_at_its_prefill_worker(bench):
    prefill, _decode = bench.pair()
    key, _ = bench.run()
    bench.advance(0.25)
    prefill.tokens(key, 10, 5)
    found = report(bench)
    assert found["router"]["latency"]["first_token_s"]["p50"] == pytest.approx(0.25, rel=0.03)
    assert found["router"]["latency"]["between_tokens_s"]["count"] == 0
    workers = {worker["id"]: worker for worker in found["workers"]}
    assert workers["prefill-0"]["first_token_s"]["count"] == 1
    assert workers["decode-0"]["between_tokens_s"]["count"] == 0


def test_gaps_are_counted_per_request_and_at_the_worker_that_made_them(bench):
    prefill, decode = bench.pair()
    started = [bench.run(f"r{i}") for i in range(3)]
    for key, _ in started:
        prefill.tokens(key, 10, 5)
    bench.advance(0.1)  # the handoff
    for _, assign in started:
        prefill.report(assign)
    keys = [key for key, _ in started]
    decode.say(Tokens(runs=[TokenRun(key, 1, 11, [6]) for key in keys[:2]]))
    bench.advance(0.01)
    decode.say(Tokens(runs=[TokenRun(key, 1, 12, [6]) for key in keys[:2]]))
    bench.advance(0.29)  # the third request has a late token, in one message with the first
    decode.say(Tokens(runs=[TokenRun(keys[0], 1, 13, [6]), TokenRun(keys[2], 1, 11, [6])]))
    found = report(bench)
    between = found["router"]["latency"]["between_tokens_s"]
    assert between["count"] == 6
    assert between["p50"] == pytest.approx(0.1, rel=0.03)
    assert between["p99"] == pytest.approx(0.4, rel=0.03)
    workers = {worker["id"]: worker for worker in found["workers"]}
    assert workers["decode-0"]["between_tokens_s"] == between


def test_repeated_tokens_are_no_gap(bench):
    prefill, decode = bench.pair()
    key, assign = bench.run()
    prefill.tokens(key, 10, 5)
    prefill.report(assign)
    decode.tokens(key, 11, 6)
    decode.tokens(key, 11, 6)
    found = report(bench)["router"]
    assert found["latency"]["between_tokens_s"]["count"] == 1
    assert found["dropped"] == {"repeated_tokens": 1}


def test_a_resumed_request_waits_for_no_first_token(make_bench):
    old = make_bench()
    prefill, _ = old.pair()
    key, _ = old.run()
    prefill.tokens(key, 10, 5)
    new = make_bench()
    new.client(new.resume_message(old.sent[b"client"][0], [5]))
    new.join("prefill")
    decode = new.join("decode")
    new.advance(5.0)
    decode.tokens(key, 11, 6, attempt=new.core.table.requests[key].attempt.number)
    latency = report(new)["router"]["latency"]
    assert latency["first_token_s"]["count"] == latency["between_tokens_s"]["count"] == 0


def test_what_cannot_be_used_is_counted_by_reason(bench):
    _, decode = bench.pair()
    bench.feed(ClientInputRejected(b"x", DecodeFailed("no message")))
    bench.feed(WorkerInputRejected(b"y", LimitExceeded("too large")))
    stranger = bench.join("decode", 7, said_role="cook")
    stranger.beat()
    key, _ = bench.run()
    bench.client_gone()
    decode.tokens(key, 10, 5)
    decode.tokens(b"?" * 16, 10, 5)
    assert report(bench)["router"]["dropped"] == {
        "client_decode_failed": 1,
        "worker_limit_exceeded": 1,
        "refused_worker": 1,
        "unknown_worker": 1,
        "unknown_request": 2,
    }


def test_late_attempts_are_counted(bench):
    prefill, decode = bench.pair()
    key, assign = bench.run()
    prefill.tokens(key, 10, 5)
    prefill.report(assign)
    decode.gone()
    prefill.tokens(key, 11, 6, attempt=1)
    assert report(bench)["router"]["dropped"] == {"late_attempt": 1}


def test_what_a_worker_dropped_is_shown_with_it(bench):
    _, decode = bench.pair()
    decode.say(
        Heartbeat(
            incarnation=decode.hello.incarnation, progress=1, dropped={"data_decode_failed": 3}
        )
    )
    workers = {worker["id"]: worker for worker in report(bench)["workers"]}
    assert workers["decode-0"]["dropped"] == {"data_decode_failed": 3}
    assert workers["prefill-0"]["dropped"] == {}
