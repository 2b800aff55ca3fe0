"""Spreads of times: a synthetic cluster whose spread is known is forecast with its tails."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest

from baton.forecast.beside import forecast
from baton.forecast.calibration import Calibration, Handoff, Prompt, Stream, adapted
from baton.forecast.cluster import Setup, fixed
from baton.forecast.service import ServiceModel
from baton.forecast.spread import (
    LEAST,
    SHARES,
    Draws,
    Spreads,
    Steps,
    deviation,
    multiples,
    seconds,
    steps_of,
)
from baton.loadgen.plan import Job
from baton.loadgen.traces import Arrival

from .test_beside import prompt

ALONE = ServiceModel(
    prefill_s=0.0, prefill_token_s=2e-4, prefill_pair_s=0.0, decode_s=0.005,
    decode_sequence_s=0.0, decode_token_s=1e-6, hidden_s=0.0, kv_token_bytes=1000,
    handoff_rate=1e9,
)  # fmt: skip
PAIR = {"prefill": 1, "decode": 1}
HOP_S, HANDOFF_S = 0.006, 0.01
BESIDE = 0.5


class Cluster:
    """What takes its mean times multiples with a long tail; known here alone."""

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def hop(self):
        return HOP_S + self._rng.exponential(0.004) - 0.004

    def handoff(self):
        return HANDOFF_S + self._rng.uniform(-0.008, 0.008)

    def step(self, beside=False):
        return self._long_tail(0.5 if beside else 0.25)

    def work(self):
        return self._long_tail(0.15)

    def _long_tail(self, sigma):
        return self._rng.lognormal(-sigma * sigma / 2, sigma)

    def calibration(self, rounds):
        prompts, streams, handoffs = [], [], []
        for _ in range(rounds):
            for tokens in (16, 64, 1024):
                taken = self.hop() + self.work() * ALONE.prefill(tokens, 0)
                prompts.append(Prompt(tokens=tokens, seconds=taken))
                taken = self.hop() + self.work() * ALONE.prefill(tokens, 0) * (1 + BESIDE)
                prompts.append(Prompt(tokens=tokens, seconds=taken, others=1.0))
                moved = self.handoff() + tokens * 1e-6 + (self.step() - 1) * ALONE.step(1, tokens)
                handoffs.append(Handoff(tokens=tokens, seconds=moved))
            for share in (0.0, 1.0):
                cost = ALONE.step(2, 40.0) * (1 + BESIDE * share)
                gaps = [cost * self.step(bool(share)) for _ in range(40)]
                streams.append(Stream(rows=2, context=40.0, gaps=gaps, others=share))
        return Calibration(prompts=prompts, streams=streams, handoffs=handoffs)

    def served(self, tokens, answer):
        """TTFT and the gaps of a request that is alone."""
        work = self.work() * ALONE.prefill(tokens, 0)
        gaps = [
            self.step() * ALONE.step(1, tokens + number) + (number == 1) * self.handoff()
            for number in range(1, answer)
        ]
        return self.hop() + work, gaps


def quantiles(values):
    return [float(np.quantile(values, level)) for level in (0.5, 0.95, 0.99)]


def of(found):
    return [found.p50, found.p95, found.p99]


@pytest.fixture(scope="module")
def learned():
    return adapted(ALONE, Cluster(1).calibration(40), cores=2)


@pytest.mark.parametrize("tokens", [32, 900])
def test_tails_of_a_cluster_with_a_known_spread_are_forecast(learned, tokens):
    jobs = [Job(2.0 * number, prompt(number, tokens), 30) for number in range(60)]
    found = forecast(jobs, learned.service, PAIR, Setup())
    truth = Cluster(2)
    real = [truth.served(tokens, 30) for _ in range(3000)]
    first, gaps = [one for one, _ in real], [gap for _, some in real for gap in some]
    assert of(found.ttft) == pytest.approx(quantiles(first), rel=0.12)
    assert of(found.itl) == pytest.approx(quantiles(gaps), rel=0.12)
    assert found.ttft.mean == pytest.approx(statistics.mean(first), rel=0.05)
    assert found.itl.mean == pytest.approx(statistics.mean(gaps), rel=0.05)
    exact = forecast(jobs, replace(learned.service, spreads=Spreads()), PAIR, Setup())
    assert exact.ttft.mean == pytest.approx(found.ttft.mean, rel=0.05)
    assert exact.ttft.p99 < 0.85 * quantiles(first)[2]
    assert exact.itl.p99 < 0.9 * quantiles(gaps)[2]


def test_the_spread_beside_a_busy_worker_is_one_of_its_own(learned):
    spreads = learned.service.spreads
    assert deviation(spreads.decode) == pytest.approx(0.25, rel=0.15)
    assert deviation(spreads.decode_beside) == pytest.approx(0.53, rel=0.15)
    assert deviation(spreads.prefill) == pytest.approx(0.15, rel=0.35)
    assert deviation(spreads.hop_s) == pytest.approx(0.004, rel=0.35)
    assert deviation(spreads.handoff_s) == pytest.approx(0.016 / 12**0.5, rel=0.15)
    stream, other = Arrival(0.0, 16, 400), [Arrival(0.2 + number, 5000, 1) for number in range(20)]
    alone, beside = (
        fixed(trace, learned.service, PAIR, Setup(gaps=True)).gaps()
        for trace in ([stream], [stream, *other])
    )
    assert np.quantile(beside, 0.99) > 1.8 * np.quantile(alone, 0.99)
    assert "x the mean; of 100 tokens" in learned.lines()[2]


def test_a_run_is_that_of_its_seed(learned):
    trace = [
        Arrival(0.05 * number, 50 + 37 * number % 900, 1 + number % 40) for number in range(99)
    ]

    def times(seed):
        requests = fixed(trace, learned.service, PAIR, Setup(seed=seed)).requests
        return [(one.first, one.ended) for one in requests]

    assert times(0) == times(0) != times(1)
    assert all(ended >= first for first, ended in times(1))


def test_gaps_are_those_of_all_requests():
    """Without spreads: each stream's gaps fill the time from its first token to its last."""
    trace = [Arrival(0.03 * number, 100, 1 + number % 30) for number in range(60)]
    colocated = Setup(mode="colocated", step_s=0.03, token_budget=0, gaps=True)
    for setup in (Setup(gaps=True), colocated):
        pools = PAIR if setup.mode == "disaggregated" else {"prefill": 0, "decode": 1}
        outcome = fixed(trace, ALONE, pools, setup)
        gaps = outcome.gaps()
        assert len(gaps) == sum(one.output - 1 for one in trace)
        streamed = sum(one.ended - one.first for one in outcome.requests)
        assert float(gaps.sum()) == pytest.approx(streamed)


# --------------------------------------------------------------------------- draws


def test_a_spread_has_the_mean_of_its_values_and_their_tail():
    values = np.random.default_rng(1).lognormal(0, 0.5, 1234)
    found = multiples(values)
    assert len(found) == SHARES
    assert statistics.mean(found) == pytest.approx(1.0)
    assert found[-1] > float(np.quantile(values, 0.99) / values.mean())
    assert deviation(multiples(values, 0.6)) == pytest.approx(0.8 * deviation(found), rel=0.02)
    assert min(multiples([0.0, 0.0, 3.0])) >= LEAST / 2
    assert seconds([1.0, 3.0]) == (-1.0, 1.0)
    assert multiples([]) == seconds([]) == multiples([0.0, 0.0]) == ()


def test_spans_are_the_sums_of_their_steps():
    spread = multiples(np.random.default_rng(1).lognormal(0, 0.5, 300))
    for steps in (Steps(), steps_of(3, "decode-0", spread)):
        for first in (0, 5, 4090, 12_345):
            each = steps.each(first, 5000, 0.02, 1e-6)
            for count in (0, 1, 7, 5000):
                taken = float(each[:count].sum())
                assert steps.span(first, count, 0.02, 1e-6) == pytest.approx(taken)
                assert steps.until(first, max(0.0, taken - 1e-9), 0.02, 1e-6) == count
            assert steps.until(first, float(each[:7].sum()) + 1e-6, 0.02, 1e-6) == 8


def test_draws_without_a_spread_are_the_means():
    draws = Draws(0, "x")
    assert (draws.multiple(()), draws.seconds(0.5, ())) == (1.0, 0.5)
    assert min(draws.seconds(0.5, (-1.0, 1.0)) for _ in range(20)) == 0.0
