"""Moves of KV blocks on a device: what the engine offers and the handoff uses.

A move copies blocks of a pool ``[layers, blocks, ...]`` while the caller goes on. Neither folder
imports the other, so the interface is here.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
Pool = npt.NDArray[np.float32]


class BlockMove(Protocol):
    """A copy of blocks that runs on a device."""

    def wait(self) -> None:
        """Block until the move is done. May be called from any thread."""
        ...

    @property
    def digest(self) -> int:
        """XXH3-64 of the moved bytes; valid after the move is done."""
        ...

    @property
    def payload(self) -> U8:
        """The gathered bytes; valid after the move is done and until :meth:`release`."""
        ...

    def release(self) -> None:
        """Return the buffers of a finished move."""
        ...


class BlockStream(Protocol):
    """Starts moves of a pool's blocks, in order.

    Each method returns None while all buffers are taken, and raises ValueError for blocks or
    sizes outside the pool.
    """

    def gather(self, start: int, count: int, ids: I32) -> BlockMove | None:
        """Pack blocks ``ids`` of layers ``start..`` into pinned memory."""
        ...

    def scatter(self, start: int, count: int, ids: I32, payload: U8) -> BlockMove | None:
        """Unpack a payload. The caller may change ``payload`` after this returns."""
        ...

    def copy(
        self, source: Pool, start: int, count: int, source_ids: I32, ids: I32
    ) -> BlockMove | None:
        """Copy blocks from another process's pool."""
        ...

    def sum(self, start: int, count: int, ids: I32) -> BlockMove | None:
        """Compute the digest of blocks without copying them."""
        ...
