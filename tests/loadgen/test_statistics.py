"""Percentiles as NumPy computes them, and the latencies of made-up requests."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.loadgen.picture import picture
from baton.loadgen.statistics import (
    CANCELLED,
    FAILED,
    OK,
    REFUSED,
    Distribution,
    Record,
    highest,
    percentile,
    summarize,
    sweep,
    table,
    warning,
)

numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_are_numpys(values, level):
    found = percentile(sorted(values), level)
    assert found == pytest.approx(float(np.percentile(values, level)), rel=1e-9, abs=1e-9)


def test_a_distribution():
    values = np.random.default_rng(1).exponential(size=5000)
    found = Distribution.of([*values, None])
    assert found.count == 5000
    assert found.mean == pytest.approx(values.mean())
    levels = (found.p50, found.p90, found.p95, found.p99, found.max)
    assert levels == pytest.approx(np.percentile(values, [50, 90, 95, 99, 100]))
    assert Distribution.of([None]) == Distribution()


def record(arrived, stamps, outcome=OK, prompt=10, sent=None, error=""):
    one = Record(arrived, sent=arrived if sent is None else sent, prompt_tokens=prompt)
    for at, tokens in stamps:
        one.stamp(at, tokens)
    one.ended = stamps[-1][0] if stamps else arrived + 1.0
    one.outcome, one.error = outcome, error
    return one


def test_the_latencies_of_one_request():
    one = record(1.0, [(1.5, 1), (2.0, 1), (3.0, 3)])
    assert (one.ttft, one.end_to_end, one.tpot) == (0.5, 2.0, 1.5 / 4)
    assert one.gaps() == [0.5, 1.0, 0.0, 0.0]
    first = record(0.0, [(1.0, 2)])
    assert (first.tpot, first.gaps()) == (None, [0.0])
    assert (record(0.0, []).ttft, record(0.0, []).end_to_end) == (None, None)


RECORDS = [
    record(0.0, [(0.1, 1), (0.2, 1), (0.4, 1)]),
    record(1.0, [(1.5, 1), (1.6, 1)], sent=1.25),
    record(2.0, [(2.1, 1)], CANCELLED),
    record(3.0, [], REFUSED, error="full"),
    record(4.0, [], FAILED, error="full"),
]


def test_a_run():
    found = summarize(RECORDS, 8.0, slo_ttft=0.3, slo_itl=0.2)
    assert found.seconds == 5.0 and found.requests == 5
    assert found.outcomes == {OK: 2, CANCELLED: 1, REFUSED: 1, FAILED: 1}
    assert found.request_rate == 2 / 5
    # Of five requests one was in time: a cancelled, refused or failed one is a miss.
    assert (found.attained, found.goodput) == (1 / 5, 1 / 5)
    assert (found.ttft.count, found.end_to_end.count) == (3, 2)
    assert found.first_gap.mean == pytest.approx(0.1)
    assert found.itl.count == 3 and found.itl.max == pytest.approx(0.2)
    assert (found.prompt_tokens, found.output_tokens) == (30, 6)
    assert found.lag.max == 0.25
    assert found.errors == {"full": 2}
    nothing = summarize([], 1.0)
    assert (nothing.seconds, nothing.attained, nothing.goodput) == (0.0, 0.0, 0.0)


def embedded(arrived, seconds, texts, tokens, outcome=OK):
    one = record(arrived, [(arrived + seconds, 0)] if outcome == OK else [], outcome, tokens)
    one.texts, one.ended = texts, arrived + seconds
    return one


def test_a_run_of_embeddings():
    records = [
        embedded(0.0, 0.1, 4, 40),
        embedded(1.0, 0.3, 2, 30),
        embedded(1.5, 0.5, 8, 99, CANCELLED),
    ]
    found = summarize(records, 2.0, slo_ttft=0.2)
    assert (found.texts, found.text_rate) == (6, 3.0)
    assert (found.prompt_tokens, found.prompt_rate) == (70, 35.0)  # no cancelled text has a vector
    assert (found.end_to_end.count, found.end_to_end.max) == (2, pytest.approx(0.3))
    assert found.goodput == pytest.approx(0.5)
    lines = table(found, 0.2, math.inf)
    assert [line.split()[0] for line in lines[1:]] == ["latency", "requests", "rates", "goodput"]
    assert "1.00 requests/s, 3.00 texts/s, 35.0 tokens/s; 6 texts with 70 tokens" in lines[3]
    heads, first, empty = sweep([found, summarize([], 4.0)], "at a time", math.inf, math.inf)
    names = ["at", "a", "time", "done/s", "p50", "p99", "texts/s", "tokens/s", "ok"]
    assert heads.split()[: len(names)] == names
    assert first.split() == ["2", "1.00", "200.0", "298.0", "3.00", "35.0", "66.7%"]
    assert empty.split()[2] == "-"
    plot = picture([found], "at a time", 0.2)
    assert "latency in ms" in plot and "ITL" not in plot


def test_both_limits_count():
    good = RECORDS[0]
    assert good.meets(0.1, 0.16) and not good.meets(0.09, 1.0) and not good.meets(1.0, 0.14)
    assert record(0.0, [(0.1, 1)]).meets(0.2, 0.0)  # one token has no gap


def test_the_highest_load_in_the_limits():
    summaries = [summarize(RECORDS[:1], 1.0), summarize(RECORDS, 2.0), summarize([], 4.0)]
    assert highest(summaries, 0.9) == 1.0
    assert highest(summaries, 0.3) == 2.0
    assert highest(summaries[2:], 0.9) is None


def test_the_tables():
    found = summarize(RECORDS, 8.0, slo_ttft=0.3)
    lines = table(found, 0.3, math.inf)
    assert lines[1].split() == ["TTFT", "233.3", "100.0", "420.0", "460.0", "492.0", "500.0"]
    text = "\n".join(lines)
    assert "5 in 5.0 s: 2 ok, 1 cancelled, 1 refused, 1 failed" in text
    assert "2 x full" in text and "20.0% of all requests are in the limits" in text
    assert "goodput" not in "\n".join(table(found, math.inf, math.inf))
    assert "240 ms late" in warning(found)
    assert warning(summarize(RECORDS[:1], 1.0)) == ""
    lines = sweep([found, summarize([], 9.0)], "requests/s", 0.3, math.inf)
    assert lines[1].split()[:3] == ["8", "0.40", "100.0"]
    assert lines[2].split()[2] == "-"
    assert lines[-1] == "highest requests/s with 99% of the requests in the limits: none of these"
