"""Rounds float32 to bfloat16 bits on the host, as the kernels do."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_AT_ONCE = 1 << 20
_NAN = 0x7FFF


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the nearest bfloat16 bits, ties to even; NaN is 0x7FFF, as on a GPU."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    bits = np.empty(len(flat), np.uint16)
    for start in range(0, len(flat), _AT_ONCE):  # limits the temporary arrays
        part = flat[start : start + _AT_ONCE]
        nan = (part & 0x7FFFFFFF) > 0x7F800000
        rounded = (part + (0x7FFF + ((part >> 16) & 1))) >> 16
        bits[start : start + _AT_ONCE] = np.where(nan, _NAN, rounded)
    return bits.reshape(values.shape)
