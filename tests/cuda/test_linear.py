"""Products with few rows: against NumPy in float64, under shuffled schedules, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernels.cuda import reference_linear
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.cupy_device import CupyDevice
from baton.engine.kernels.cuda.linear import MAX_SKINNY, linear, linear_silu_mul
from baton.engine.kernels.cuda.reference import from_bf16, to_bf16
from baton.engine.kernels.cuda.tuning import Tuning

from .host_device import HostDevice, LaunchFailed


def random_bf16(rng, *shape):
    return to_bf16(rng.standard_normal(shape))


FUSED = Tuning(fuse_from=0)


def run_linear(device, x, weight, bias=None, dtype=np.float32, onto=None):
    """The product into poisoned memory, or added to its content."""
    out = device.empty((len(x), len(weight)), dtype) if onto is None else device.upload(onto)
    there = None if bias is None else device.upload(bias)
    given = device.upload(x), device.upload(weight)
    linear(device, *given, there, out, add=onto is not None)
    return device.download(out)


def assert_sums(got, exact, x, weight):
    """Within the rounding of float32 sums over the depth."""
    size = np.abs(from_bf16(x)) @ np.abs(from_bf16(weight)).T + 1
    assert (np.abs(got - exact) <= size * 2e-6).all()


def assert_rounded(bits, product, x, weight, onto=0.0, twice=False):
    """bf16 of product plus ``onto``, each within the rounding of float32 sums of the exact one.

    ``twice``: the product may have been rounded to bf16 before ``onto`` was added.
    """
    room = (np.abs(from_bf16(x)) @ np.abs(from_bf16(weight)).T + 1) * 2e-6
    got, ends = from_bf16(bits), (product - room, product + room)
    low, high = (rounded(end + onto) for end in ends)
    right = (got >= low) & (got <= high)
    if twice:
        low, high = (rounded(rounded(end) + onto) for end in ends)
        right |= (got >= low) & (got <= high)
    assert right.all()


def rounded(sums):
    return from_bf16(to_bf16(sums))


def by_cublas(device, rows):
    """Whether cuBLAS computes a product; it rounds to bf16 before it adds to bf16."""
    return rows > MAX_SKINNY and isinstance(device, CupyDevice)


SHAPES = [
    (1, 16, 64), (1, 5, 8), (3, 33, 200), (7, 100, 1032), (8, 64, 512), (9, 17, 72), (16, 48, 2056),
    (17, 40, 64), (40, 9, 16), (0, 8, 8),
]  # fmt: skip


@pytest.mark.sanitized
@pytest.mark.parametrize(("rows", "width", "depth"), SHAPES)
def test_linear(device, rng, rows, width, depth):
    x, weight = random_bf16(rng, rows, depth), random_bf16(rng, width, depth)
    bias = rng.standard_normal(width).astype(np.float32)
    onto = rng.standard_normal((rows, width)).astype(np.float32)
    exact = reference_linear.linear(x, weight)
    assert_sums(run_linear(device, x, weight), exact, x, weight)
    assert_sums(run_linear(device, x, weight, bias, onto=onto), exact + bias + onto, x, weight)
    assert_rounded(run_linear(device, x, weight, dtype=np.uint16), exact, x, weight)
    onto = to_bf16(onto)
    sums = run_linear(device, x, weight, dtype=np.uint16, onto=onto)
    assert_rounded(sums, exact, x, weight, from_bf16(onto), by_cublas(device, rows))


@pytest.mark.parametrize("rows", [MAX_SKINNY, MAX_SKINNY + 1])
def test_a_sum_without_what_it_is_added_to_is_noticed(device, rng, rows):
    x, weight = random_bf16(rng, rows, 64), random_bf16(rng, 40, 64)
    onto = random_bf16(rng, rows, 40)
    product = run_linear(device, x, weight, dtype=np.uint16)
    exact = reference_linear.linear(x, weight)
    with pytest.raises(AssertionError):
        assert_rounded(product, exact, x, weight, from_bf16(onto), twice=True)


def test_a_second_rounding_is_noticed_where_it_is_not_allowed(rng):
    x, weight, onto = random_bf16(rng, 9, 64), random_bf16(rng, 40, 64), random_bf16(rng, 9, 40)
    exact, added = reference_linear.linear(x, weight), from_bf16(onto)
    sums = to_bf16(rounded(exact) + added)
    assert_rounded(sums, exact, x, weight, added, twice=True)
    with pytest.raises(AssertionError):
        assert_rounded(sums, exact, x, weight, added)


@pytest.mark.parametrize(
    ("rows", "width", "depth"),
    [(1, 24, 64), (6, 16, 136), (8, 8, 640), (9, 40, 72), (16, 56, 520), (30, 16, 64)],
)
def test_linear_silu_mul(device, rng, rows, width, depth):
    x, weight = random_bf16(rng, rows, depth), random_bf16(rng, 2 * width, depth)
    out, space = device.empty((rows, width), np.uint16), device.empty((rows, 2 * width), np.uint16)
    linear_silu_mul(device, device.upload(x), device.upload(weight), space, out)
    exact = reference_linear.linear_silu_mul(x, weight)
    got = device.download(out)
    # A step of bf16 is 2^-8; gate and up are rounded before as well.
    room = 2.0**-6 * np.abs(exact) + 1e-2
    assert (np.abs(from_bf16(got) - exact) <= room).all()
    linear_silu_mul(device.tuned(FUSED), device.upload(x), device.upload(weight), space, out)
    assert device.download(out).tobytes() == got.tobytes()


WIDE = Tuning(fuse_from=0, skinny_tiles=((0, 1), (24, 2)))


@pytest.mark.parametrize(("rows", "width", "depth"), [(4, 100, 104), (13, 73, 40), (1, 24, 200)])
def test_two_tiles_of_weights_give_the_bits_of_one(device, rng, rows, width, depth):
    x, weight = random_bf16(rng, rows, depth), random_bf16(rng, width, depth)
    one = run_linear(device.tuned(Tuning(skinny_tiles=((0, 1),))), x, weight)
    assert_sums(one, reference_linear.linear(x, weight), x, weight)
    assert run_linear(device.tuned(WIDE), x, weight).tobytes() == one.tobytes()


@pytest.mark.parametrize("tuning", [Tuning(), WIDE])
def test_a_row_has_its_bits_in_any_company(device, rng, tuning):
    """Alone, at each place of each number of rows; and whatever blocks its weights lie in."""
    depth, width, device = 328, 40, device.tuned(tuning)
    weight = random_bf16(rng, width, depth)
    x = random_bf16(rng, MAX_SKINNY, depth)
    whole = run_linear(device, x, weight)
    for rows in (1, 2, 7, 8, 9, 15):
        chosen = rng.choice(MAX_SKINNY, rows, replace=False)
        assert run_linear(device, x[chosen], weight).tobytes() == whole[chosen].tobytes()
    part = run_linear(device, x, weight[:24])
    assert part.tobytes() == whole[:, :24].tobytes()
    others = x.copy()
    others[1:] = to_bf16([np.inf])
    assert run_linear(device, others, weight)[0].tobytes() == whole[0].tobytes()


def test_a_row_of_a_gated_product_has_its_bits_in_any_company(device, rng):
    depth, width, fused = 328, 40, device.tuned(FUSED)
    given, weight = random_bf16(rng, MAX_SKINNY, depth), random_bf16(rng, 2 * width, depth)

    def run(x):
        out = device.empty((len(x), width), np.uint16)
        space = device.empty((len(x), 2 * width), np.uint16)
        linear_silu_mul(fused, device.upload(x), device.upload(weight), space, out)
        return device.download(out)

    whole = run(given)
    for rows in (1, 7, 8, 9):
        chosen = rng.choice(MAX_SKINNY, rows, replace=False)
        assert run(given[chosen]).tobytes() == whole[chosen].tobytes()


def test_the_mlp_of_a_model_fuses_few_rows_without_a_bias(host_device, rng, monkeypatch):
    launched, launch = [], HostDevice.launch

    def noting(device, kernel, *arguments):
        launched.append(kernel.name)
        launch(device, kernel, *arguments)

    monkeypatch.setattr(HostDevice, "launch", noting)
    depth, width, rows = 64, 24, 3
    gate_up, down = rng.standard_normal((2 * width, depth)), rng.standard_normal((depth, width))
    outs = []
    for tuning, bias in ((FUSED, None), (Tuning(), None), (FUSED, np.zeros(2 * width, np.float32))):
        backend = CudaBackend(host_device.tuned(tuning))
        weights = [
            backend.pack_linear([to_bf16(gate_up)], bias),
            backend.pack_linear([to_bf16(down)]),
        ]
        space = [backend.empty(rows, n) for n in (2 * width, width, depth)]
        x = backend.upload(to_bf16(np.linspace(-1, 1, rows * depth).reshape(rows, depth)))
        launched.clear()
        backend.gated_mlp(x, *weights, *space)
        fused = tuning is FUSED and bias is None
        assert ("silu_mul" in launched) != fused
        assert ("skinny_linear_silu_mul_1" in launched) == fused
        outs.append(backend.device.download(space[-1]).tobytes())
    assert outs[0] == outs[1] == outs[2]
    with pytest.raises(ValueError, match="another backend"):
        backend.gated_mlp(x, weights[0].weight, weights[1], *space)


def test_under_shuffled_schedules(device, schedules, rng):
    x, weight = random_bf16(rng, 11, 712), random_bf16(rng, 96, 712)
    given, weights, fused = device.upload(x), device.upload(weight), device.tuned(FUSED)

    def run():
        sums, products = device.empty((11, 96), np.float32), device.empty((11, 48), np.uint16)
        linear(device, given, weights, None, sums)
        linear_silu_mul(fused, given, weights, device.empty((11, 96), np.uint16), products)
        return [device.download(sums), device.download(products)]

    assert_sums(schedules(run)[0], reference_linear.linear(x, weight), x, weight)


def test_in_a_graph(device, rng):
    """Captured once for few and for many rows, replayed with other inputs."""
    for rows in (3, 20):
        weight, bias = random_bf16(rng, 24, 64), rng.standard_normal(24).astype(np.float32)
        x, out = device.zeros((rows, 64), np.uint16), device.empty((rows, 24), np.float32)
        there = device.upload(weight), device.upload(bias)
        graph = device.capture(lambda x=x, out=out, there=there: linear(device, x, *there, out))
        fresh = random_bf16(rng, rows, 64)
        device.write(x, fresh)
        graph.replay()
        exact = reference_linear.linear(fresh, weight, bias)
        assert_sums(device.download(out), exact, fresh, weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": ((2, 16), np.float32)}, "x is float32"),
        ({"x": ((2, 24), np.uint16)}, "x has shape"),
        ({"weight": ((8, 16), np.float32)}, "weight is float32"),
        ({"x": ((2, 12), np.uint16), "weight": ((8, 12), np.uint16)}, "multiple of 8"),
        ({"bias": ((8,), np.uint16)}, "bias is uint16"),
        ({"bias": ((7,), np.float32)}, "bias has shape"),
        ({"out": ((2, 8), np.float64)}, "out is float64"),
        ({"out": ((2, 9), np.float32)}, "out has shape"),
    ],
)
def test_wrong_arrays_are_refused(device, change, message):
    shapes = {
        "x": ((2, 16), np.uint16), "weight": ((8, 16), np.uint16), "bias": None,
        "out": ((2, 8), np.float32),
    } | change  # fmt: skip
    arrays = {name: of and device.zeros(*of) for name, of in shapes.items()}
    with pytest.raises(ValueError, match=message):
        linear(device, **arrays)


def test_a_transposed_weight_is_refused(device):
    weight = device.zeros((16, 8), np.uint16).T
    x, out = device.zeros((2, 16), np.uint16), device.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="not contiguous"):
        linear(device, x, weight, None, out)


@pytest.mark.parametrize("bug", ["BARRIER", "TAIL", "ORDER"])
def test_planted_bugs_are_caught(host_device: HostDevice, bug):
    rng = np.random.default_rng(5)
    x, weight = random_bf16(rng, 9, 360), random_bf16(rng, 40, 360)
    exact = reference_linear.linear(x, weight)

    def right(device):
        for seed in range(4):
            try:
                with device.order(seed):
                    assert_sums(run_linear(device, x, weight), exact, x, weight)
            except (AssertionError, LaunchFailed):
                return False
        return True

    assert right(host_device)
    assert not right(host_device.with_defines(f"BATON_PLANT_LINEAR_{bug}"))
