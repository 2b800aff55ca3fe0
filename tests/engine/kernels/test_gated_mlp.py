"""The gated MLP in one call: accuracy, and bits that do not depend on other rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from .conftest import rounds
from .test_linear import bf16_bits

# in, width, out; those of 72 and 5 fill no panels
SHAPES = [(64, 96, 48), (33, 16, 5), (40, 72, 24), (768, 272, 70), (31, 5, 8), (512, 1408, 512)]
ROWS = [1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 190, 300]


def case(backend, rng, shape, *, kind="bf16", bias=True):
    """Packed gate and up, and down, whose products are of size 1."""
    depth, width, out = shape
    packed = []
    for rows, columns in ((2 * width, depth), (out, width)):
        weights = rng.standard_normal((rows, columns), dtype=np.float32) * columns**-0.5
        added = rng.standard_normal(rows, dtype=np.float32) if bias else None
        packed.append((bf16_bits(weights) if kind == "bf16" else weights, added))
    return [backend.pack_linear([weights], added) for weights, added in packed]


def run(backend, packed, x, out, dtype=np.float32):
    """Into ``out``; what lies between is poisoned before."""
    gate_up, down = packed
    products = np.full((len(x), gate_up.out_features), np.nan, dtype)
    active = np.full((len(x), down.in_features), np.nan, dtype)
    backend.gated_mlp(x, gate_up, down, products, active, out)
    return out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_oracle(backend, oracle, poisoned, shape, kind, bias):
    seeded = [np.random.default_rng(3) for _ in range(2)]
    ours, exact = (
        case(b, r, shape, kind=kind, bias=bias)
        for b, r in zip((backend, oracle), seeded, strict=True)
    )
    x = np.random.default_rng(4).standard_normal((50, shape[0]), dtype=np.float32)
    expected = run(oracle, exact, x.astype(float), np.empty((50, shape[2])), float)
    distance = np.abs(run(backend, ours, x, poisoned(50, shape[2])) - expected)
    rounded = kind == "bf16" and rounds(backend.numerics)
    # Each of x and the product is rounded by at most 2^-9 of it, with errors of any sign.
    assert distance.max() < (2.0**-5 if rounded else 5e-5)
    assert distance.mean() < (2.0**-7 if rounded else 5e-6)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(compiled, rng, poisoned, shape, kind):
    packed = case(compiled, rng, shape, kind=kind)
    x = rng.standard_normal((ROWS[-1], shape[0]), dtype=np.float32)
    whole = run(compiled, packed, x, poisoned(len(x), shape[2]))
    for rows in ROWS:
        start = int(rng.integers(0, len(x) - rows + 1))
        part = run(compiled, packed, x[start : start + rows], poisoned(rows, shape[2]))
        assert np.array_equal(part, whole[start : start + rows]), rows


def test_no_rows(compiled, rng):
    packed = case(compiled, rng, SHAPES[0])
    assert (
        run(compiled, packed, np.empty((0, 64), np.float32), np.empty((0, 48), np.float32)).size
        == 0
    )


@pytest.mark.parametrize("rows", [8, 40])
def test_what_is_no_number_stays_so_in_its_row(compiled, rng, poisoned, rows):
    packed = case(compiled, rng, (64, 96, 48), bias=False)
    x = rng.standard_normal((rows, 64), dtype=np.float32)
    before = run(compiled, packed, x, poisoned(rows, 48))
    bad = {0: np.inf, 3: -np.inf, 7: np.nan}
    for row, value in bad.items():
        x[row, row] = value
    after = run(compiled, packed, x, poisoned(rows, 48))
    assert not np.isfinite(after[list(bad)]).any()
    others = np.delete(np.arange(rows), list(bad))
    assert np.array_equal(after[others], before[others])


def test_gates_at_the_ends(compiled, poisoned):
    """silu(g) is g far above zero and vanishes far below it."""
    gates = np.array([0, -0.0, 1e-30, 20, -20, 87, -87, 100, -100, 3e4, -3e4, 1e30, -1e30])
    eye = np.zeros((32, 16), np.float32)
    eye[:16], eye[16:, 0] = np.eye(16), 1  # up is the first term
    gate_up = compiled.pack_linear([bf16_bits(eye)])
    down = compiled.pack_linear([bf16_bits(np.eye(16, dtype=np.float32))])
    x = np.zeros((1, 16), np.float32)
    x[0, 0], x[0, 1:14] = 1, gates
    y = run(compiled, (gate_up, down), x, poisoned(1, 16))
    with np.errstate(over="ignore"):
        exact = gates / (1 + np.exp(-gates))
    np.testing.assert_allclose(y[0, 1:14], exact, rtol=2.0**-7, atol=1e-6)


def test_largest_products_stay_finite(compiled, poisoned):
    """A product beyond the range of bfloat16 is clamped, as in all kernels."""
    gate_up = compiled.pack_linear([np.full((32, 2), 0x3F80, np.uint16)])
    down = compiled.pack_linear([np.full((1, 16), 0x3D80, np.uint16)])  # 1 / 16
    x = np.array([[2.0**64, -(2.0**54)]], np.float32)
    y = run(compiled, (gate_up, down), x, poisoned(1, 1))
    np.testing.assert_allclose(y / 2.0**100, 2.0**28 * (1 - 2.0**-10) ** 2, rtol=2.0**-8)


def test_bad_arguments_raise_and_write_nothing(backend, rng, poisoned):
    gate_up, down = packed = case(backend, rng, (64, 96, 48))
    x = rng.standard_normal((4, 64), dtype=np.float32)
    for bad_x, bad_out in [
        (x[:, :63].copy(), poisoned(4, 48)),
        (x, poisoned(4, 47)),
        (x, poisoned(3, 48)),
    ]:
        with pytest.raises(ValueError):
            run(backend, packed, bad_x, bad_out)
        assert np.isnan(bad_out).all()
    out = poisoned(4, 48)
    with pytest.raises(ValueError):
        run(backend, (gate_up, gate_up), x, out)
    with pytest.raises(ValueError):
        run(backend, (down, down), x, out)
    assert np.isnan(out).all()


def test_threads_compute_at_the_same_time(compiled, rng):
    packed = case(compiled, rng, (64, 96, 48))
    x = rng.standard_normal((70, 64), dtype=np.float32)
    alone = run(compiled, packed, x, np.empty((70, 48), np.float32))

    def compute(rows):
        outs = [
            run(compiled, packed, x[:rows], np.empty((rows, 48), np.float32)) for _ in range(20)
        ]
        return all(np.array_equal(out, alone[:rows]) for out in outs)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(compute, (1, 8, 33, 70)))
