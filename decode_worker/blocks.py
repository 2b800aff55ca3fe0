"""The block cache of a decode worker, as the receiver of handoffs uses it."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.cache.paged_cache import Allocation, PagedCache
from ..engine.scheduling.scheduler import Scheduler


class GrantStore:
    """The receiver's view of the paged cache.

    A handoff delivers the KV of all its tokens, including the prompt's last block. The cache
    reserves one token more: the token whose KV this worker computes first.
    """

    def __init__(self, cache: PagedCache, scheduler: Scheduler) -> None:
        self._cache = cache
        self._scheduler = scheduler

    def reserve(self, hashes: Sequence[bytes], num_tokens: int, growth: int) -> Allocation | None:
        """Reserve blocks for the tokens and their growth, or return None.

        Preempted requests wait for blocks too and come first: their need is added.
        """
        wanted = self._cache.blocks_for(num_tokens + growth) + self._scheduler.blocks_wanted
        if self._scheduler.blocks_wanted and wanted > self._cache.pool.available:
            return None
        return self._cache.reserve(hashes, num_tokens + 1, max(0, growth - 1))

    def free(self, allocation: Allocation) -> None:
        """Free blocks that this worker has not computed on. Cached blocks stay cached."""
        self._cache.free(allocation)
