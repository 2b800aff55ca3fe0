"""What the router counts, and the totals of workers over their incarnations."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.messages import (
    Buckets,
    Cancel,
    Drained,
    Hello,
    Status,
    StatusReport,
    WorkerLoad,
    WorkerTimes,
)
from baton.router import worker_totals
from baton.router.metrics import Served
from baton.router.records import NEVER, Worker
from baton.runtime.metrics import families
from baton.runtime.metrics.exposition import exposition
from baton.runtime.metrics.families import (
    GAP_S,
    LATENCY_S,
    STEP_SECONDS,
    STEP_TOKENS,
    TOKENS,
    Family,
)
from baton.runtime.metrics.latency import BUCKETS, bucket, cumulated

from .conftest import CARD, Bench, make_config
from .test_stories import serve

HELLO = Hello(
    version=PROTOCOL_VERSION, worker="", role="decode", incarnation=7, pid=1,
    endpoint="ipc:///decode", model=CARD,
)  # fmt: skip


def numbers(bench: Bench, name: str) -> dict[tuple[str, ...], float]:
    """Return the series of a family by labels; of a histogram, the number of values."""
    (family,) = (one for one in bench.core.families(bench.now) if one.name == name)
    if family.kind == "histogram":
        return {row.labels: sum(row.counts) for row in family.rows}
    return {row.labels: row.value for row in family.rows}


def total(bench: Bench, name: str) -> float:
    return sum(numbers(bench, name).values())


@pytest.fixture
def bench():
    return Bench(make_config())


def served(bench: Bench, name: str = "r", tokens: int = 4, **end) -> None:
    """Serve one request of ten prompt tokens: the first token after 0.2 s, then one each 0.05 s."""
    key, assign = bench.run(name)
    prefill = next(w for w in bench.workers if w.hello.role == "prefill")
    decode = bench.decode_of(assign)
    bench.advance(0.2)
    prefill.tokens(key, 10, 7)
    prefill.report(assign, 4096, WorkerTimes(computing=0.05, computed=0.15))
    for index in range(1, tokens):
        bench.advance(0.05)
        decode.tokens(key, 10 + index, 7)
    decode.end(key, 10 + tokens, **{"cached_tokens": 8, **end})
    bench.ack(key)


def test_a_served_request_is_counted_once_in_each_family(bench):
    bench.pair()
    served(bench)
    assert numbers(bench, "baton_requests_total")["ok", "stop"] == 1
    once = [
        "baton_requests_submitted_total",
        "baton_time_to_first_token_seconds",
        "baton_time_per_output_token_seconds",
        "baton_request_duration_seconds",
        "baton_request_prompt_tokens",
        "baton_handoffs_total",
        "baton_handoff_seconds",
        "baton_handoff_throughput_bytes_per_second",
    ]
    assert {name: total(bench, name) for name in once} == dict.fromkeys(once, 1)
    assert total(bench, "baton_inter_token_latency_seconds") == 3
    assert total(bench, "baton_prompt_tokens_total") == 10
    assert total(bench, "baton_cached_prompt_tokens_total") == 8
    assert total(bench, "baton_generated_tokens_total") == 4
    assert total(bench, "baton_request_queue_seconds") == 1
    assert total(bench, "baton_request_prefill_seconds") == 1
    assert numbers(bench, "baton_handoff_bytes_total") == {("zmq",): 4096}


def test_the_sums_are_the_durations(bench):
    bench.pair()
    served(bench)
    sums = {f.name: f.rows[0].value for f in bench.core.families(bench.now) if f.rows and f.bounds}
    assert sums["baton_time_to_first_token_seconds"] == pytest.approx(0.2)
    assert sums["baton_inter_token_latency_seconds"] == pytest.approx(0.15)
    assert sums["baton_time_per_output_token_seconds"] == pytest.approx(0.05)
    assert sums["baton_request_queue_seconds"] == pytest.approx(0.05)
    assert sums["baton_request_prefill_seconds"] == pytest.approx(0.1)
    assert sums["baton_request_duration_seconds"] == pytest.approx(0.35)


def test_many_requests_are_counted_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(families, "MAX_ROWS", 4)
    bench = Bench(make_config())
    bench.pair()
    metrics = bench.core.metrics
    for number in range(10):
        served(bench, f"r{number}", tokens=2 + number % 2)
        assert len(metrics._requests) < 4
        assert len(metrics._attempts) < 4
        assert len(bench.core.handoffs.metrics._transports["zmq"].new) < 4
    assert numbers(bench, "baton_requests_total")["ok", "stop"] == 10
    assert total(bench, "baton_request_generated_tokens") == 10
    assert total(bench, "baton_request_queue_seconds") == 10
    assert total(bench, "baton_handoff_seconds") == 10
    assert numbers(bench, "baton_handoff_bytes_total") == {("zmq",): 40_960}
    found = {one.name: one.rows[0].value for one in bench.core.families(bench.now) if one.bounds}
    assert found["baton_request_prompt_tokens"] == 100
    assert found["baton_request_generated_tokens"] == 25


def test_outcomes_have_their_reason_and_unknown_codes_are_one(bench):
    bench.pair()
    served(bench, status="maximum_length")
    served(bench, "s", code="deadline_exceeded", message="late")
    served(bench, "t", code="made-up-by-a-rogue", message="?")
    found = numbers(bench, "baton_requests_total")
    assert {labels: count for labels, count in found.items() if count} == {
        ("ok", "length"): 1,
        ("failed", "deadline_exceeded"): 1,
        ("failed", "other"): 1,
    }


@pytest.mark.parametrize("window", [0.0, 30.0])
def test_a_request_of_a_lost_connection_is_not_counted_as_cancelled(make_bench, window):
    """A client whose router was silent submits again on another connection, under another key."""
    bench = make_bench(resume_window_s=window)
    bench.pair()
    bench.submit("cancelled", identity=b"other")
    bench.client(Cancel(request_id="cancelled"), b"other")
    bench.submit()
    bench.submit(identity=b"again")
    bench.client_gone()
    bench.advance(window + 1.0)
    found = numbers(bench, "baton_requests_total")
    assert found["cancelled", "cancelled"] == found["disconnected", "disconnected"] == 1
    bench.client(Status(), b"operator")
    requests = msgspec.json.decode(bench.one(b"operator", StatusReport).report)["router"][
        "requests"
    ]
    assert (requests["submitted"], requests["in_flight"]) == (3, 1)
    assert (requests["cancelled"], requests["disconnected"]) == (1, 1)


def test_refused_requests_are_counted_by_reason(bench):
    bench.pair()
    bench.submit(pin="maybe")
    bench.submit("q", target_endpoint="ipc:///nowhere")
    found = numbers(bench, "baton_requests_refused_total")
    assert found == {("overloaded",): 0, ("input",): 1, ("endpoint_unknown",): 1}
    bench.client(Status(), b"operator")
    report = msgspec.json.decode(bench.one(b"operator", StatusReport).report)
    assert report["router"]["requests"]["refused"] == 2
    assert "metrics" not in report


def test_a_status_with_metrics_carries_the_families(bench):
    bench.pair()
    served(bench)
    bench.client(Status(metrics=True), b"operator")
    report = msgspec.json.decode(bench.one(b"operator", StatusReport).report)
    families = msgspec.convert(report["metrics"], list[Family])
    assert b'baton_requests_total{outcome="ok",reason="stop"} 1.0' in exposition(families)


def load(**counts: int) -> WorkerLoad:
    steps = counts.get("generated_tokens", 0)
    histograms = {
        STEP_SECONDS: Buckets([steps, *[0] * len(GAP_S)], steps * 0.0001),
        STEP_TOKENS: Buckets([1, 2, 3], 7.0),  # of another version, with other bounds
        "unknown": Buckets([1], 1.0),
    }
    return WorkerLoad(histograms=histograms, **counts)


def generated(bench: Bench) -> float:
    return numbers(bench, "baton_worker_generated_tokens_total")["decode-0", "decode"]


def test_a_total_keeps_what_dead_incarnations_counted(bench):
    bench.pair()
    seen = []
    for life in range(3):
        worker = bench.workers[-1] if not life else bench.join("decode")
        for tokens in (5, 9):
            worker.beat(load=load(generated_tokens=tokens))
            seen.append(generated(bench))
        worker.gone()
        bench.advance(60.0, beats=False)
        bench.workers.remove(worker)
        seen.append(generated(bench))
    assert seen == [5, 9, 9, 14, 18, 18, 23, 27, 27]
    assert numbers(bench, "baton_worker_restarts_total")["decode-0", "decode"] == 2
    assert numbers(bench, "baton_worker_step_seconds") == {("decode",): 27}
    assert numbers(bench, "baton_worker_step_tokens") == {}


def test_a_total_of_a_worker_that_reports_less_does_not_fall(bench):
    bench.pair()
    worker = bench.workers[-1]
    for tokens in (1000, 5, 1002):
        worker.beat(load=load(generated_tokens=tokens))
        assert generated(bench) == numbers(bench, "baton_worker_step_seconds")["decode",] >= 1000
    worker.beat(load=WorkerLoad())
    worker.gone()
    bench.advance(60.0, beats=False)
    assert generated(bench) == numbers(bench, "baton_worker_step_seconds")["decode",] == 1002


def test_a_dead_incarnation_keeps_its_total_when_another_name_claims_it():
    totals = worker_totals.WorkerTotals()
    lives = [Worker(b"", replace(HELLO, worker=f"decode-{n}"), 0.0) for n in (0, 1)]
    for worker, tokens in zip(lives, (1000, 3), strict=True):
        worker.load = load(generated_tokens=tokens)
    first, other = lives
    totals.joined(first)
    totals.died(first)
    totals.joined(other)
    tokens = {name: sums[1] for (name, _), sums in totals.sums([other]).items()}
    assert tokens == {"decode-0": 1000, "decode-1": 3}
    totals.died(other)
    assert {name: sums[1] for (name, _), sums in totals.sums([]).items()} == tokens
    back = Worker(b"", replace(HELLO, worker="decode-0"), 0.0)  # its Hello reports no counts
    totals.joined(back)
    assert {name: sums[1] for (name, _), sums in totals.sums([back]).items()} == tokens


def test_many_dead_incarnations_are_added_up(bench, monkeypatch):
    monkeypatch.setattr(worker_totals, "KEEP_INCARNATIONS", 1)
    bench.pair()
    for _ in range(4):
        worker = bench.workers[-1]
        worker.beat(load=load(generated_tokens=10))
        worker.gone()
        bench.advance(60.0, beats=False)
        bench.workers.remove(worker)
        bench.join("decode")
    assert generated(bench) == 40
    assert numbers(bench, "baton_worker_step_seconds") == {("decode",): 40}


def test_a_drained_worker_with_a_successor_is_no_restart(bench):
    _, decode = bench.pair()
    bench.join("decode", 1)
    decode.beat(load=load(generated_tokens=4), draining=True)
    decode.say(Drained(worker="decode-0"))
    decode.gone()
    bench.join("decode")
    assert numbers(bench, "baton_worker_restarts_total")["decode-0", "decode"] == 0
    assert generated(bench) == 4


@pytest.mark.parametrize(
    ("own", "counted"),
    [
        ({}, ("cluster", "ttft")),  # 1.75 s and 1 s are the times, 1.5 s and 2 s the limits
        ({"slo_ttft": 1.8}, ("own", "none")),
        ({"slo_itl": 0.9}, ("own", "both")),
        ({"slo_ttft": 2.0, "slo_itl": 0.9}, ("own", "itl")),
    ],
)
def test_goodput_counts_requests_by_their_own_limits_or_the_cluster_s(make_bench, own, counted):
    bench = make_bench(slo_ttft_s=1.5, slo_itl_s=2.0)
    bench.pair()
    serve(bench, **own)
    found = numbers(bench, "baton_requests_limits_total")
    assert {key: count for key, count in found.items() if count} == {counted: 1}
    assert len(found) == 8


@pytest.mark.filterwarnings("error")
def test_a_resumed_request_that_streamed_nothing_here_has_no_latency_and_no_warning():
    served = Served()
    row = [0, 0, 10, 14, NEVER, NEVER, NEVER, 5.0, False, 1.0, 1.0]
    served.count_requests(tuple(np.array([value]) for value in row))
    assert served.finished[0] == 1 and not served.kept.total()


def test_a_worker_that_registers_in_the_other_pool_is_a_change_of_role():
    totals = worker_totals.WorkerTotals()
    for incarnation, role in enumerate(("decode", "prefill", "prefill", "decode")):
        hello = replace(HELLO, worker="decode-0", role=role, incarnation=incarnation + 1)
        worker = Worker(b"", hello, 0.0)
        totals.joined(worker)
        totals.died(worker)
    assert totals.role_changes == {("decode-0", "prefill"): 1, ("decode-0", "decode"): 1}


def test_names_of_workers_are_limited(monkeypatch):
    monkeypatch.setattr(worker_totals, "MAX_NAMES", 2)
    bench = Bench(make_config())
    bench.join("prefill")
    for number in range(4):
        bench.join("decode", number).beat(load=load(generated_tokens=1))
    found = numbers(bench, "baton_worker_generated_tokens_total")
    assert found == {
        ("prefill-0", "prefill"): 0,
        ("decode-0", "decode"): 1,
        ("other", "decode"): 3,
    }


def test_workers_are_counted_by_state(bench):
    bench.pair()
    bench.workers[-1].gone()
    bench.advance(60.0, beats=False)
    found = numbers(bench, "baton_workers")
    assert found["decode", "dead"] == 1
    assert found["decode", "ready"] == 0


def test_fine_buckets_go_to_the_bound_that_holds_their_middle():
    counts = [0] * BUCKETS
    for seconds in (0.0009, 0.004, 0.004, 3.5, 5000.0):
        counts[bucket(seconds)] += 1
    found = dict(zip([*LATENCY_S, None], cumulated(counts, LATENCY_S), strict=True))
    assert {bound: count for bound, count in found.items() if count} == {
        0.001: 1, 0.005: 2, 5.0: 1, None: 1,
    }  # fmt: skip
    assert TOKENS[0] == 1.0
