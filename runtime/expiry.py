"""A bounded table whose entries expire; constant cost per entry at any size.

Invariant: an entry is returned before its expiry time and never after it. A full table evicts the
entry that was put first. The index has at most twice as many keys as the table, plus :data:`SLACK`.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

SLACK = 64
"""Stale index entries that are always tolerated."""
K = TypeVar("K")
V = TypeVar("V")


class Expiring(Generic[K, V]):
    """Values by key, each with an expiry time."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._entries: dict[K, tuple[V, float]] = {}
        self._seconds: dict[int, list[K]] = {}  # keys to check for expiry at this second
        self._order: list[int] = []
        self._filed = 0  # keys in all seconds, with stale and duplicate ones

    def put(self, key: K, value: V, until: float) -> None:
        """Set ``key`` to ``value``, to expire at ``until``."""
        self._entries.pop(key, None)
        self._entries[key] = (value, until)
        self._file(key, until)
        if len(self._entries) > self._capacity:
            del self._entries[next(iter(self._entries))]
        if self._filed > 2 * len(self._entries) + SLACK:
            self._refile()

    def get(self, key: K, now: float) -> V | None:
        """Return the value, or None if it is missing or expired."""
        entry = self._entries.get(key)
        return entry[0] if entry is not None and entry[1] > now else None

    def expire(self, now: float) -> None:
        """Remove expired entries."""
        while self._order and self._order[0] <= now:
            keys = self._seconds.pop(heapq.heappop(self._order))
            self._filed -= len(keys)
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    continue
                if entry[1] <= now:
                    del self._entries[key]
                else:
                    self._file(key, entry[1])  # put again meanwhile, with a later expiry

    def _file(self, key: K, until: float) -> None:
        second = math.ceil(min(until, 1e15))
        keys = self._seconds.get(second)
        if keys is None:
            keys = self._seconds[second] = []
            heapq.heappush(self._order, second)
        keys.append(key)
        self._filed += 1

    def _refile(self) -> None:
        """Rebuild the index without stale keys; amortized over the puts since the last rebuild."""
        self._seconds.clear()
        self._order.clear()
        self._filed = 0
        for key, (_, until) in self._entries.items():
            self._file(key, until)

    def __len__(self) -> int:
        return len(self._entries)
