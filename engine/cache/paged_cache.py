"""The paged KV cache: block tables for requests, shared prefixes, all-or-nothing reservations.

Invariant: free + cached + owned = total, and a block's reference count is the number of
live :class:`Allocation` objects that hold it. A block held by two allocations is full and in the
prefix index, so it is never written again: each block has at most one writer.

The cache moves no KV data and does not depend on requests. The owner of an Allocation (a grant,
later the sequence) owns its blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from baton.proto.errors import InternalError

from .block_pool import BlockPool
from .kv_events import KvEventLog

Int32 = npt.NDArray[np.int32]
_EMPTY = np.empty(0, np.int32)


class Allocation:
    """Blocks of one request, in logical order; ended by :meth:`PagedCache.free`.

    ``block_table``: int32 ``[n]``. The array is never modified; growth replaces it by a longer
    copy, so it can be kept as a snapshot. ``capacity``: tokens that fit into the blocks.
    ``cached_blocks``: leading blocks found in the prefix cache. ``published``: leading blocks
    already added to the prefix index. ``live``: False after the allocation was freed. ``source``:
    key of the sender of its KV; empty for KV that this worker computed.
    """

    __slots__ = ("block_table", "cached_blocks", "capacity", "live", "published", "source")

    def __init__(
        self, block_table: Int32, cached_blocks: int, capacity: int, source: bytes = b""
    ) -> None:
        self.block_table = block_table
        self.cached_blocks = cached_blocks
        self.capacity = capacity
        self.published = cached_blocks
        self.live = True
        self.source = source

    @property
    def blocks(self) -> list[int]:
        """Block ids as a list."""
        ids: list[int] = self.block_table.tolist()
        return ids


class PagedCache:
    """Allocates blocks of ``block_size`` tokens from a pool of ``num_blocks`` blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._log: KvEventLog | None = None

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks for ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def fits(self, tokens: int) -> bool:
        """True if ``tokens`` tokens fit into the empty pool."""
        return self.blocks_for(tokens) <= self.num_blocks

    def match(self, hashes: Sequence[bytes], max_blocks: int, source: bytes = b"") -> list[int]:
        """Return the blocks of the longest cached prefix, at most ``max_blocks``, unpinned.

        Blocks with KV of another ``source`` do not count.
        """
        matched: list[int] = []
        for block_hash in hashes[:max_blocks]:
            block = self.pool.lookup(source + block_hash)
            if block is None:
                break
            matched.append(block)
        return matched

    def reserve(
        self, hashes: Sequence[bytes], num_tokens: int, growth: int = 0, source: bytes = b""
    ) -> Allocation | None:
        """Reserve blocks for ``num_tokens + growth`` tokens; None and no change if they are short.

        ``hashes``: chained hashes of the tokens' full blocks. The cached prefix is pinned
        and need not be computed. At least one token is left to compute, because the caller needs
        its logits. ``source``: key of the sender of the other blocks, as in :class:`Allocation`.
        """
        matched = self.match(hashes, (num_tokens - 1) // self.block_size, source)
        count = self.blocks_for(num_tokens + growth)
        # Matched blocks without an owner count as available until they are pinned below.
        idle = sum(not self.pool.is_owned(block) for block in matched)
        if count - len(matched) + idle > self.pool.available:
            return None
        for block in matched:
            self.pool.pin(block)
        fresh = self._take(count - len(matched))
        table = np.array(matched + fresh, np.int32)
        return Allocation(table, len(matched), count * self.block_size, source)

    def _take(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        if blocks is None:
            raise InternalError(f"{count} blocks were counted as available but are not")
        return blocks

    def grow(self, allocation: Allocation, num_tokens: int) -> bool:
        """Append blocks until ``num_tokens`` tokens fit; False and no change if they are short."""
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

    def record(self, log: KvEventLog) -> None:
        """Note in ``log`` from now on what can be found and what is evicted."""
        self._log = log
        self.pool.on_removed = log.removed

    def publish(
        self,
        allocation: Allocation,
        hashes: Sequence[bytes],
        upto_tokens: int,
        tokens: Callable[[int, int], Int32] | None = None,
    ) -> None:
        """Add the full blocks below ``upto_tokens`` to the prefix index.

        The KV of those tokens must be valid. Blocks published earlier are skipped. If the index
        already contains a hash, the block stays a duplicate outside the index. ``tokens``: returns
        the tokens between two positions, for :meth:`record`.
        """
        if not allocation.live:
            raise InternalError("a freed allocation cannot be published")
        full = min(upto_tokens // self.block_size, len(hashes))
        table, source = allocation.block_table, allocation.source
        new: list[int] = []
        for logical in range(allocation.published, full):
            key = source + hashes[logical]
            known = self._log is not None and self.pool.lookup(key) is not None
            if self.pool.index(int(table[logical]), key) and not known:
                new.append(logical)
        allocation.published = max(allocation.published, full)
        if self._log is not None and tokens is not None:
            _note(self._log, new, source, hashes, tokens, self.block_size)

    def free(self, allocation: Allocation) -> None:
        """Release all blocks, the last block first, so that prefixes are evicted last.

        Raises InternalError if the allocation was freed before.
        """
        if not allocation.live:
            raise InternalError("an allocation was freed twice")
        allocation.live = False
        for block in reversed(allocation.blocks):
            self.pool.unpin(block)
        allocation.block_table = _EMPTY
        allocation.capacity = 0

    def hold(self, allocation: Allocation) -> Allocation:
        """Return a second allocation of the same blocks, for readers that outlive the owner."""
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
        """Raise InternalError if references and allocations differ or a block has two writers.

        ``live_allocations``: all allocations that are not freed. ``held``: allocations made by
        :meth:`hold`, which only prevent reuse of their blocks.
        """
        holders: Counter[int] = Counter()
        writable: list[int] = []
        for allocation in live_allocations:
            if not allocation.live:
                raise InternalError("a freed allocation is still held")
            blocks = allocation.blocks
            holders.update(blocks)
            writable += blocks[allocation.published :]
        for block in writable:
            if holders[block] > 1:
                raise InternalError(f"block {block} is writable but has several holders")
        for allocation in held:
            holders.update(allocation.blocks)
        self.pool.check_integrity(holders)


def _note(
    log: KvEventLog, new: list[int], source: bytes, hashes: Sequence[bytes],
    tokens: Callable[[int, int], Int32], size: int,
) -> None:  # fmt: skip
    """Note new blocks, given by their places in the request: each run of neighbours at once."""
    while new:
        count = 1
        while count < len(new) and new[count] == new[0] + count:
            count += 1
        first, end = new[0], new[0] + count
        parent = source + hashes[first - 1] if first else None
        keys = [source + block_hash for block_hash in hashes[first:end]]
        log.stored(keys, parent, tokens(first * size, end * size).tolist())
        new = new[count:]
