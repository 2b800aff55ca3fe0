"""A bounded table whose entries end at their time; constant cost per entry, whatever its size.

Invariant: an entry is found until its time and not after it; at most ``capacity`` are kept,
and the one put longest ago goes first.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Expiring(Generic[K, V]):
    """Values by key, each until a time."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._entries: dict[K, tuple[V, float]] = {}
        self._seconds: dict[int, list[K]] = {}  # keys to look at once this second has come
        self._order: list[int] = []

    def put(self, key: K, value: V, until: float) -> None:
        """Keep ``value`` under ``key``; replaces an earlier one."""
        self._entries.pop(key, None)
        self._entries[key] = (value, until)
        self._file(key, until)
        if len(self._entries) > self._capacity:
            del self._entries[next(iter(self._entries))]

    def get(self, key: K, now: float) -> V | None:
        """The value, or None when there is none any more."""
        entry = self._entries.get(key)
        return entry[0] if entry is not None and entry[1] > now else None

    def expire(self, now: float) -> None:
        """Drop what has ended."""
        while self._order and self._order[0] <= now:
            for key in self._seconds.pop(heapq.heappop(self._order)):
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

    def __len__(self) -> int:
        return len(self._entries)
