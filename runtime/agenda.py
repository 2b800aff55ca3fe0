"""Keys in the order of a number: a time, or a place in a queue.

The cost of one does not grow with how many there are (but by its logarithm).

Invariant: a key is there once, at the number it was put at last; memory is a small multiple
of what is kept.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

SLACK = 64
"""Entries left behind by dropped keys that do not matter."""
K = TypeVar("K")


class Agenda(Generic[K]):
    """Keys by number, the least first; any of them can be taken out."""

    def __init__(self) -> None:
        self._entries: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []  # some are dropped, or put anew
        self._serial = 0  # of entries: equal numbers keep the order they were put in

    def put(self, key: K, at: float) -> None:
        """File ``key`` at a number; it leaves an earlier one."""
        self._serial += 1
        self._entries[key] = (at, self._serial)
        heapq.heappush(self._heap, (at, self._serial, key))
        if len(self._heap) > 2 * len(self._entries) + SLACK:
            self._heap = [(*entry, key) for key, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Take ``key`` out, if it is there."""
        self._entries.pop(key, None)

    def pop(self, limit: float) -> K | None:
        """Take out the first key whose number is not above ``limit``; None when there is none."""
        while self._heap and self._heap[0][0] <= limit:
            at, serial, key = heapq.heappop(self._heap)
            if self._entries.get(key) == (at, serial):
                del self._entries[key]
                return key
        return None

    def first(self) -> float | None:
        """The least number a key is filed at; None when there is none."""
        while self._heap:
            at, serial, key = self._heap[0]
            if self._entries.get(key) == (at, serial):
                return at
            heapq.heappop(self._heap)
        return None

    def due(self, limit: float) -> list[K]:
        """Take out all keys whose number is not above ``limit``, in order."""
        keys: list[K] = []
        while (key := self.pop(limit)) is not None:
            keys.append(key)
        return keys

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
