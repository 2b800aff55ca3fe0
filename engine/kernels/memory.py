"""Memory as vector kernels like it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .backend import F32, U8

CACHE_LINE = 64
Allocate = Callable[[int], U8]
"""Zeroed memory of so many bytes, aligned to cache lines."""


def aligned_zeros(nbytes: int) -> U8:
    """Zeroed bytes that start on a cache line: a vector then never straddles two."""
    memory = np.zeros(nbytes + CACHE_LINE, np.uint8)
    skip = -memory.ctypes.data % CACHE_LINE
    return memory[skip : skip + nbytes]


def host_pool(shape: tuple[int, ...], allocate: Allocate = aligned_zeros) -> F32:
    """KV pool, float32 ``[L, NB, 2, Hk, BS, D]`` of zeros, aligned to cache lines.

    Zeros cost nothing until touched, and a block sent before it is full leaks no old memory.
    """
    return allocate(4 * math.prod(shape)).view(np.float32).reshape(shape)
