"""Products with packed weights: accuracy, any shape, and bits that do not depend on other rows."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernels.reference import widen

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


def tolerance(x, weights, bias):
    """Rounding bound of a sum of products in any order, at the size random errors reach."""
    magnitude = np.abs(x).astype(np.float64) @ np.abs(widen(weights)).T.astype(np.float64)
    return EPS * (4 + 2 * np.sqrt(x.shape[1])) * (magnitude + np.abs(bias))


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
    limit = tolerance(x, weights, bias)
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
    if backend.row_independent:
        assert np.array_equal(together, apart)
    else:
        np.testing.assert_allclose(together, apart, rtol=0, atol=1e-5)


def test_bf16_weights_stay_half_as_large(compiled, rng):
    sizes = [
        compiled.pack_linear([make_weights(rng, 128, 64, kind)]).nbytes for kind in ("f32", "bf16")
    ]
    assert sizes == [128 * 64 * 4, 128 * 64 * 2]


def test_bad_arguments_raise_and_write_nothing(backend, rng, poisoned):
    packed = backend.pack_linear([make_weights(rng, 20, 8, "f32")])
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
