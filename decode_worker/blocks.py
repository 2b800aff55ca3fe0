"""What the handoff's receiver sees of a decode worker's block cache."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.cache import Allocation, PagedCache
from ..engine.scheduler import Scheduler


class GrantStore:
    """The receiver's view of the paged cache.

    All tokens of a handoff arrive computed, the prompt's last block included, so one more
    token than they are is asked for: the one whose KV this worker computes first.
    """

    def __init__(self, cache: PagedCache, scheduler: Scheduler) -> None:
        self._cache = cache
        self._scheduler = scheduler

    def reserve(self, hashes: Sequence[bytes], num_tokens: int, growth: int) -> Allocation | None:
        """Blocks for the tokens and their growth; leaves room for requests that were preempted."""
        wanted = self._cache.blocks_for(num_tokens + growth) + self._scheduler.blocks_wanted
        if self._scheduler.blocks_wanted and wanted > self._cache.pool.available:
            return None
        return self._cache.reserve(hashes, num_tokens + 1, max(0, growth - 1))

    def free(self, allocation: Allocation) -> None:
        """Blocks nobody computed further on; what was cached stays cached."""
        self._cache.free(allocation)
