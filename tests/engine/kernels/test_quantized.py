"""Products with quantized weights: the bits of the NumPy definition, near those of the floats.

The weights are drawn anew in every run. A failed test prints the seed; QUANTIZED_SEED repeats it.
"""

from __future__ import annotations

import os
import secrets

import numpy as np
import pytest

from baton.engine.kernels.backend import QuantizedWeights
from baton.engine.kernels.load import load_backend
from baton.engine.kernels.quantized import KINDS, dequantized, product, round_rows
from baton.engine.loading.gguf_blocks import dequantize

from .quantized_cases import ERRORS, random_weights, with_error

SEED = int(os.environ.get("QUANTIZED_SEED", secrets.randbits(32)))
ROWS = (1, 2, 3, 5, 7, 8, 9, 20, 40)
WIDTHS = {256: (256, 768, 1280), 32: (32, 96, 640)}


@pytest.fixture(autouse=True)
def _seed() -> None:
    print(f"QUANTIZED_SEED={SEED}")


@pytest.fixture
def fresh() -> np.random.Generator:
    return np.random.default_rng(SEED)


def activations(rng, rows, columns):
    """Rows of different sizes, with outliers."""
    x = rng.standard_normal((rows, columns)) * rng.lognormal(size=(rows, 1))
    x[rng.random(x.shape) < 0.003] *= 20
    return x.astype(np.float32)


def rounding_bound(x, weights):
    """The largest distance that rounding x to int8 can make, and float32 sums after it."""
    _, scales = round_rows(x, KINDS[weights.kind].items)
    floats = np.abs(dequantized(weights)).astype(np.float64)
    each = np.repeat(scales, KINDS[weights.kind].items, axis=1) / 2
    return each.astype(np.float64) @ floats.T * 1.001 + 1e-5 * (np.abs(x) @ floats.T)


def distance(y, exact):
    """Root mean square of the distance, relative to that of the exact values."""
    return float(np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_the_definition(compiled, fresh, poisoned, kind):
    for columns in WIDTHS[KINDS[kind].items]:
        for out in (1, 16, 37):
            weights = random_weights(fresh, kind, out, columns)
            bias = fresh.standard_normal(out, dtype=np.float32)
            packed = compiled.pack_linear([weights], bias)
            assert (packed.in_features, packed.out_features) == (columns, out)
            for rows in ROWS:
                x, y = activations(fresh, rows, columns), poisoned(rows, out)
                compiled.linear(x, packed, y)
                np.testing.assert_array_equal(y, product(x, weights, bias))


@pytest.mark.parametrize("kind", KINDS)
def test_near_the_product_of_floats(compiled, fresh, kind):
    columns = WIDTHS[KINDS[kind].items][-1]
    weights = random_weights(fresh, kind, 64, columns)
    for x in (activations(fresh, 12, columns), even_activations(fresh, columns)):
        y = np.empty((12, 64), np.float32)
        compiled.linear(x, compiled.pack_linear([weights]), y)
        exact = x.astype(np.float64) @ dequantized(weights).astype(np.float64).T
        assert (np.abs(y - exact) <= rounding_bound(x, weights)).all()
    assert distance(y, exact) < LIMIT


def even_activations(rng, columns):
    """Without outliers, which make the steps of the other activations coarse."""
    return rng.standard_normal((12, columns), np.float32)


LIMIT = 0.03


@pytest.mark.parametrize(("kind", "error"), ERRORS)
def test_an_error_in_the_blocks_is_found(compiled, fresh, kind, error):
    columns = WIDTHS[KINDS[kind].items][-1]
    weights = random_weights(fresh, kind, 64, columns)
    x, y = even_activations(fresh, columns), np.empty((12, 64), np.float32)
    compiled.linear(x, compiled.pack_linear([with_error(weights, error)]), y)
    exact = x.astype(np.float64) @ dequantized(weights).astype(np.float64).T
    assert distance(y, exact) > LIMIT
    assert not np.array_equal(y, product(x, weights))


def test_other_rows_of_a_panel_are_found(compiled, fresh):
    weights = random_weights(fresh, "Q4_K", 32, 512)
    turned = QuantizedWeights(
        "Q4_K", weights.blocks.reshape(2, 16, -1)[:, ::-1].reshape(32, -1), 512
    )
    x, y = activations(fresh, 4, 512), np.empty((4, 32), np.float32)
    compiled.linear(x, compiled.pack_linear([turned]), y)
    exact = x.astype(np.float64) @ dequantized(weights).astype(np.float64).T
    assert distance(y, exact) > LIMIT


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_0", "Q8_0"])
def test_a_row_has_the_same_bits_with_any_others(compiled, fresh, kind):
    columns = 1536  # more than one slice
    packed = compiled.pack_linear([random_weights(fresh, kind, 70, columns)])
    x = activations(fresh, 530, columns)
    together = np.empty((530, 70), np.float32)
    compiled.linear(x, packed, together)
    for start, rows in ((0, 1), (3, 2), (100, 7), (9, 40), (500, 30)):
        y = np.empty((rows, 70), np.float32)
        compiled.linear(x[start : start + rows], packed, y)
        np.testing.assert_array_equal(y, together[start : start + rows])


def test_parts_of_several_kinds(compiled, fresh):
    parts = [
        random_weights(fresh, kind, rows, 512)
        for kind, rows in (("Q4_K", 24), ("Q4_K", 5), ("Q6_K", 19), ("Q8_0", 16), ("Q5_0", 3))
    ]
    bias = fresh.standard_normal(67, dtype=np.float32)
    packed = compiled.pack_linear(parts, bias)
    x, y = activations(fresh, 9, 512), np.full((9, 67), np.nan, np.float32)
    compiled.linear(x, packed, y)
    expected = np.concatenate([product(x, part) for part in parts], axis=1)
    np.testing.assert_allclose(y, expected + bias, rtol=1e-4, atol=1e-4)
    alone = np.concatenate(
        [product(x, p, b) for p, b in zip(parts, np.split(bias, [24, 29, 48, 64]), strict=True)],
        axis=1,
    )
    np.testing.assert_array_equal(y, alone)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0"])
def test_rows_that_are_not_finite_and_tiny_ones(compiled, fresh, kind):
    weights = random_weights(fresh, kind, 20, 512)
    x = activations(fresh, 6, 512)
    packed, alone = compiled.pack_linear([weights]), np.empty((6, 20), np.float32)
    compiled.linear(x, packed, alone)
    x[1, 7], x[2, 300], x[3], x[4] = np.nan, -np.inf, 1e-36, 0
    y = np.empty((6, 20), np.float32)
    compiled.linear(x, packed, y)
    assert np.isnan(y[1:3]).all()
    assert (y[3:5] == 0).all()
    np.testing.assert_array_equal(y[[0, 5]], alone[[0, 5]])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_take_about_the_bytes_of_the_blocks(compiled, fresh, kind):
    weights = random_weights(fresh, kind, 64, 2048)
    assert compiled.pack_linear([weights]).nbytes <= 1.1 * weights.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_table(compiled, fresh, poisoned, kind):
    table = random_weights(fresh, kind, 11, 512)
    ids, y = np.array([3, 0, 10, 3], np.int32), poisoned(4, 512)
    compiled.embed(ids, table, y)
    np.testing.assert_array_equal(y, dequantized(table)[ids])


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_are_those_of_the_reader_of_files(fresh, kind):
    weights = random_weights(fresh, kind, 7, 512)
    values = np.empty((7, 512), np.float32)
    dequantize(kind, memoryview(weights.blocks.tobytes()), values.reshape(-1))
    np.testing.assert_array_equal(dequantized(weights), values)


def test_wrong_arguments(compiled, fresh):
    weights = random_weights(fresh, "Q4_K", 20, 512)
    packed, x, y = compiled.pack_linear([weights]), np.ones((2, 512), np.float32), np.ones((2, 20))
    with pytest.raises(ValueError, match="format d"):
        compiled.linear(x, packed, y)
    with pytest.raises(ValueError, match="256 columns, not 512"):
        compiled.linear(np.ones((2, 256), np.float32), packed, y.astype(np.float32))
    with pytest.raises(ValueError, match="not with others"):
        compiled.pack_linear([weights, np.ones((3, 512), np.float32)])
    with pytest.raises(ValueError, match="same number of columns"):
        compiled.pack_linear([weights, random_weights(fresh, "Q4_K", 20, 256)])
    with pytest.raises(ValueError, match="are not the blocks of Q4_K"):
        compiled.pack_linear([QuantizedWeights("Q4_K", weights.blocks, 256)])
    with pytest.raises(ValueError, match="no products of IQ1_S"):
        compiled.pack_linear([QuantizedWeights("IQ1_S", weights.blocks, 512)])
    with pytest.raises(ValueError, match=r"ids: 20 is outside 0\.\.19"):
        compiled.embed(np.array([20], np.int32), weights, np.ones((1, 512), np.float32))


def test_kernels_without_quantized_products_refuse_them(fresh):
    weights = random_weights(fresh, "Q4_K", 20, 512)
    numpy = load_backend("numpy")
    assert not numpy.quantized_kinds
    with pytest.raises(ValueError, match="not packed by these kernels"):
        numpy.pack_linear([weights])
