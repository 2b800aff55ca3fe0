"""Products of 9 to 16 rows by `ring_linear.cu`: the bits of the kernel for fewer rows."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernels.cuda import reference_linear
from baton.engine.kernels.cuda.linear import MAX_SKINNY, linear, linear_silu_mul
from baton.engine.kernels.cuda.reference import from_bf16, to_bf16
from baton.engine.kernels.cuda.tuning import Tuning

from .host_device import HostDevice, LaunchFailed
from .test_linear import FUSED, assert_rounded, assert_sums, random_bf16, run_linear

RINGS = {tiles: Tuning(fuse_from=0, skinny_ring=((0, tiles),)) for tiles in (1, 2, 4)}
SHAPES = [(9, 17, 72), (11, 100, 1032), (13, 5, 8), (16, 130, 2056), (16, 64, 4104), (10, 48, 512)]


@pytest.mark.sanitized
@pytest.mark.parametrize("tiles", RINGS)
@pytest.mark.parametrize(("rows", "width", "depth"), SHAPES)
def test_bits(device, rng, rows, width, depth, tiles):
    """Those of the kernel for fewer rows, whatever is added."""
    ring = device.tuned(RINGS[tiles])
    x, weight = random_bf16(rng, rows, depth), random_bf16(rng, width, depth)
    bias = rng.standard_normal(width).astype(np.float32)
    onto = rng.standard_normal((rows, width)).astype(np.float32)
    exact = reference_linear.linear(x, weight)
    got = run_linear(ring, x, weight, bias, onto=onto)
    assert_sums(got, exact + bias + onto, x, weight)
    assert got.tobytes() == run_linear(device, x, weight, bias, onto=onto).tobytes()
    got, onto = run_linear(ring, x, weight, dtype=np.uint16), to_bf16(onto)
    assert_rounded(got, exact, x, weight)
    for given in (None, onto):
        both = [run_linear(d, x, weight, dtype=np.uint16, onto=given) for d in (ring, device)]
        assert both[0].tobytes() == both[1].tobytes()


def gated(device, x, weight):
    width = len(weight) // 2
    out = device.empty((len(x), width), np.uint16)
    space = device.empty((len(x), 2 * width), np.uint16)
    linear_silu_mul(device, device.upload(x), device.upload(weight), space, out)
    return device.download(out)


@pytest.mark.parametrize("tiles", RINGS)
@pytest.mark.parametrize(("rows", "width", "depth"), [(9, 40, 72), (16, 56, 1032), (12, 8, 640)])
def test_bits_of_a_gated_product(device, rng, rows, width, depth, tiles):
    x, weight = random_bf16(rng, rows, depth), random_bf16(rng, 2 * width, depth)
    expected = gated(device.tuned(FUSED), x, weight)
    assert gated(device.tuned(RINGS[tiles]), x, weight).tobytes() == expected.tobytes()
    exact = reference_linear.linear_silu_mul(x, weight)
    assert (np.abs(from_bf16(expected) - exact) <= 2.0**-6 * np.abs(exact) + 1e-2).all()


@pytest.mark.parametrize("tiles", RINGS)
def test_a_row_has_its_bits_in_any_company(device, rng, tiles):
    """Also beside so few rows that another kernel computes them."""
    depth, width, ring = 328, 40, device.tuned(RINGS[tiles])
    weight, x = random_bf16(rng, width, depth), random_bf16(rng, MAX_SKINNY, depth)
    whole = run_linear(ring, x, weight)
    for rows in (1, 8, 9, 12, 15):
        chosen = rng.choice(MAX_SKINNY, rows, replace=False)
        assert run_linear(ring, x[chosen], weight).tobytes() == whole[chosen].tobytes()
    others = x.copy()
    others[1:] = to_bf16([np.inf])
    assert run_linear(ring, others, weight)[0].tobytes() == whole[0].tobytes()


def test_under_shuffled_schedules(device, schedules, rng):
    x, weight = random_bf16(rng, 11, 1160), random_bf16(rng, 96, 1160)
    given, weights = device.upload(x), device.upload(weight)

    def run():
        outputs = []
        for tuning in RINGS.values():
            ring = device.tuned(tuning)
            sums, products = device.empty((11, 96), np.float32), device.empty((11, 48), np.uint16)
            linear(ring, given, weights, None, sums)
            linear_silu_mul(ring, given, weights, device.empty((11, 96), np.uint16), products)
            outputs += [device.download(sums), device.download(products)]
        return outputs

    assert_sums(schedules(run)[0], reference_linear.linear(x, weight), x, weight)


def test_the_kernel_is_chosen_by_the_tuning_alone(host_device, rng, monkeypatch):
    launched, launch = [], HostDevice.launch

    def noting(device, kernel, *arguments):
        launched.append(kernel.name)
        launch(device, kernel, *arguments)

    monkeypatch.setattr(HostDevice, "launch", noting)
    chosen = Tuning(fuse_from=0, skinny_ring=((0, 0), (32, 2), (64, 4)))
    names = []
    for tuning, rows, width in (
        (Tuning(), 16, 64), (chosen, 16, 16), (chosen, 8, 64), (chosen, 9, 32), (chosen, 16, 64),
    ):  # fmt: skip
        launched.clear()
        x, weight = random_bf16(rng, rows, 64), random_bf16(rng, width, 64)
        run_linear(host_device.tuned(tuning), x, weight)
        names += launched
    assert names == [
        "skinny_linear_1_2_f32", "skinny_linear_1_2_f32", "skinny_linear_1_1_f32",
        "ring_linear_2_f32", "ring_linear_4_f32",
    ]  # fmt: skip
    launched.clear()
    for rows, width in ((9, 8), (9, 16), (8, 32), (9, 32)):
        x, weight = random_bf16(rng, rows, 64), random_bf16(rng, 2 * width, 64)
        gated(host_device.tuned(chosen), x, weight)
    assert launched == [
        "skinny_linear_silu_mul_2", "ring_linear_silu_mul_2", "skinny_linear_silu_mul_1",
        "ring_linear_silu_mul_4",
    ]  # fmt: skip


@pytest.mark.parametrize(("bug", "tiles"), [("WAIT", 1), ("STAGE", 2), ("SUMS", 4)])
def test_planted_bugs_are_caught(
    host_device: HostDevice, rng: np.random.Generator, bug: str, tiles: int
) -> None:
    x, weight = random_bf16(rng, 11, 4712), random_bf16(rng, 40, 4712)
    exact = reference_linear.linear(x, weight)

    def right(device: HostDevice) -> bool:
        for seed in range(4):
            try:
                with device.order(seed):
                    assert_sums(run_linear(device, x, weight), exact, x, weight)
            except (AssertionError, LaunchFailed):
                return False
        return True

    assert right(host_device.tuned(RINGS[tiles]))
    planted = host_device.with_defines(f"BATON_PLANT_RING_{bug}")
    assert not right(planted.tuned(RINGS[tiles]))
