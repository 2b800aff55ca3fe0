"""Launchers of ``elementwise.cu``: kernels that walk rows of bfloat16 bits (uint16).

Each writes into arrays the caller owns and allocates nothing. Wrong types, shapes or orders raise
ValueError before the launch. Empty inputs launch nothing.
"""

from __future__ import annotations

import numpy as np

from .checks import BF16, check_array, check_multiple
from .device import Device, DeviceArray, Kernel

_SOURCE = "elementwise.cu"
_SILU_MUL = Kernel(_SOURCE, "silu_mul")
_THREADS = 256
_MAX_BLOCKS = 4096
"""Several waves on any GPU; what is more is walked in strides of the grid."""
_VECTOR = 8
"""bf16 values in one load of 16 bytes."""


def silu_mul(device: Device, gate_up: DeviceArray, out: DeviceArray) -> None:
    """``out[T, F] = silu(gate_up[:, :F]) * gate_up[:, F:]``; all bf16, ``F`` a multiple of 8."""
    check_array("out", out, BF16, (None, None))
    rows, width = out.shape
    check_array("gate_up", gate_up, BF16, (rows, 2 * width))
    check_multiple("the width of out", width, _VECTOR)
    words = width // _VECTOR
    total = rows * words
    if total:
        grid = (min(-(-total // _THREADS), _MAX_BLOCKS),)
        args = (gate_up, out, np.int32(words), np.int64(total))
        device.launch(_SILU_MUL, grid, (_THREADS,), args)
