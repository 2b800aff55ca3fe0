"""The block cache as a handoff uses it; passed in, so that the engine is not imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt


class Allocation(Protocol):
    """Blocks held for one request. The first ``cached_blocks`` already hold valid KV."""

    block_table: npt.NDArray[np.int32]
    """int32 ``[n]``: pool block of each logical block."""
    cached_blocks: int


A = TypeVar("A", bound=Allocation)


class BlockStore(Protocol[A]):
    """All-or-nothing reservations in one worker's pool."""

    def reserve(
        self, hashes: Sequence[bytes], num_tokens: int, growth: int, key: bytes
    ) -> A | None:
        """Pin the cached prefix and allocate the other blocks. None if too few are free.

        ``key``: of the sender, whose blocks are cached separately.
        """
        ...

    def free(self, allocation: A) -> None:
        """Release the blocks; call it exactly once per allocation."""
        ...
