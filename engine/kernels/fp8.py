"""8-bit floats (e4m3): four bits of exponent, three of mantissa, one NaN per sign, no infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

NAN_FP8 = 0x7F


def _value(code: int) -> float:
    exponent, steps = code >> 3 & 15, code & 7
    if code & 0x7F == NAN_FP8:
        return float("nan")
    size = (steps + 8 if exponent else steps) * 2.0 ** (max(exponent, 1) - 10)
    return -size if code & 0x80 else size


FP8_VALUES: npt.NDArray[Any] = np.array([_value(code) for code in range(256)], np.float32)
"""The number of each code."""
