"""The order of additions on matrix tiles, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernels import load_backend
from baton.engine.kernels.reference import widen

from .conftest import ISAS

pytestmark = pytest.mark.skipif("amx" not in ISAS, reason="no amx kernels here")
TERMS = 32


def bf16(x):
    """Floats rounded to the nearest bfloat16, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def tile_product(x, weights):
    """One TDPBF16PS from zero: sums of even and of odd terms, then both added.

    Products of two bfloat16 are exact in float32.
    """
    terms = x[:, None] * weights[None]
    even = odd = np.zeros(terms.shape[:2], np.float32)
    for k in range(0, TERMS, 2):
        even, odd = even + terms[:, :, k], odd + terms[:, :, k + 1]
    return even + odd


def in_order(x, weights, bias):
    """``linear`` as isa_amx.c promises it: ``[rows, in]``, ``[out, in]`` and ``[out]`` floats."""
    pad = ((0, 0), (0, -x.shape[1] % TERMS))
    x, weights = bf16(np.pad(x, pad)), np.pad(weights, pad)
    y = np.repeat(bias[None], len(x), axis=0)
    for k in range(0, x.shape[1], TERMS):
        y = y + tile_product(x[:, k : k + TERMS], weights[:, k : k + TERMS])
    return y


@pytest.mark.parametrize("rows", [1, 5, 16, 19, 40])
@pytest.mark.parametrize(("width", "out"), [(1, 1), (31, 70), (32, 64), (100, 33), (257, 16)])
def test_bits_are_those_of_the_order_promised(rng, poisoned, rows, width, out):
    weights = (rng.standard_normal((out, width), dtype=np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    x = rng.standard_normal((rows, width), dtype=np.float32) * np.float32(1e-3)
    bias = rng.standard_normal(out, dtype=np.float32)
    backend, y = load_backend("cpu", isa="amx"), poisoned(rows, out)
    backend.linear(x, backend.pack_linear([weights], bias), y)
    assert np.array_equal(y, in_order(x, widen(weights), bias))


def test_x_is_rounded_to_the_nearest_bfloat16(rng):
    """Truncation would double the error; ties round to even."""
    backend, x = load_backend("cpu", isa="amx"), rng.standard_normal((1000, 1), dtype=np.float32)
    x[:2, 0] = 1 + 2.0**-8, 1 + 3 * 2.0**-8
    y = np.empty((1000, 1), np.float32)
    backend.linear(x, backend.pack_linear([np.full((1, 1), 0x3F80, np.uint16)]), y)
    assert np.array_equal(y, bf16(x))
    assert y[:2, 0].tolist() == [1, 1 + 2.0**-6]


def test_tiles_come_first():
    assert load_backend("cpu").numerics == load_backend("cpu", isa="amx").numerics
