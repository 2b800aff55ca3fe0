"""The paged KV cache: block tables for requests, shared prefixes, all-or-nothing room.

Invariant: free + cached + owned = total, and a block's reference count is the number of
live :class:`Allocation` objects that hold it. A block held by two allocations is in the
prefix index and full, so nobody writes to it any more: each block has one writer at most.

The cache moves no KV data and knows no requests: whoever holds an Allocation (a grant, then
the sequence it becomes) owns its blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ..proto.errors import InternalError
from .block_pool import BlockPool
from .plan import Int32

_EMPTY = np.empty(0, np.int32)


class Allocation:
    """Blocks of one request, in logical order; used up by :meth:`PagedCache.free`.

    ``block_table``: int32 ``[n]``; never written to, growth replaces it by a longer copy, so
    anyone may keep one as a snapshot. ``capacity``: tokens it has room for.
    ``cached_blocks``: leading blocks found in the prefix cache. ``published``: leading blocks
    already offered to the prefix index. ``live``: False once freed.
    """

    __slots__ = ("block_table", "cached_blocks", "capacity", "live", "published")

    def __init__(self, block_table: Int32, cached_blocks: int, capacity: int) -> None:
        self.block_table = block_table
        self.cached_blocks = cached_blocks
        self.capacity = capacity
        self.published = cached_blocks
        self.live = True

    @property
    def blocks(self) -> list[int]:
        """Block ids as a list."""
        ids: list[int] = self.block_table.tolist()
        return ids


class PagedCache:
    """Hands out blocks of ``block_size`` tokens from a pool of ``num_blocks``."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def fits(self, tokens: int) -> bool:
        """Whether ``tokens`` tokens have room when nobody else is there."""
        return self.blocks_for(tokens) <= self.num_blocks

    def match(self, hashes: Sequence[bytes], max_blocks: int) -> list[int]:
        """Blocks of the longest cached prefix of ``hashes``, at most ``max_blocks``; unpinned."""
        matched: list[int] = []
        for block_hash in hashes[:max_blocks]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            matched.append(block)
        return matched

    def reserve(
        self, hashes: Sequence[bytes], num_tokens: int, growth: int = 0
    ) -> Allocation | None:
        """Room for ``num_tokens + growth`` tokens, or None when it is not there; all or nothing.

        ``hashes``: chained hashes of the full blocks of the tokens; the cached prefix is pinned
        and need not be computed. At least one token is left to compute, since its logits are
        what the caller is after.
        """
        matched = self.match(hashes, (num_tokens - 1) // self.block_size)
        count = self.blocks_for(num_tokens + growth)
        # Matched blocks that nobody holds are about to leave the available ones.
        idle = sum(not self.pool.is_owned(block) for block in matched)
        if count - len(matched) + idle > self.pool.available:
            return None
        for block in matched:
            self.pool.pin(block)
        fresh = self._take(count - len(matched))
        table = np.array(matched + fresh, np.int32)
        return Allocation(table, len(matched), count * self.block_size)

    def _take(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        if blocks is None:
            raise InternalError(f"{count} blocks were counted as available and are not")
        return blocks

    def grow(self, allocation: Allocation, num_tokens: int) -> bool:
        """Append blocks until ``num_tokens`` tokens fit; False, changing nothing, without room."""
        if not allocation.live:
            raise InternalError("a freed allocation cannot grow")
        if num_tokens <= allocation.capacity:
            return True
        fresh = self.pool.allocate(self.blocks_for(num_tokens) - len(allocation.block_table))
        if fresh is None:
            return False
        tail = np.array(fresh, np.int32)
        allocation.block_table = np.concatenate((allocation.block_table, tail))
        allocation.capacity = len(allocation.block_table) * self.block_size
        return True

    def publish(self, allocation: Allocation, hashes: Sequence[bytes], upto_tokens: int) -> None:
        """Enter the full blocks below ``upto_tokens`` into the prefix index.

        The KV of those tokens must be valid. Blocks published before are not looked at again;
        a block whose hash is indexed already stays an un-indexed duplicate.
        """
        if not allocation.live:
            raise InternalError("a freed allocation cannot be published")
        full = min(upto_tokens // self.block_size, len(hashes))
        table = allocation.block_table
        for logical in range(allocation.published, full):
            self.pool.index(int(table[logical]), hashes[logical])
        allocation.published = max(allocation.published, full)

    def free(self, allocation: Allocation) -> None:
        """Give all blocks back, tail first so that prefixes are evicted last.

        Raises InternalError for an allocation that was freed before.
        """
        if not allocation.live:
            raise InternalError("an allocation was freed twice")
        allocation.live = False
        for block in reversed(allocation.blocks):
            self.pool.unpin(block)
        allocation.block_table = _EMPTY
        allocation.capacity = 0

    def hold(self, allocation: Allocation) -> Allocation:
        """The same blocks once more, for who reads them when their owner has freed them."""
        if not allocation.live:
            raise InternalError("a freed allocation cannot be held")
        for block in allocation.blocks:
            self.pool.pin(block)
        held = Allocation(allocation.block_table, allocation.cached_blocks, allocation.capacity)
        held.published = len(allocation.block_table)
        return held

    def check_integrity(
        self, live_allocations: Iterable[Allocation], held: Iterable[Allocation] = ()
    ) -> None:
        """Raise InternalError unless the books fit the allocations and no block has two writers.

        ``live_allocations``: every allocation not freed yet, whoever holds it; ``held``: those of
        :meth:`hold`, which only keep blocks from being given to others.
        """
        holders: Counter[int] = Counter()
        writable: list[int] = []
        for allocation in live_allocations:
            if not allocation.live:
                raise InternalError("a freed allocation is still held")
            holders.update(allocation.blocks)
            writable += allocation.blocks[allocation.published :]
        for block in writable:
            if holders[block] > 1:
                raise InternalError(f"block {block} is written by one holder and held by another")
        for allocation in held:
            holders.update(allocation.blocks)
        self.pool.check_integrity(holders)
