"""The KV blocks of a pool: free, cached or owned, and the prefix stored in each block.

Every block is in exactly one state:

* *free*: no request holds the block, and its content is meaningless;
* *cached*: no request holds the block, but the prefix index can still find it;
* *owned*: its reference count is above 0 (the prefix index may contain it as well).

:meth:`BlockPool.allocate` takes free blocks first and then evicts cached ones, least
recently released first. All operations are O(1) per block. The pool does not depend on
requests or tokens; :mod:`.paged_cache` does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from baton.proto.errors import InternalError


class BlockPool:
    """Reference counts, eviction order and prefix index of ``num_blocks`` KV blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_removed: Callable[[bytes], object] | None = None
        """Called with the hash of each block that leaves the prefix index."""
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        # Descending, so that pop() returns low ids first; nothing depends on this order.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # eviction order, oldest first

    @property
    def available(self) -> int:
        """Number of blocks that :meth:`allocate` can return: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Number of blocks without an owner that can be found by hash."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Number of blocks owned by requests; the prefix cache does not count."""
        return self.num_blocks - self.available

    def is_owned(self, block: int) -> bool:
        """True if ``block`` has a reference."""
        return self._refs[block] > 0

    @property
    def indexed(self) -> set[bytes]:
        """Hashes of all blocks that can be found."""
        return set(self._index)

    def lookup(self, block_hash: bytes) -> int | None:
        """Return the block whose content has ``block_hash``, owned or cached, or None."""
        return self._index.get(block_hash)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks with one reference each, or return None if they are short."""
        if count > self.available:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def pin(self, block: int) -> None:
        """Add a reference to a block found by :meth:`lookup`."""
        if self._refs[block] == 0:
            if block not in self._cached:
                raise InternalError(f"block {block} is free and cannot be pinned")
            del self._cached[block]
        self._refs[block] += 1

    def unpin(self, block: int) -> None:
        """Drop one reference. The last one makes the block cached or free."""
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
        """Add an owned block to the prefix index. Return False if another block has the hash.

        The duplicate stays out of the index instead of being replaced by the existing block. So
        block tables are append-only, and a running step may keep reading its table.
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
        if self.on_removed is not None:
            self.on_removed(block_hash)
        return block

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Raise InternalError unless references equal ``holders`` and every state is consistent.

        ``holders``: number of live allocations that hold each block; missing means 0.
        """
        count = len(self._refs)
        refs = [0] * count
        for block, held in holders.items():
            refs[block] = held
        if refs != self._refs:
            block = next(i for i in range(count) if refs[i] != self._refs[i])
            text = f"{self._refs[block]} references do not match its {refs[block]} holders"
            raise InternalError(f"block {block}: {text}")
        free, cached, used = set(self._free), set(self._cached), set(holders)
        if len(self._free) + len(cached) + len(used) != count or len(free | cached | used) != count:
            raise InternalError("a block is in no state, in two, or available twice")
        hashed = set(self._index.values())
        if not cached <= hashed:
            raise InternalError("a cached block has no hash")
        if not free.isdisjoint(hashed):
            raise InternalError("a free block has a hash")
        if len(self._index) != count - self._hashes.count(None):
            raise InternalError("the prefix index does not list all blocks with a hash")
        for block_hash, block in self._index.items():
            if self._hashes[block] != block_hash:
                raise InternalError(f"the prefix index does not list block {block} by its hash")
