"""Differences of counters whose owners restart, and rates in which old work fades."""

from __future__ import annotations

import math
from collections.abc import Hashable


class Deltas:
    """Growth of each counter since its last observation.

    The growth of a new counter is zero, because its value may be old. A counter that fell belongs
    to a restarted process and is treated as new.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, ...]] = {}

    def of(self, owner: Hashable, *counters: float) -> tuple[float, ...]:
        """Return the growth of ``owner``'s counters, or zeros if any counter fell."""
        last = self._last.get(owner)
        self._last[owner] = counters
        if last is None or any(b < a for a, b in zip(last, counters, strict=True)):
            return (0.0,) * len(counters)
        return tuple(b - a for a, b in zip(last, counters, strict=True))

    def keep(self, owners: set[Hashable]) -> None:
        """Drop the counters of all other owners."""
        self._last = {owner: seen for owner, seen in self._last.items() if owner in owners}


class Rate:
    """Amount per second of work. Old work fades with later work, not with time.

    So the rate is still valid after an idle night.
    """

    def __init__(self, half_life_s: float, least_s: float) -> None:
        self._half_life = half_life_s
        self._least = least_s
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Record ``seconds`` of work with the result ``amount``."""
        fade = math.exp2(-seconds / self._half_life)
        self._amount = self._amount * fade + amount
        self._seconds = self._seconds * fade + seconds

    @property
    def value(self) -> float | None:
        """The rate, or None before enough work was recorded."""
        if self._seconds < self._least or self._amount <= 0:
            return None
        return self._amount / self._seconds
