"""Requests that were cancelled before their Submit arrived: a late Submit must not start them.

Invariant: at most :data:`CAPACITY` keys, each for :data:`KEEP_S` seconds. Above that the oldest key
is dropped. Then a late Submit wastes work on a request that no client reads; nothing else breaks.
"""

from __future__ import annotations

from collections import OrderedDict

KEEP_S = 30.0
"""Seconds; longer than the delay of a message on an open connection."""
CAPACITY = 4096


class Tombstones:
    """Keys of cancelled requests, with their expiry times."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, key: bytes, now: float) -> None:
        """Remember ``key`` as cancelled."""
        self._forget(now)
        self._until[key] = now + KEEP_S
        self._until.move_to_end(key)
        if len(self._until) > CAPACITY:
            self._until.popitem(last=False)

    def holds(self, key: bytes, now: float) -> bool:
        """True if ``key`` was cancelled within :data:`KEEP_S`."""
        return self._until.get(key, now) > now

    def _forget(self, now: float) -> None:
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)

    def __len__(self) -> int:
        return len(self._until)
