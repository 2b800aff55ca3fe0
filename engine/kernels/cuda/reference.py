"""bfloat16 on the host and the NumPy definition of the elementwise kernels.

A definition computes in float64 and rounds where its kernel writes: the kernel, with float32
inside, may differ by one step of bfloat16 where the exact value lies near the middle of two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint16]


def to_bf16(values: npt.ArrayLike) -> Bits:
    """Round float32 values to bfloat16 bits, to nearest even; a NaN stays one."""
    floats = np.asarray(values, np.float32)
    bits = np.ascontiguousarray(floats).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    return np.where(np.isnan(floats), np.uint16(0x7FFF), rounded)


def from_bf16(bits: npt.NDArray[Any]) -> F64:
    """Widen bfloat16 bits, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def silu_mul(gate_up: Bits) -> Bits:
    """``silu(gate) * up`` for ``gate_up[T, 2 F]``."""
    gate, up = np.split(from_bf16(gate_up), 2, axis=1)
    return to_bf16(gate / (1 + np.exp(-gate)) * up)
