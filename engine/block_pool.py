"""Which KV blocks are free, cached or owned, and which block holds which prefix.

Every block is in exactly one state:

* *free*: nobody holds it and its content means nothing;
* *cached*: nobody holds it, but it is in the prefix index and may be found again;
* *owned*: its reference count is above 0 (it may be in the prefix index as well).

:meth:`BlockPool.allocate` takes free blocks first and then evicts cached ones, least
recently released first. All operations are O(1) per block. The pool knows nothing of
requests or tokens; :mod:`.cache` does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from ..proto.errors import InternalError


class BlockPool:
    """Reference counts, eviction order and prefix index of ``num_blocks`` KV blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        # Descending, so that pop() hands out low ids first; the order carries no meaning.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # eviction order, oldest first

    @property
    def available(self) -> int:
        """Blocks that :meth:`allocate` can hand out: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks nobody owns whose content may be found by hash."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks owned by requests; the prefix cache does not count."""
        return self.num_blocks - self.available

    def is_owned(self, block: int) -> bool:
        """Whether somebody holds ``block``."""
        return self._refs[block] > 0

    def lookup(self, block_hash: bytes) -> int | None:
        """Block whose content has ``block_hash``, owned or cached."""
        return self._index.get(block_hash)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks with a reference count of 1 each, or None and change nothing."""
        if count > self.available:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def pin(self, block: int) -> None:
        """Hold a block found by :meth:`lookup` once more."""
        if self._refs[block] == 0:
            if block not in self._cached:
                raise InternalError(f"block {block} is free and cannot be pinned")
            del self._cached[block]
        self._refs[block] += 1

    def unpin(self, block: int) -> None:
        """Let go of one reference; the last one makes the block cached or free."""
        refs = self._refs[block] - 1
        if refs < 0:
            raise InternalError(f"block {block} was released more often than taken")
        self._refs[block] = refs
        if refs:
            return
        if self._hashes[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def index(self, block: int, block_hash: bytes) -> bool:
        """Enter an owned block into the prefix index; False when the hash has a block already.

        The duplicate stays un-indexed instead of being swapped for the existing block: block
        tables only ever grow, so a step that runs may keep reading the table it was given.
        """
        if self._refs[block] == 0:
            raise InternalError(f"block {block} has no owner and cannot be indexed")
        if self._hashes[block] is not None:
            return self._hashes[block] == block_hash
        if block_hash in self._index:
            return False
        self._index[block_hash] = block
        self._hashes[block] = block_hash
        return True

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        if block_hash is None or self._index.pop(block_hash, None) != block:
            raise InternalError(f"cached block {block} is not in the prefix index")
        self._hashes[block] = None
        return block

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Raise InternalError unless every block's references equal ``holders`` and states fit.

        ``holders``: how often each block is held by live allocations; absent means 0.
        """
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free) or free & cached:
            raise InternalError("a block is listed as available twice")
        for block, refs in enumerate(self._refs):
            if refs != holders.get(block, 0):
                raise InternalError(f"block {block}: {refs} references, not held so often")
            states = (block in free) + (block in cached) + (refs > 0)
            if states != 1:
                raise InternalError(f"block {block} is in {states} states")
            self._check_hash(block, is_free=block in free, is_cached=block in cached)
        if len(self._index) != sum(h is not None for h in self._hashes):
            raise InternalError("the prefix index names a block that does not know its hash")

    def _check_hash(self, block: int, *, is_free: bool, is_cached: bool) -> None:
        block_hash = self._hashes[block]
        if block_hash is None:
            if is_cached:
                raise InternalError(f"cached block {block} has no hash")
        elif is_free:
            raise InternalError(f"free block {block} has a hash")
        elif self._index.get(block_hash) != block:
            raise InternalError(f"block {block} is not where the prefix index says")
