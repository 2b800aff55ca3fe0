"""A bounded table whose entries end at their time; constant cost per entry, whatever its size.

Invariant: an entry is found until its time and not after it; at most ``capacity`` are kept,
and the one put longest ago goes first; memory is a small multiple of what is kept.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

SLACK = 64
"""Keys filed in vain that do not matter."""
K = TypeVar("K")
V = TypeVar("V")


class Expiring(Generic[K, V]):
    """Values by key, each until a time."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._entries: dict[K, tuple[V, float]] = {}
        self._seconds: dict[int, list[K]] = {}  # keys to look at once this second has come
        self._order: list[int] = []
        self._filed = 0  # keys in all seconds; some are gone, or there more than once

    def put(self, key: K, value: V, until: float) -> None:
        """Keep ``value`` under ``key``; replaces an earlier one."""
        self._entries.pop(key, None)
        self._entries[key] = (value, until)
        self._file(key, until)
        if len(self._entries) > self._capacity:
            del self._entries[next(iter(self._entries))]
        if self._filed > 2 * len(self._entries) + SLACK:
            self._refile()

    def get(self, key: K, now: float) -> V | None:
        """The value, or None when there is none any more."""
        entry = self._entries.get(key)
        return entry[0] if entry is not None and entry[1] > now else None

    def expire(self, now: float) -> None:
        """Drop what has ended."""
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
                    self._file(key, entry[1])  # it was put again, with a later end

    def _file(self, key: K, until: float) -> None:
        second = math.ceil(min(until, 1e15))
        keys = self._seconds.get(second)
        if keys is None:
            keys = self._seconds[second] = []
            heapq.heappush(self._order, second)
        keys.append(key)
        self._filed += 1

    def _refile(self) -> None:
        """Forget where replaced and evicted entries were; as rare as it is long."""
        self._seconds.clear()
        self._order.clear()
        self._filed = 0
        for key, (_, until) in self._entries.items():
            self._file(key, until)

    def __len__(self) -> int:
        return len(self._entries)
