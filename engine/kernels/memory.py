"""Memory as vector kernels like it."""

from __future__ import annotations

import numpy as np

from .backend import U8

CACHE_LINE = 64


def aligned_zeros(nbytes: int) -> U8:
    """Zeroed bytes that start on a cache line: a vector then never straddles two."""
    memory = np.zeros(nbytes + CACHE_LINE, np.uint8)
    skip = -memory.ctypes.data % CACHE_LINE
    return memory[skip : skip + nbytes]
