"""Requests cancelled before they were known here, so that a late Submit does not start them.

Invariant: at most :data:`CAPACITY` keys, each for :data:`KEEP_S` seconds; beyond that the
oldest is forgotten, and a Submit this late merely runs for nobody.
"""

from __future__ import annotations

from collections import OrderedDict

KEEP_S = 30.0
"""Longer than a message of a living connection may be late."""
CAPACITY = 4096


class Tombstones:
    """Keys with the time until which they stay cancelled."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, key: bytes, now: float) -> None:
        """``key`` is cancelled, whatever comes later."""
        self._forget(now)
        self._until[key] = now + KEEP_S
        self._until.move_to_end(key)
        if len(self._until) > CAPACITY:
            self._until.popitem(last=False)

    def holds(self, key: bytes, now: float) -> bool:
        """Whether ``key`` was cancelled lately."""
        return self._until.get(key, now) > now

    def _forget(self, now: float) -> None:
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)

    def __len__(self) -> int:
        return len(self._until)
