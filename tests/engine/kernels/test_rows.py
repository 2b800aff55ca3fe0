"""Norms, rotary embedding, activation and embedding lookup, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernels.reference import widen

WIDTHS = [1, 5, 16, 64, 67, 512, 771]


def floats(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(backend, oracle, rng, poisoned, width):
    x, weight = floats(rng, 5, width) * 3, floats(rng, width)
    exact = np.empty((5, width))
    oracle.rms_norm(x.astype(float), weight.astype(float), 1e-5, exact)
    y = poisoned(5, width)
    backend.rms_norm(x, weight, 1e-5, y)
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_updates_the_residual(backend, oracle, rng, poisoned, width):
    x, residual, weight = floats(rng, 4, width), floats(rng, 4, width), floats(rng, width)
    total = x + residual
    exact = np.empty((4, width))
    oracle.rms_norm(total.astype(float), weight.astype(float), 1e-6, exact)
    y = poisoned(4, width)
    backend.add_rms_norm(x, residual, weight, 1e-6, y)
    assert np.array_equal(residual, total)
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("width", [1, 3, 16, 40, 1408])
def test_silu_mul(backend, oracle, rng, poisoned, width):
    gate_up = floats(rng, 3, 2 * width) * 4
    exact = np.empty((3, width))
    oracle.silu_mul(gate_up.astype(float), exact)
    y = poisoned(3, width)
    backend.silu_mul(gate_up, y)
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-12)


def test_silu_is_accurate_over_the_whole_range_of_exp(backend):
    gate = np.linspace(-87, 87, 20_000, dtype=np.float32)
    y = np.empty((1, len(gate)), np.float32)
    backend.silu_mul(np.concatenate([gate, np.ones_like(gate)])[None], y)
    exact = gate.astype(float) / (1 + np.exp(-gate.astype(float)))
    np.testing.assert_allclose(y[0], exact, rtol=4e-7, atol=1e-38)


def test_silu_mul_at_the_ends(backend):
    gate = np.array([0, -0.0, 100, -100, 1e30, -1e30, 88.5, -88.5, np.nan, 20, -20], np.float32)
    y = np.empty((1, len(gate)), np.float32)
    backend.silu_mul(np.concatenate([gate, np.ones_like(gate)])[None], y)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = gate.astype(float) / (1 + np.exp(-gate.astype(float)))
    np.testing.assert_allclose(y[0], exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(backend, oracle, rng, poisoned, width):
    x, weight, bias = floats(rng, 5, width) * 3 + 2, floats(rng, width), floats(rng, width)
    exact = np.empty((5, width))
    oracle.layer_norm(x.astype(float), weight.astype(float), bias.astype(float), 1e-5, exact)
    y = poisoned(5, width)
    backend.layer_norm(x, weight, bias, 1e-5, y)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_layer_norm_updates_the_residual(backend, oracle, rng, poisoned, width):
    x, residual = floats(rng, 4, width), floats(rng, 4, width)
    weight, bias = floats(rng, width), floats(rng, width)
    total = x + residual
    exact = np.empty((4, width))
    oracle.layer_norm(total.astype(float), weight.astype(float), bias.astype(float), 1e-6, exact)
    y = poisoned(4, width)
    backend.add_layer_norm(x, residual, weight, bias, 1e-6, y)
    assert np.array_equal(residual, total)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


def test_layer_norm_of_far_off_values_keeps_their_differences(backend, oracle, rng, poisoned):
    """The variance is that of the distances from the mean, not a difference of large squares."""
    x = (floats(rng, 3, 200) + 1000).astype(np.float32)
    weight, bias = np.ones(200, np.float32), np.zeros(200, np.float32)
    exact = np.empty((3, 200))
    oracle.layer_norm(x.astype(float), weight.astype(float), bias.astype(float), 1e-5, exact)
    y = poisoned(3, 200)
    backend.layer_norm(x, weight, bias, 1e-5, y)
    np.testing.assert_allclose(y, exact, rtol=1e-3, atol=1e-3)


def test_layer_norm_refuses_shapes_that_do_not_fit(backend, poisoned):
    x, y, vector = np.ones((2, 8), np.float32), poisoned(2, 8), np.ones(8, np.float32)
    for weight, bias in ((vector[:7], vector), (vector, vector[:7])):
        with pytest.raises(ValueError):
            backend.layer_norm(x, weight, bias, 1e-5, y)
    with pytest.raises(ValueError):
        backend.add_layer_norm(x, x[:1].copy(), vector, vector, 1e-5, y)
    assert np.isnan(y).all()


@pytest.mark.parametrize("width", [1, 3, 16, 40, 1408])
def test_gelu(backend, oracle, rng, poisoned, width):
    x = floats(rng, 3, width) * 3
    exact = np.empty((3, width))
    oracle.activate(x.astype(float), "gelu", exact)
    y = poisoned(3, width)
    backend.activate(x, "gelu", y)
    np.testing.assert_allclose(y, exact, rtol=5e-7, atol=3e-7)


def test_gelu_is_accurate_over_its_whole_range(backend, oracle):
    x = np.linspace(-20, 20, 80_001, dtype=np.float32)[None]
    y, exact = np.empty_like(x), np.empty(x.shape)
    backend.activate(x, "gelu", y)
    oracle.activate(x.astype(float), "gelu", exact)
    np.testing.assert_allclose(y, exact, rtol=2e-7, atol=1.5e-7)


def test_gelu_at_the_ends(backend):
    x = np.array([[0, -0.0, 1e30, -1e30, 100, -100, np.inf, -np.inf, np.nan]], np.float32)
    y = np.empty_like(x)
    with np.errstate(invalid="ignore"):
        backend.activate(x, "gelu", y)
    finite = [0, 0, 1e30, 0, 100, 0]
    np.testing.assert_allclose(y[0, :6], np.array(finite, np.float32), atol=1e-30)
    assert y[0, 6] == np.inf
    assert np.isnan(y[0, 8])


def test_new_rows_do_not_depend_on_others(compiled, rng):
    x, weight, bias = floats(rng, 7, 131), floats(rng, 131), floats(rng, 131)
    together, alone = np.empty((2, 7, 131), np.float32), np.empty((2, 1, 131), np.float32)
    compiled.layer_norm(x, weight, bias, 1e-5, together[0])
    compiled.activate(x, "gelu", together[1])
    for row in range(7):
        compiled.layer_norm(x[row : row + 1].copy(), weight, bias, 1e-5, alone[0])
        compiled.activate(x[row : row + 1].copy(), "gelu", alone[1])
        assert np.array_equal(alone[:, 0], together[:, row])


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_embed(backend, rng, poisoned, kind):
    table = floats(rng, 50, 37)
    if kind == "bf16":
        table = (table.view(np.uint32) >> 16).astype(np.uint16)
    ids = rng.integers(0, 50, 23).astype(np.int32)
    y = poisoned(23, 37)
    backend.embed(ids, table, y)
    assert np.array_equal(y, widen(table)[ids])


@pytest.mark.parametrize("bad", [-1, 50])
def test_embed_refuses_ids_outside_the_table(backend, poisoned, bad):
    y = poisoned(2, 8)
    with pytest.raises(ValueError):
        backend.embed(np.array([0, bad], np.int32), np.zeros((50, 8), np.float32), y)
    assert np.isnan(y).all()


def rope_case(rng, heads, kv_heads, dim, block_size, rows):
    slots = rng.permutation(9 * block_size)[:rows].astype(np.int64)
    return {
        "qkv": floats(rng, rows, (heads + 2 * kv_heads) * dim),
        "positions": rng.integers(0, 40, rows).astype(np.int32),
        "slots": slots,
        "cos_sin": floats(rng, 40, dim),
        "q_norm": floats(rng, dim),
        "k_norm": floats(rng, dim),
        "eps": 1e-6,
        "kv_layer": np.full((9, 2, kv_heads, block_size, dim), np.nan, np.float32),
        "q_out": np.full((rows, heads, dim), np.nan, np.float32),
    }


def run_rope(backend, case, dtype=np.float32):
    copies = {
        name: value.astype(dtype) if getattr(value, "dtype", None) == np.float32 else value
        for name, value in case.items()
    }
    backend.qk_norm_rope_append(**copies)
    return copies["q_out"], copies["kv_layer"]


@pytest.mark.parametrize("norms", ["both", "none", "q"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 20), (2, 2, 6), (1, 1, 128)]
)
def test_rope_append(backend, oracle, rng, heads, kv_heads, dim, norms):
    case = rope_case(rng, heads, kv_heads, dim, 8, 11)
    case["q_norm"] = case["q_norm"] if norms != "none" else None
    case["k_norm"] = case["k_norm"] if norms == "both" else None
    q, kv = run_rope(backend, case)
    exact_q, exact_kv = run_rope(oracle, case, np.float64)
    # Also checks that exactly the slots asked for were written: the others are still NaN.
    np.testing.assert_allclose(q, exact_q, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(kv, exact_kv, rtol=1e-5, atol=2e-6)
    assert np.isnan(kv).sum() == (9 * 8 - 11) * 2 * kv_heads * dim
    values = case["qkv"].reshape(11, -1, dim)[:, heads + kv_heads :]
    assert np.array_equal(kv[case["slots"] // 8, 1, :, case["slots"] % 8], values)


@pytest.mark.parametrize(
    ("name", "value"),
    [("slots", 72), ("slots", -1), ("positions", 40), ("positions", -1)],
)
def test_rope_append_refuses_indices_outside(backend, rng, name, value):
    case = rope_case(rng, 2, 1, 8, 8, 3)
    case[name][1] = value
    with pytest.raises(ValueError):
        backend.qk_norm_rope_append(**case)
    assert np.isnan(case["q_out"]).all()
    assert np.isnan(case["kv_layer"]).all()


def test_rows_have_the_same_bits_in_any_company(compiled, rng):
    x, weight, gate_up = floats(rng, 9, 100), floats(rng, 100), floats(rng, 9, 60)
    normed, gated = np.empty((9, 100), np.float32), np.empty((9, 30), np.float32)
    compiled.rms_norm(x, weight, 1e-6, normed)
    compiled.silu_mul(gate_up, gated)
    for row in range(9):
        one, two = np.empty((1, 100), np.float32), np.empty((1, 30), np.float32)
        compiled.rms_norm(x[row : row + 1].copy(), weight, 1e-6, one)
        compiled.silu_mul(gate_up[row : row + 1].copy(), two)
        assert np.array_equal(one[0], normed[row])
        assert np.array_equal(two[0], gated[row])


def test_rms_norm_refuses_wrong_shapes(backend):
    x = np.zeros((2, 8), np.float32)
    for weight, out in [
        (np.zeros(7, np.float32), x.copy()),
        (np.zeros(8, np.float32), x[:1].copy()),
    ]:
        with pytest.raises(ValueError):
            backend.rms_norm(x, weight, 1e-6, out)


@pytest.mark.parametrize("add", [False, True])
def test_put_rows(backend, rng, add):
    out, x = floats(rng, 9, 37), floats(rng, 3, 37)
    rows = np.array([7, 0, 3], np.int32)
    expected = out.copy()
    expected[rows] = x + (out[rows] if add else 0)
    backend.put_rows(x, rows, out, add=add)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("bad", [-1, 9])
def test_put_rows_refuses_rows_outside(backend, rng, bad):
    out, x = floats(rng, 9, 37), floats(rng, 2, 37)
    before = out.copy()
    with pytest.raises(ValueError):
        backend.put_rows(x, np.array([0, bad], np.int32), out)
    with pytest.raises(ValueError):
        backend.put_rows(x[:, 1:], np.array([0, 1], np.int32), out)
    assert np.array_equal(out, before)
