"""The order of additions in products with bfloat16 weights, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.engine.kernels.load import load_backend
from baton.engine.kernels.reference import widen

from .conftest import ISAS

TERMS = 32


@pytest.fixture(params=["amx", "avx512bf16"])
def isa(request):
    if request.param not in ISAS:
        pytest.skip(f"no {request.param} kernels here")
    return request.param


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


def flushed(x):
    """Numbers with subnormal ones as zero."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


def pair_by_pair(x, weights, bias):
    """The same as isa_avx512bf16.c promises it: VDPBF16PS adds the odd term, then the even one.

    A product of two bfloat16 and its sum with a float32 are exact in float64, but for sums of very
    unequal size, whose last bits round the same way.
    """
    pad = ((0, 0), (0, -x.shape[1] % 2))
    x, weights = bf16(np.pad(x, pad)), np.pad(weights, pad)
    x, weights = flushed(x).astype(np.float64), flushed(weights).astype(np.float64)
    y = np.repeat(bias[None], len(x), axis=0)
    for k in range(0, x.shape[1], 2):
        for term in (k + 1, k):
            y = flushed((y + x[:, None, term] * weights[None, :, term]).astype(np.float32))
    return y


ORDERS = {"amx": in_order, "avx512bf16": pair_by_pair}


@pytest.mark.parametrize("rows", [1, 5, 16, 19, 40])
@pytest.mark.parametrize(
    ("width", "out"), [(1, 1), (31, 70), (32, 64), (100, 33), (257, 16), (3001, 50)]
)
def test_bits_are_those_of_the_order_promised(rng, poisoned, isa, rows, width, out):
    weights = (rng.standard_normal((out, width), dtype=np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    x = rng.standard_normal((rows, width), dtype=np.float32) * np.float32(1e-3)
    bias = rng.standard_normal(out, dtype=np.float32)
    backend, y = load_backend("cpu", isa=isa), poisoned(rows, out)
    backend.linear(x, backend.pack_linear([weights], bias), y)
    assert np.array_equal(y, ORDERS[isa](x, widen(weights), bias))


def test_more_rows_than_are_rounded_at_once_have_the_same_bits(rng, isa):
    weights = (rng.standard_normal((40, 6000), dtype=np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    backend, x = load_backend("cpu", isa=isa), rng.standard_normal((777, 6000), dtype=np.float32)
    packed = backend.pack_linear([weights])
    whole, alone = np.empty((777, 40), np.float32), np.empty((1, 40), np.float32)
    backend.linear(x, packed, whole)
    for row in (0, 1, 349, 350, 776):
        backend.linear(x[row : row + 1], packed, alone)
        assert np.array_equal(alone[0], whole[row])


def test_x_is_rounded_to_the_nearest_bfloat16(rng, isa):
    """Truncation would double the error; ties round to even."""
    backend, x = load_backend("cpu", isa=isa), rng.standard_normal((1000, 1), dtype=np.float32)
    x[:2, 0] = 1 + 2.0**-8, 1 + 3 * 2.0**-8
    y = np.empty((1000, 1), np.float32)
    backend.linear(x, backend.pack_linear([np.full((1, 1), 0x3F80, np.uint16)]), y)
    assert np.array_equal(y, bf16(x))
    assert y[:2, 0].tolist() == [1, 1 + 2.0**-6]


@pytest.mark.skipif("avx512bf16" not in ISAS, reason="no kernels for pairs of bfloat16 here")
def test_the_fastest_instructions_come_first():
    """Pairs of bfloat16 take half the time of float32 on AMD's processors, twice on Intel's."""
    fast = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    best = next(
        name for name in ("amx", *(["avx512bf16"] if fast else []), "avx512") if name in ISAS
    )
    assert load_backend("cpu").numerics == load_backend("cpu", isa=best).numerics
