"""float32 to bfloat16 bits on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_AT_ONCE = 1 << 20


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The nearest bfloat16 of each value, ties to even, as bits; NaN stays NaN."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    bits = np.empty(len(flat), np.uint16)
    for start in range(0, len(flat), _AT_ONCE):  # bounds the temporaries
        part = flat[start : start + _AT_ONCE]
        nan = (part & 0x7FFFFFFF) > 0x7F800000
        rounded = (part + (0x7FFF + ((part >> 16) & 1))) >> 16
        bits[start : start + _AT_ONCE] = np.where(nan, (part >> 16) | 0x40, rounded)
    return bits.reshape(values.shape)
