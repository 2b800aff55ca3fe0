"""A priority queue of unique keys, ordered by a number such as a time or a queue position.

Invariant: each key is queued once, at the number of its last put. An operation costs O(log n)
amortized, and the heap has at most twice as many entries as keys, plus :data:`SLACK`.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

SLACK = 64
"""Stale heap entries that are always tolerated."""
K = TypeVar("K")


class Agenda(Generic[K]):
    """Keys by ascending number; any key can be removed."""

    def __init__(self) -> None:
        self._entries: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []  # with stale entries of moved or dropped keys
        self._serial = 0  # breaks ties: keys with equal numbers keep their put order

    def put(self, key: K, at: float) -> None:
        """Queue ``key`` at number ``at``, or move it there."""
        self._serial += 1
        self._entries[key] = (at, self._serial)
        heapq.heappush(self._heap, (at, self._serial, key))
        if len(self._heap) > 2 * len(self._entries) + SLACK:
            self._heap = [(*entry, key) for key, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Remove ``key`` if it is queued."""
        self._entries.pop(key, None)

    def pop(self, limit: float) -> K | None:
        """Remove and return the first key with a number up to ``limit``, or None."""
        while self._heap and self._heap[0][0] <= limit:
            at, serial, key = heapq.heappop(self._heap)
            if self._entries.get(key) == (at, serial):
                del self._entries[key]
                return key
        return None

    def first(self) -> float | None:
        """Return the smallest number in the queue, or None."""
        while self._heap:
            at, serial, key = self._heap[0]
            if self._entries.get(key) == (at, serial):
                return at
            heapq.heappop(self._heap)
        return None

    def due(self, limit: float) -> list[K]:
        """Remove and return all keys with numbers up to ``limit``, in order."""
        keys: list[K] = []
        while (key := self.pop(limit)) is not None:
            keys.append(key)
        return keys

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
