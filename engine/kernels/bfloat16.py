"""Rounds float32 to bfloat16 bits on the host, as the kernels do."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

_AT_ONCE = 1 << 16
"""Values at a time: their temporary array stays in a core's cache."""
_NAN = 0x7FFF
_HIGH = 1 if sys.byteorder == "little" else 0


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the nearest bfloat16 bits, ties to even; NaN is 0x7FFF, as on a GPU."""
    bits = np.empty(values.shape, np.uint16)
    round_into(bits.reshape(-1), np.ascontiguousarray(values, np.float32).reshape(-1))
    return bits


def round_into(bits: npt.NDArray[np.uint16], values: npt.NDArray[np.float32]) -> None:
    """Write :func:`bfloat16_bits` of ``values`` into ``bits``; both 1-D and C-contiguous.

    Python's lock is free most of the time, so that several threads can round.
    """
    held = np.empty(_AT_ONCE, np.uint32)
    for start in range(0, len(values), _AT_ONCE):
        part = values[start : start + _AT_ONCE]
        words, rounded = part.view(np.uint32), held[: len(part)]
        np.right_shift(words, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, 0x7FFF, out=rounded)
        np.add(rounded, words, out=rounded)
        found = bits[start : start + _AT_ONCE]
        np.copyto(found, rounded.view(np.uint16)[_HIGH::2])
        nan = np.isnan(part)
        if nan.any():
            found[nan] = _NAN
