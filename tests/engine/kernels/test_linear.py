"""Products with packed weights: accuracy, any shape, and bits that do not depend on other rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from baton.engine.kernels.reference import widen

from .conftest import rounds

EPS = 2.0**-24
SHAPES = [
    (1, 1),
    (3, 7),
    (16, 64),
    (33, 65),
    (64, 128),
    (96, 200),
    (127, 31),
    (1100, 130),
    (520, 48),
]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 13, 32, 50]


def bf16_bits(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def make_weights(rng, out, width, kind):
    weights = rng.standard_normal((out, width), dtype=np.float32)
    return bf16_bits(weights) if kind == "bf16" else weights


def tolerance(x, weights, bias, numerics):
    """Rounding bound of a sum of products in any order, at the size random errors reach.

    Products of bfloat16 round x to bfloat16, so a product of theirs may be 2^-8 of it away. The sum
    of these distances is within that of all sizes and, as signs differ, grows like their square
    root.
    """
    a, b = np.abs(x).astype(np.float64), np.abs(widen(weights)).T.astype(np.float64)
    magnitude = a @ b
    limit = EPS * (4 + 2 * np.sqrt(x.shape[1])) * (magnitude + np.abs(bias))
    if weights.dtype == np.uint16 and rounds(numerics):
        limit += 2.0**-8 * np.minimum(magnitude, 3 * np.sqrt(a**2 @ b**2))
    return limit


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_close_to_oracle_for_any_number_of_rows(backend, oracle, rng, poisoned, width, out, kind):
    weights = make_weights(rng, out, width, kind)
    bias = rng.standard_normal(out, dtype=np.float32)
    x = rng.standard_normal((ROWS[-1], width), dtype=np.float32)
    exact = np.empty((len(x), out))
    oracle.linear(x, oracle.pack_linear([weights], bias), exact)
    packed = backend.pack_linear([weights], bias)
    assert (packed.in_features, packed.out_features) == (width, out)
    limit = tolerance(x, weights, bias, backend.numerics)
    for rows in ROWS:
        y = poisoned(rows, out)
        backend.linear(x[:rows], packed, y)
        assert (np.abs(y - exact[:rows]) <= limit[:rows]).all(), rows


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(("width", "out"), [(96, 200), (1100, 130), (3000, 70), (17, 5)])
def test_a_row_has_the_same_bits_in_any_company(compiled, rng, poisoned, width, out, kind):
    packed = compiled.pack_linear([make_weights(rng, out, width, kind)])
    x = rng.standard_normal((40, width), dtype=np.float32)
    alone = poisoned(40, out)
    for row in range(40):
        compiled.linear(x[row : row + 1], packed, alone[row : row + 1])
    for rows in range(2, 41):
        start = int(rng.integers(0, 41 - rows))
        together = poisoned(rows, out)
        compiled.linear(x[start : start + rows], packed, together)
        assert np.array_equal(together, alone[start : start + rows]), rows


def test_bf16_and_the_same_weights_in_f32_give_the_same_bits(compiled, rng):
    if rounds(compiled.numerics):
        pytest.skip("bf16 is multiplied in an order of its own; see test_half_products.py")
    halves = make_weights(rng, 150, 80, "bf16")
    x = rng.standard_normal((9, 80), dtype=np.float32)
    results = []
    for weights in (halves, widen(halves)):
        y = np.empty((9, 150), np.float32)
        compiled.linear(x, compiled.pack_linear([weights]), y)
        results.append(y)
    assert np.array_equal(*results)


@pytest.mark.parametrize("kinds", [("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32")])
def test_parts_are_stacked(backend, rng, kinds):
    parts = [make_weights(rng, n, 24, kind) for n, kind in zip((70, 13), kinds, strict=True)]
    x = rng.standard_normal((3, 24), dtype=np.float32)
    together, apart = np.empty((3, 83), np.float32), np.empty((3, 83), np.float32)
    backend.linear(x, backend.pack_linear(parts), together)
    start = 0
    for part in parts:
        y = np.empty((3, len(part)), np.float32)
        backend.linear(x, backend.pack_linear([part]), y)
        apart[:, start : start + len(part)] = y
        start += len(part)
    tiles = rounds(backend.numerics) and len(set(kinds)) > 1  # bf16 results differ
    if backend.row_independent and not tiles:
        assert np.array_equal(together, apart)
    else:
        np.testing.assert_allclose(together, apart, rtol=0, atol=5e-2 if tiles else 1e-5)


def test_bf16_weights_stay_half_as_large(compiled, rng):
    sizes = [
        compiled.pack_linear([make_weights(rng, 128, 64, kind)]).nbytes for kind in ("f32", "bf16")
    ]
    assert sizes == [128 * 64 * 4, 128 * 64 * 2]


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_bad_arguments_raise_and_write_nothing(backend, rng, poisoned, kind):
    packed = backend.pack_linear([make_weights(rng, 20, 8, kind)])
    x = rng.standard_normal((4, 8), dtype=np.float32)
    for bad_x, bad_out in [
        (x[:, :7].copy(), poisoned(4, 20)),
        (x, poisoned(4, 19)),
        (x, poisoned(3, 20)),
        (x[0], poisoned(4, 20)),
    ]:
        with pytest.raises(ValueError):
            backend.linear(bad_x, packed, bad_out)
        assert np.isnan(bad_out).all()
    with pytest.raises(ValueError):
        backend.pack_linear([])
    with pytest.raises(ValueError):
        backend.pack_linear([np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)])


def test_compiled_refuses_other_types_strides_and_overlap(compiled, rng):
    packed = compiled.pack_linear([make_weights(rng, 8, 8, "f32")])
    x, y = np.zeros((4, 8), np.float32), np.zeros((4, 8), np.float32)
    read_only = y.copy()
    read_only.flags.writeable = False
    for bad_x, bad_y in [
        (x.astype(np.float64), y),
        (x, y.astype(np.float64)),
        (np.zeros((4, 16), np.float32)[:, ::2], y),
        (x, read_only),
        (x, x),
    ]:
        with pytest.raises(ValueError):
            compiled.linear(bad_x, packed, bad_y)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_what_is_no_number_stays_so_in_its_row(compiled, rng, poisoned, kind):
    """Infinities and NaN anywhere in x or the weights never become finite, nor spread to others."""
    weights = rng.integers(1, 100, (20, 70)).astype(np.float32)
    weights = bf16_bits(weights) if kind == "bf16" else weights
    x = np.abs(rng.standard_normal((40, 70), dtype=np.float32)) + np.float32(0.1)
    payload = np.uint32([0x7F800001, 0xFF800001, 0x7FFFFFFF]).view(np.float32)  # NaNs
    bad = {0: np.inf, 3: -np.inf, 17: np.nan, 18: payload[0], 31: payload[1], 39: payload[2]}
    for row, value in bad.items():
        x[row, row] = value
    y = poisoned(40, 20)
    compiled.linear(x, compiled.pack_linear([weights]), y)
    assert (y[0] == np.inf).all()
    assert (y[3] == -np.inf).all()
    assert np.isnan(y[[17, 18, 31, 39]]).all()
    assert np.isfinite(np.delete(y, list(bad), axis=0)).all()
    x[:] = 1
    weights[5, 69], weights[19, 0] = (0x7F80, 0x7FC0) if kind == "bf16" else (np.inf, np.nan)
    compiled.linear(x, compiled.pack_linear([weights]), y)
    assert not np.isfinite(y[:, [5, 19]]).any()
    assert np.isfinite(np.delete(y, [5, 19], axis=1)).all()


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_the_ends_of_the_range(compiled, rng, poisoned, kind):
    """The largest floats exceed bfloat16 but stay finite; rounding drops the bits beyond bfloat16.

    Subnormal numbers may become zero.
    """
    rounded = kind == "bf16" and rounds(compiled.numerics)
    top = np.finfo(np.float32).max
    ones = np.ones((3, 40), np.float32)
    weights = bf16_bits(ones) if kind == "bf16" else ones
    packed = compiled.pack_linear([weights])
    x = np.zeros((6, 40), np.float32)
    x[0, 7], x[1, 33], x[2, 0], x[3, 39] = top, -top, np.nextafter(top, 0), 1e-40
    x[5] = 2.0**-126
    y = poisoned(6, 3)
    compiled.linear(x, packed, y)
    assert np.isfinite(y).all()
    largest = np.repeat([[x[0, 7]], [x[1, 33]], [x[2, 0]]], 3, axis=1)
    np.testing.assert_allclose(y[:3] / 2.0**100, largest / 2.0**100, rtol=2.0**-8 if rounded else 0)
    np.testing.assert_allclose(y[3], 1e-40, rtol=0, atol=2.0**-126)
    assert not y[4].any()
    np.testing.assert_allclose(y[5], 40 * 2.0**-126, rtol=1e-6)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(("rows", "width", "out"), [(300, 2100, 37), (512, 768, 80), (97, 33, 64)])
def test_many_rows_have_the_bits_of_few(compiled, rng, poisoned, rows, width, out, kind):
    """Enough rows that they pass the caches in several parts."""
    bias = rng.standard_normal(out, dtype=np.float32)
    packed = compiled.pack_linear([make_weights(rng, out, width, kind)], bias)
    x = rng.standard_normal((rows, width), dtype=np.float32)
    together = poisoned(rows, out)
    compiled.linear(x, packed, together)
    start = 0
    for count in (1, 8, 16, 17, 31, 1, 15, rows):
        part = x[start : start + count]
        y = poisoned(len(part), out)
        compiled.linear(part, packed, y)
        assert np.array_equal(y, together[start : start + count]), (start, count)
        start += count


def test_threads_multiply_at_the_same_time(compiled, rng):
    """Tiles are set up per call and thread."""
    packed = compiled.pack_linear([make_weights(rng, 200, 300, "bf16")])
    x = rng.standard_normal((50, 300), dtype=np.float32)
    alone = np.empty((50, 200), np.float32)
    compiled.linear(x, packed, alone)

    def multiply(rows):
        y = np.empty((rows, 200), np.float32)
        for _ in range(20):
            compiled.linear(x[:rows], packed, y)
        return np.array_equal(y, alone[:rows])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(multiply, (1, 8, 33, 50)))
