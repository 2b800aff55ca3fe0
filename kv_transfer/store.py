"""What a handoff needs of a worker's block cache; handed in, so no engine is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt


class Allocation(Protocol):
    """Blocks held for one request; the first ``cached_blocks`` of them already hold valid KV."""

    block_table: npt.NDArray[np.int32]
    """int32 ``[n]``: pool block of each logical block."""
    cached_blocks: int


A = TypeVar("A", bound=Allocation)


class BlockStore(Protocol[A]):
    """All-or-nothing reservations in one worker's pool."""

    def reserve(self, hashes: Sequence[bytes], num_tokens: int, growth: int) -> A | None:
        """Pin the cached prefix and take blocks for the rest, or None when there are too few."""
        ...

    def free(self, allocation: A) -> None:
        """Give the blocks back; exactly once per allocation."""
        ...
