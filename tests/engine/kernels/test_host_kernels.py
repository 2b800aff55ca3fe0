"""Attention over whole rows, activations, group norm and convolution."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernels.backend import ACTIVATIONS
from baton.engine.kernels.host_backend import conv2d, pack_conv


def floats(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def wide(*arrays):
    return [None if a is None else a.astype(float) for a in arrays]


ATTENTION = [(1, 1, 1, 8, 0), (7, 5, 2, 16, 1), (77, 77, 3, 20, 3), (100, 130, 2, 64, 0)]


@pytest.mark.parametrize(("rows", "keys", "heads", "dim", "biases"), ATTENTION)
def test_dense_attention(backend, oracle, rng, poisoned, rows, keys, heads, dim, biases):
    q, kv = floats(rng, rows, heads, dim), floats(rng, 2, heads, keys, dim)
    bias = floats(rng, biases, rows, keys) if biases else None
    exact = np.empty((rows, heads * dim))
    oracle.dense_attention(*wide(q, kv, bias), dim**-0.5, exact)
    y = poisoned(rows, heads * dim)
    backend.dense_attention(q, kv, bias, dim**-0.5, y)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=2e-6)


def test_minus_infinity_hides_keys(backend, rng):
    q, kv = floats(rng, 40, 2, 16), floats(rng, 2, 2, 40, 16)
    causal = np.triu(np.full((1, 40, 40), -np.inf, np.float32), 1)
    all_rows, one = np.empty((40, 32), np.float32), np.empty((1, 32), np.float32)
    backend.dense_attention(q, kv, causal, 0.25, all_rows)
    kept = np.ascontiguousarray(kv[:, :, :13])
    backend.dense_attention(q[12:13], kept, None, 0.25, one)
    np.testing.assert_allclose(all_rows[12], one[0], rtol=1e-6, atol=1e-6)


def test_rows_of_attention_do_not_depend_on_each_other(compiled, rng):
    q, kv = floats(rng, 101, 2, 24), floats(rng, 2, 2, 67, 24)
    together, alone = np.empty((101, 48), np.float32), np.empty((1, 48), np.float32)
    compiled.dense_attention(q, kv, None, 0.2, together)
    for row in (0, 47, 48, 100):
        compiled.dense_attention(q[row : row + 1], kv, None, 0.2, alone)
        assert alone.tobytes() == together[row].tobytes()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kv", {"kv": np.zeros((2, 2, 5, 7), np.float32)}),
        ("out", {"out": np.zeros((4, 15), np.float32)}),
        ("bias", {"bias": np.zeros((3, 4, 5), np.float32)}),
    ],
)
def test_wrong_shapes_of_attention_are_refused(backend, name, change):
    given = {
        "q": np.zeros((4, 2, 8), np.float32),
        "kv": np.zeros((2, 2, 5, 8), np.float32),
        "bias": None,
        "scale": 1.0,
        "out": np.zeros((4, 16), np.float32),
    }
    backend.dense_attention(**given)
    with pytest.raises(ValueError, match=name):
        backend.dense_attention(**{**given, **change})


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(backend, oracle, rng, poisoned, kind):
    x = floats(rng, 5, 203) * 6
    x[0, :6] = 0, -0.0, 100, -100, 1e10, -1e10
    exact, y = np.empty(x.shape), poisoned(*x.shape)
    oracle.activate(x.astype(float), kind, exact)
    backend.activate(x, kind, y)
    np.testing.assert_allclose(y, exact, rtol=4e-6, atol=1e-6)
    if kind != "gelu":
        backend.activate(x, kind, x)
        assert x.tobytes() == y.tobytes()


def test_add_scaled(backend, rng):
    x, scale, residual = floats(rng, 5, 67), floats(rng, 67), floats(rng, 5, 67)
    exact = residual.astype(float) + x.astype(float) * scale
    backend.add_scaled(x, scale, residual)
    np.testing.assert_allclose(residual, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("rows", "width", "groups"), [(1, 4, 2), (9, 32, 32), (300, 96, 8)])
def test_group_norm(backend, oracle, rng, poisoned, rows, width, groups, silu):
    x = floats(rng, rows, width) * 2 + 3
    weight, bias = floats(rng, width), floats(rng, width)
    exact, y = np.empty(x.shape), poisoned(*x.shape)
    oracle.group_norm(x.astype(float), groups, *wide(weight, bias), 1e-6, silu, exact)
    backend.group_norm(x, groups, weight, bias, 1e-6, silu, y)
    np.testing.assert_allclose(y, exact, rtol=2e-5, atol=2e-5)
    backend.group_norm(x, groups, weight, bias, 1e-6, silu, x)
    assert x.tobytes() == y.tobytes()


def test_groups_must_divide_the_columns(backend):
    x, ones = np.ones((2, 6), np.float32), np.ones(6, np.float32)
    with pytest.raises(ValueError, match="6 columns do not divide into 4 groups"):
        backend.group_norm(x, 4, ones, ones, 1e-6, False, np.empty_like(x))


def convolved(x, weight, bias, scale):
    """The definition of a convolution with zero padding, in loops over the taps."""
    x = x.repeat(scale, axis=0).repeat(scale, axis=1).astype(float)
    margin = weight.shape[2] // 2
    padded = np.pad(x, ((margin, margin), (margin, margin), (0, 0)))
    out = np.zeros((*x.shape[:2], len(weight))) + bias
    for i in range(weight.shape[2]):
        for j in range(weight.shape[3]):
            part = padded[i : i + len(x), j : j + x.shape[1]]
            out += part @ weight[:, :, i, j].astype(float).T
    return out


@pytest.mark.parametrize("patch_bytes", [4 << 20, 1])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("scale", [1, 2])
def test_conv2d(backend, rng, poisoned, monkeypatch, kernel, scale, patch_bytes):
    monkeypatch.setattr("baton.engine.kernels.host_backend.PATCH_BYTES", patch_bytes)
    x, weight, bias = floats(rng, 5, 7, 6), floats(rng, 9, 6, kernel, kernel), floats(rng, 9)
    out = poisoned(5 * scale, 7 * scale, 9)
    conv2d(backend, x, pack_conv(backend, weight, bias), kernel, out, scale=scale)
    np.testing.assert_allclose(out, convolved(x, weight, bias, scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("patch_bytes", [4 << 20, 3000, 1])
@pytest.mark.parametrize(("kernel", "out"), [(3, 6), (3, 2), (5, 6), (7, 3)])
def test_conv2d_in_the_memory_of_its_input(backend, rng, monkeypatch, kernel, out, patch_bytes):
    monkeypatch.setattr("baton.engine.kernels.host_backend.PATCH_BYTES", patch_bytes)
    x, bias = floats(rng, 9, 7, 6), floats(rng, out)
    weight = pack_conv(backend, floats(rng, out, 6, kernel, kernel), bias)
    apart = np.empty((9, 7, out), np.float32)
    conv2d(backend, x, weight, kernel, apart)
    here = x.reshape(-1)[: apart.size].reshape(apart.shape)
    conv2d(backend, x, weight, kernel, here)
    assert here.tobytes() == apart.tobytes()


def test_conv2d_refuses_other_shapes(backend, rng):
    weight = pack_conv(backend, floats(rng, 4, 3, 3, 3), floats(rng, 4))
    x = floats(rng, 5, 5, 3)
    with pytest.raises(ValueError, match="27 columns"):
        conv2d(backend, x[..., :2].copy(), weight, 3, np.empty((5, 5, 4), np.float32))
    with pytest.raises(ValueError, match="out has shape"):
        conv2d(backend, x, weight, 3, np.empty((5, 4, 4), np.float32))
