"""8-bit floats (e4m3): four bits of exponent, three of mantissa, one NaN per sign, no infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

DTYPE = "F8_E4M3"
"""Name of the type in safetensors files."""
NAN_FP8 = 0x7F


def _value(code: int) -> float:
    exponent, steps = code >> 3 & 15, code & 7
    if code & 0x7F == NAN_FP8:
        return float("nan")
    size = (steps + 8 if exponent else steps) * 2.0 ** (max(exponent, 1) - 10)
    return -size if code & 0x80 else size


FP8_VALUES: npt.NDArray[Any] = np.array([_value(code) for code in range(256)], np.float32)
"""The number of each code."""


def dequantized(codes: npt.NDArray[np.uint8], scales: F32, width: int) -> F32:
    """Return codes ``[rows, columns]`` times scales ``[rows, groups]`` of ``width`` columns."""
    values: F32 = FP8_VALUES[codes]
    for group in range(scales.shape[1]):
        values[:, group * width : (group + 1) * width] *= scales[:, group, None]
    return values
