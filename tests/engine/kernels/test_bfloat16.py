"""float32 values as bfloat16 bits: exact integers say what the nearest one is."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from baton.engine.kernels.bfloat16 import bfloat16_bits

INFINITY, NAN = 0x7F80, 0x7FFF


def nearest(word: int) -> int:
    """Return the bfloat16 bits of a float32 word by the distances of both neighbours."""
    sign, size = word >> 16 & 0x8000, word & 0x7FFFFFFF
    if size > INFINITY << 16:
        return NAN
    low = size >> 16
    below, above = Fraction(size - (low << 16)), Fraction((low + 1 << 16) - size)
    return sign | (low + 1 if above < below or (above == below and low % 2) else low)


def test_every_kind_of_value_is_rounded_to_the_nearest(rng):
    """Values near each end of a binade, ties, infinities and NaN, all in one array."""
    high = rng.integers(0, 1 << 16, 10_000, np.uint32) << np.uint32(16)
    low = rng.choice(np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), len(high))
    edges = [0, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF]
    words = np.concatenate([high | low, np.array(edges, np.uint32)])
    found = bfloat16_bits(words.view(np.float32))
    assert found.tolist() == [nearest(word) for word in words.tolist()]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (65_536,), (65_537,), (3, 30_000)])
def test_arrays_of_any_shape_and_order(shape, rng):
    values = np.asarray(rng.standard_normal(shape), np.float32)
    wanted = [nearest(word) for word in values.reshape(-1).view(np.uint32).tolist()]
    assert bfloat16_bits(values).tolist() == np.array(wanted, int).reshape(shape).tolist()
    turned = np.array([wanted], int).reshape(shape).T.tolist()
    assert bfloat16_bits(values.T).tolist() == turned
