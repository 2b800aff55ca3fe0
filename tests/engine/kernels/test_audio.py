"""Snake, depthwise and dense convolutions, tanh."""

from __future__ import annotations

import numpy as np
import pytest

WIDTHS = [1, 5, 16, 64, 67, 130]


def floats(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def scales_of(rng, width):
    alpha = rng.uniform(0.2, 4, width).astype(np.float32)
    return np.stack([alpha, 1 / (alpha + np.float32(1e-9))])


@pytest.mark.parametrize("width", WIDTHS)
def test_snake(backend, oracle, rng, poisoned, width):
    x, scales = floats(rng, 6, width) * 5, scales_of(rng, width)
    exact = np.empty((6, width))
    oracle.snake(x.astype(float), scales.astype(float), exact)
    y = poisoned(6, width)
    backend.snake(x, scales, y)
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=3e-6)


def test_snake_is_accurate_over_many_periods(backend, oracle):
    x = np.linspace(-3000, 3000, 60_000, dtype=np.float32)[None]
    scales = np.ones((2, x.shape[1]), np.float32)
    y, exact = np.empty_like(x), np.empty(x.shape)
    backend.snake(x, scales, y)
    oracle.snake(x.astype(float), scales.astype(float), exact)
    np.testing.assert_allclose(y, exact, rtol=2e-7, atol=3e-7)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_snake_updates_the_residual(backend, oracle, rng, poisoned, width):
    x, residual, scales = floats(rng, 4, width), floats(rng, 4, width), scales_of(rng, width)
    total = x + residual
    exact = np.empty((4, width))
    oracle.snake(total.astype(float), scales.astype(float), exact)
    y = poisoned(4, width)
    backend.add_snake(x, residual, scales, y)
    assert np.array_equal(residual, total)
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize(("first", "after"), [(0, 2), (1, 1), (3, 0)])
def test_snake_leaves_zeros_around_its_rows(backend, rng, poisoned, first, after):
    x, residual, scales = floats(rng, 4, 20), floats(rng, 4, 20), scales_of(rng, 20)
    alone, y = poisoned(4, 20), poisoned(4 + first + after, 20)
    backend.snake(x, scales, alone)
    backend.snake(x, scales, y, first)
    assert np.array_equal(y, np.pad(alone, ((first, after), (0, 0))))
    backend.snake(x + residual, scales, alone)
    backend.add_snake(x, residual, scales, y, first)
    assert np.array_equal(y, np.pad(alone, ((first, after), (0, 0))))


@pytest.mark.parametrize("stride", [1, 4])
def test_look_up(backend, rng, poisoned, stride):
    """The second call adds to the first."""
    table, weight, bias = floats(rng, 50, 8), floats(rng, 20, 8), floats(rng, 20)
    y, exact = poisoned(9 * stride, 20), np.zeros((9 * stride, 20))
    for add in (False, True):
        ids = rng.integers(0, 50, 9, np.int32)
        backend.look_up(ids, table, backend.pack_linear([weight], bias), stride, y, add=add)
        exact += np.repeat(table[ids].astype(float) @ weight.T + bias, stride, axis=0)
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("dilation", [1, 3, 9])
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (20, 67), (70, 16)])
def test_depthwise(backend, oracle, rng, poisoned, rows, width, dilation, active):
    x, weight, bias = floats(rng, rows, width), floats(rng, 7, width), floats(rng, width)
    scales = scales_of(rng, width) if active else None
    exact = np.empty((rows, width))
    oracle.depthwise(
        *(a.astype(float) for a in (x, weight, bias)),
        dilation,
        None if scales is None else scales.astype(float),
        exact,
    )
    y = poisoned(rows, width)
    backend.depthwise(x, weight, bias, dilation, scales, y)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("rows", "columns", "taps", "out"), [(1, 3, 2, 5), (40, 17, 7, 1), (9, 64, 2, 48)]
)
def test_convolve(backend, oracle, rng, poisoned, rows, columns, taps, out):
    x, weight, bias = (
        floats(rng, rows + taps - 1, columns),
        floats(rng, out, taps * columns),
        floats(rng, out),
    )
    y = poisoned(rows, out)
    backend.convolve(x, backend.pack_linear([weight], bias), y)
    exact = np.stack([weight.astype(float) @ x[t : t + taps].ravel() + bias for t in range(rows)])
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=2e-5)


def test_soft_clip(backend, poisoned):
    x = np.concatenate([np.linspace(-12, 12, 5001), [0, -0.0, 1e30, -1e30]]).astype(np.float32)
    y = poisoned(len(x))
    backend.soft_clip(x, y)
    np.testing.assert_allclose(y, np.tanh(x.astype(float)), atol=1.3e-7)


def test_rows_have_the_same_bits_in_any_window(compiled, rng):
    x, weight, bias = floats(rng, 60, 33), floats(rng, 7, 33), floats(rng, 33)
    dense = compiled.pack_linear([floats(rng, 20, 2 * 33)], floats(rng, 20))
    scales = scales_of(rng, 33)
    whole, part = np.empty((60, 33), np.float32), np.empty((30, 33), np.float32)
    product, few = np.empty((59, 20), np.float32), np.empty((11, 20), np.float32)
    compiled.depthwise(x, weight, bias, 3, scales, whole)
    compiled.depthwise(x[20:50].copy(), weight, bias, 3, scales, part)
    assert np.array_equal(whole[29:41], part[9:21])
    compiled.convolve(x, dense, product)
    compiled.convolve(x[5:17].copy(), dense, few)
    assert np.array_equal(product[5:16], few)


def test_shapes_that_do_not_fit_are_refused(backend, rng, poisoned):
    x, y = floats(rng, 8, 4), poisoned(8, 4)
    weight, bias, scales = floats(rng, 7, 4), floats(rng, 4), scales_of(rng, 4)
    ids, table = np.arange(4, dtype=np.int32), floats(rng, 5, 3)
    calls = [
        lambda: backend.snake(x, scales[:1].copy(), y),
        lambda: backend.snake(x, scales_of(rng, 5), y),
        lambda: backend.add_snake(x, x[:3].copy(), scales, y),
        lambda: backend.depthwise(x, weight[:6].copy(), bias, 1, None, y),
        lambda: backend.depthwise(x, weight, bias[:3].copy(), 1, None, y),
        lambda: backend.depthwise(x, weight, bias, 0, None, y),
        lambda: backend.depthwise(x, weight, bias, 1, scales_of(rng, 5), y),
        lambda: backend.depthwise(x[:5].copy(), weight, bias, 1, None, y),
        lambda: backend.convolve(x, backend.pack_linear([floats(rng, 4, 8)]), y),
        lambda: backend.convolve(x[:4].copy(), backend.pack_linear([floats(rng, 4, 4)]), y),
        lambda: backend.soft_clip(x[0].copy(), y[0, :3]),
        lambda: backend.snake(x, scales, y, 1),
        lambda: backend.snake(x, scales, y, -1),
        lambda: backend.look_up(
            ids, table, backend.pack_linear([floats(rng, 4, 3)]), 3, y, add=False
        ),
        lambda: backend.look_up(
            ids + 2, table, backend.pack_linear([floats(rng, 4, 3)]), 2, y, add=False
        ),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()
    assert np.isnan(y).all()
