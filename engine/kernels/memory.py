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


class Arena:
    """Zeroed memory that lies side by side in the order it was asked for.

    For weights, which every step reads in that order: what is fetched beyond the end of one is
    the start of the next, and stretches of this size get large pages where the system has them
    (NumPy asks for them), so that fewer addresses are translated. Untouched memory costs nothing;
    a stretch is freed with the last array in it.
    """

    STRETCH = 64 << 20

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def zeros(self, nbytes: int) -> U8:
        """Zeroed bytes that start on a cache line."""
        size = -(-nbytes // CACHE_LINE) * CACHE_LINE
        if len(self._left) < size:
            self._left = aligned_zeros(max(size, self.STRETCH))
        taken, self._left = self._left[:nbytes], self._left[size:]
        return taken


def host_pool(shape: tuple[int, ...], allocate: Allocate = aligned_zeros) -> F32:
    """KV pool, float32 ``[L, NB, 2, Hk, BS, D]`` of zeros, aligned to cache lines.

    Zeros cost nothing until touched, and a block sent before it is full leaks no old memory.
    """
    return allocate(4 * math.prod(shape)).view(np.float32).reshape(shape)
