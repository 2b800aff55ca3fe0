"""Host memory, aligned for vector kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, cast

import numpy as np

from baton.proto.layout import ELEMENTS, KVLayout

from .backend import F32, U8

CACHE_LINE = 64


class Holder(Protocol):
    """A packed matrix."""

    panels: U8


Allocate = Callable[[int], U8]
"""Allocates zeroed memory of the given size in bytes, aligned to cache lines."""


def aligned_zeros(nbytes: int) -> U8:
    """Return zeroed bytes that start on a cache line, so that no vector straddles two lines."""
    memory = np.zeros(nbytes + CACHE_LINE, np.uint8)
    skip = -memory.ctypes.data % CACHE_LINE
    return memory[skip : skip + nbytes]


class Arena:
    """Zeroed memory that is contiguous in the order of allocation.

    Used for weights, which every step reads in that order. So prefetching beyond the end of one
    array loads the start of the next. Stretches of this size get large pages where the system has
    them (NumPy asks for them), which saves address translations. Untouched memory costs nothing;
    a stretch is freed with its last array.
    """

    STRETCH = 64 << 20
    filled = False
    """Whether the memory holds packed weights already."""

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def zeros(self, nbytes: int) -> U8:
        """Return zeroed bytes that start on a cache line."""
        size = -(-nbytes // CACHE_LINE) * CACHE_LINE
        if len(self._left) < size:
            self._left = aligned_zeros(max(size, self.STRETCH))
        taken, self._left = self._left[:nbytes], self._left[size:]
        return taken

    def keep(self, holder: Holder) -> None:
        """Record who holds the bytes that :meth:`zeros` returned last."""


def host_pool(
    shape: tuple[int, ...], allocate: Allocate = aligned_zeros, dtype: str = "float32"
) -> F32:
    """Allocate a zeroed KV pool ``[L, NB, 2, Hk, BS, E]`` in a type, aligned to cache lines.

    Zeroed pages cost nothing until touched, and a partly filled block that is sent leaks no data.
    """
    element = np.dtype(ELEMENTS[dtype])
    return cast(F32, allocate(element.itemsize * math.prod(shape)).view(element).reshape(shape))


def widened_bytes(layout: KVLayout, length: int) -> int:
    """Return the bytes that a context's keys and values of one layer take as bfloat16 on a GPU.

    Prefill attention reads them there if the pool is int8; 0 for other pools.
    """
    if layout.dtype != "int8":
        return 0
    _, heads, size, _ = layout.block_shape
    return layout.blocks_for(length) * 2 * heads * size * layout.head_dim * 2


def blocks_beside_widened(nbytes: int, layout: KVLayout, length: int) -> int:
    """Return the blocks of a pool that fit beside the widened blocks of the longest context.

    ``length``: of the model; a pool with fewer tokens bounds the context.
    """
    block = layout.num_layers * layout.block_bytes
    all_widened = (nbytes - widened_bytes(layout, length)) // block
    return max(all_widened, nbytes // (block + widened_bytes(layout, layout.block_size)))
