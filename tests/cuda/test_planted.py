"""Bugs planted in the kernels by macros come to light, by the checks that the other files make."""

from __future__ import annotations

import numpy as np

from baton.engine.kernels.cuda import elementwise, reference
from baton.engine.kernels.cuda.reference import from_bf16, to_bf16

from .test_elementwise import EPS, expected_rope, random_bf16, rope_case, run_rope

SEEDS = range(9)


def planted(device, bug, run):
    """Outputs of ``run(device)`` under several orders, with a bug and without."""
    wrong = device.with_defines(bug)
    outputs = []
    for seed in SEEDS:
        with wrong.order(seed), device.order(seed):
            outputs.append((run(wrong), run(device)))
    return outputs


def test_a_norm_without_its_barrier(host_device, rng):
    x, weight = random_bf16(rng, 3, 2048), random_bf16(rng, 2048)

    def run(device):
        out = device.empty(x.shape, np.float32)
        elementwise.rms_norm(device, device.upload(x), device.upload(weight), EPS, out)
        return device.download(out)

    expected = reference.rms_norm(x, weight, EPS)
    for bad, good in planted(host_device, "BATON_PLANT_NORM_BARRIER", run):
        np.testing.assert_allclose(good, expected, rtol=2e-6)
        assert not np.allclose(bad, expected, rtol=1e-2)


def test_a_variance_that_counts_zeros_outside_the_row(host_device, rng):
    """The last warp has lanes outside a row of 1,000; one of 1,024 hides the bug."""
    for width, is_seen in ((1000, True), (1024, False)):
        x = to_bf16(rng.standard_normal((3, width)) + 5)
        weight, bias = random_bf16(rng, width), random_bf16(rng, width)

        def run(device, x=x, weight=weight, bias=bias):
            out = device.empty(x.shape, np.uint16)
            weights = device.upload(weight), device.upload(bias)
            elementwise.layer_norm(device, device.upload(x), *weights, EPS, out)
            return from_bf16(device.download(out))

        expected = reference.layer_norm(x, weight, bias, EPS)
        for bad, good in planted(host_device, "BATON_PLANT_VARIANCE", run):
            np.testing.assert_allclose(good, expected, rtol=1e-2, atol=1e-2)
            assert np.allclose(bad, expected, rtol=1e-2, atol=1e-2) != is_seen


def test_a_row_that_is_put_elsewhere(host_device, rng):
    x, before = random_bf16(rng, 3, 16), random_bf16(rng, 5, 16)
    where = np.array([4, 0, 2], np.int32)

    def run(device):
        out = device.upload(before)
        elementwise.put_rows(device, device.upload(x), device.upload(where), out)
        return device.download(out)

    expected = before.copy()
    reference.put_rows(x, where, expected, add=False)
    for bad, good in planted(host_device, "BATON_PLANT_PUT", run):
        assert (good == expected).all()
        assert (bad != expected).any()


def test_a_slot_that_is_off_by_one(host_device, rng):
    case = rope_case(rng, 5, 2, 1, 64, 4, 6)
    pool = expected_rope(case, 2)[1]
    values = planted(host_device, "BATON_PLANT_SLOT", lambda device: run_rope(device, case, 2)[1])
    for bad, good in values:
        assert (good[:, 1] == pool[:, 1]).all()
        assert (bad[:, 1] != pool[:, 1]).any()
