"""Memory as vector kernels like it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .backend import U8

CACHE_LINE = 64
Allocate = Callable[[int], U8]
"""Zeroed memory of so many bytes, aligned to cache lines."""


def aligned_zeros(nbytes: int) -> U8:
    """Zeroed bytes that start on a cache line: a vector then never straddles two."""
    memory = np.zeros(nbytes + CACHE_LINE, np.uint8)
    skip = -memory.ctypes.data % CACHE_LINE
    return memory[skip : skip + nbytes]
