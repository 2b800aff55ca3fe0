"""Exponential, random numbers and running sums of the sampler, by themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.engine.kernels.cuda import reference_sampling
from baton.engine.kernels.cuda.device import Kernel
from baton.engine.sampling.philox import uniform

from .host.builder import HERE
from .host_device import HostDevice


@pytest.fixture(scope="module")
def probe(host_device, build_cache: Path):
    device = HostDevice(build_cache, folder=HERE)

    def run(name, *args, threads=32):
        device.launch(Kernel("sample_probe.cu", name), (1,), (threads,), args)

    run.device = device
    return run


def weigh(probe, below, temperature):
    scores, weights = (probe.device.empty(below.shape, np.float32) for _ in range(2))
    probe("weigh", probe.device.upload(below), np.float32(temperature), scores, weights,
          np.int32(len(below)))  # fmt: skip
    return scores, weights


def test_exponential_is_within_a_unit_in_the_last_place(probe, rng):
    below = -np.abs(rng.standard_normal(100000) * rng.choice([1e-4, 1, 10, 40], 100000))
    below = np.concatenate([below, [0, -87, -87.01, -100, -np.inf]]).astype(np.float32)
    scores, weights = weigh(probe, below, 1.0)
    np.testing.assert_array_equal(scores, below)
    exact = np.exp(below.astype(np.float64))
    unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(weights - exact)[below >= -87] < 0.9 * unit[below >= -87]).all()
    assert (weights[below < -87] == 0).all()
    assert weights[below == 0] == 1
    np.testing.assert_array_equal(weights, reference_sampling.weights(below))


def test_exponential_falls_with_its_argument_but_for_one_unit(probe):
    bits = np.concatenate([  # every float of two stretches, and a sample of all
        0x3CFE0000 + np.arange(1 << 17), 0x3F800000 + np.arange(1 << 17),
        np.arange(0, np.float32(87).view(np.uint32), 4999),
    ])  # fmt: skip
    below = -np.sort(bits.astype(np.uint32).view(np.float32))
    weights = weigh(probe, below, 1.0)[1].view(np.int32)
    least = np.minimum.accumulate(weights)
    assert (weights - least).max() <= 1


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0, 1.7, 5.0, 1e-20, 1e20])
def test_division_is_the_exact_one(probe, rng, temperature):
    below = -np.abs(rng.standard_normal(20000) * 30).astype(np.float32)
    scores = weigh(probe, below, temperature)[0]
    exact = below / np.float32(temperature)
    assert (scores != exact)[exact > -128].sum() <= 1
    np.testing.assert_array_equal(
        scores, reference_sampling.scores_and_weights(below, np.float32(temperature))[0]
    )


def test_random_numbers_have_the_bits_of_the_cpu(probe, rng):
    seeds = rng.integers(0, 1 << 64, 32, dtype=np.uint64)
    positions = rng.integers(0, 1 << 62, 32)
    out = probe.device.empty((32,), np.float64)
    probe("random_numbers", *map(probe.device.upload, (seeds, positions)), out)
    assert out.tolist() == [uniform(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]


@pytest.mark.parametrize("n", [1, 5, 32, 33, 128, 1002, 2048])
@pytest.mark.parametrize("spread", [0, 1, 12])
def test_running_sums_round_like_one_chain(probe, rng, n, spread):
    """The lanes' parts are put together to the very bits of adding from left to right."""
    values = np.exp(spread * rng.standard_normal(n)) * rng.choice([0.0, 1.0], n, p=[0.2, 0.8])
    values[rng.integers(0, n)] = 1.0
    before = float(rng.choice([0.0, 1 / 3]))
    sums = np.cumsum(values)
    exact = rng.choice(before + sums, 20)
    thresholds = np.concatenate([exact, np.nextafter(exact, 0), rng.random(20) * sums[-1], [1e300]])
    for reach in (False, True):
        at, until = (probe.device.empty(thresholds.shape, t) for t in (np.int32, np.float64))
        total = probe.device.empty((1,), np.float64)
        given = [probe.device.upload(a) for a in (values, np.array([before]), thresholds)]
        counts = np.int32(n), np.int32(len(thresholds)), np.int32(reach)
        probe(
            "running_sums", given[0], counts[0], given[1], given[2], *counts[1:], at, until, total
        )
        assert total[0] == sums[-1]
        found = np.searchsorted(before + sums, thresholds, "left" if reach else "right")
        found[found == n] = np.flatnonzero(values)[-1]
        np.testing.assert_array_equal(at, found)
        np.testing.assert_array_equal(until, np.concatenate([[0.0], sums])[found])


@pytest.mark.parametrize("four", [False, True])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 127, 128, 129, 500, 1920])
@pytest.mark.parametrize("spread", [0, 3, 8, 30])
def test_sums_by_a_warp_round_like_one_chain(probe, rng, n, spread, four):
    """Weights over up to 43 powers of two: exact sums, and sums in which each addition rounds."""
    scores = -np.abs(spread * rng.standard_normal(n)).astype(np.float32)
    weights = reference_sampling.weights(scores)
    weights[rng.random(n) < 0.1] = 0
    expected = [np.cumsum(weights[i : i + 128], dtype=np.float64)[-1] for i in range(0, n, 128)]
    np.testing.assert_array_equal(block_sums(probe, weights, four), expected)


def test_sums_that_are_not_exact_in_pairs_are_summed_in_turn(probe, build_cache):
    """A bug that adds lanes in pairs always; and weights with equal exponents that hide it."""
    rng = np.random.default_rng(3)
    planted = HostDevice(build_cache, folder=HERE, defines=("BATON_PLANT_SAMPLE_EXACT",))
    for spread, is_seen in ((0.5, False), (30, True)):
        scores = -np.abs(spread * rng.standard_normal(1920)).astype(np.float32)
        weights = reference_sampling.weights(scores)
        right = block_sums(probe, weights, False)
        sums = planted.empty((15,), np.float64)
        args = planted.upload(weights), np.int32(1920), np.int32(0), sums
        planted.launch(Kernel("sample_probe.cu", "block_sums"), (1,), (320,), args)
        assert (right != sums).any() == is_seen


def block_sums(probe, weights, four):
    sums = probe.device.empty((-(-len(weights) // 128),), np.float64)
    count = np.int32(len(weights)), np.int32(four)
    probe("block_sums", probe.device.upload(weights), *count, sums, threads=320)
    return sums
