"""Forecasts of measured requests: queues, shared prefixes, the table beside the measurement."""

import numpy as np
import pytest

from baton.forecast.beside import Latencies, forecast, lines
from baton.forecast.cluster import Setup
from baton.forecast.service import ServiceModel
from baton.loadgen.plan import Job
from baton.loadgen.statistics import Distribution

SERVICE = ServiceModel(
    prefill_s=0.0, prefill_token_s=0.001, prefill_pair_s=0.0, decode_s=0.01, decode_sequence_s=0.0,
    decode_token_s=0.0, kv_token_bytes=1, handoff_rate=1e15, hidden_s=0.0,
)  # fmt: skip
ONE_EACH = {"prefill": 1, "decode": 1}


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def test_a_request_alone_takes_its_steps_and_a_second_one_waits():
    alone = forecast([Job(0.0, prompt(1, 100), 11)], SERVICE, ONE_EACH, Setup())
    assert alone.ttft.mean == pytest.approx(0.1)
    assert alone.tpot.mean == pytest.approx(0.01, rel=0.01)
    jobs = [Job(0.0, prompt(1, 100), 11), Job(0.04, prompt(2, 100), 1)]
    both = forecast(jobs, SERVICE, ONE_EACH, Setup())
    assert both.ttft.max == pytest.approx(0.16)  # 60 ms for the first prompt, 100 for its own
    assert both.tpot.count == 1


def test_equal_beginnings_are_cached():
    """Blocks of 512 tokens: the second prompt finds two of its own at the prefill worker."""
    first = prompt(1, 1100)
    second = np.concatenate([first[:1050], prompt(2, 50)])
    jobs = [Job(0.0, first, 2), Job(10.0, second, 2)]
    found = forecast(jobs, SERVICE, ONE_EACH, Setup())
    assert found.ttft.max == pytest.approx(1.1)
    assert found.ttft.mean == pytest.approx((1.1 + 0.076) / 2)
    with pytest.raises(ValueError, match="closed loop"):
        forecast([Job(None, first, 2)], SERVICE, ONE_EACH, Setup())


def test_the_table_has_what_was_measured_as_a_multiple():
    simulated = forecast([Job(0.0, prompt(1, 100), 11)], SERVICE, ONE_EACH, Setup())
    measured = Latencies(
        ttft=Distribution.of([0.11]), itl=Distribution.of([0.015]), tpot=Distribution.of([])
    )
    shown = lines({"1:1": (simulated, measured)}, 0.04)
    assert "fit 4%" in shown[0]
    rows = {line.rpartition("ms")[0]: line.rpartition("ms")[2].strip() for line in shown[3:]}
    assert rows["TTFT p50, "] == "100.0 x 1.10"
    assert rows["ITL p99, "] == "10.0 x 1.50"
    assert rows["TPOT p95, "] == "10.0"
