"""Differences of counters whose owners restart, and rates that forget."""

from __future__ import annotations

import math
from collections.abc import Hashable


class Deltas:
    """How much each counter grew since it was seen last.

    A counter seen for the first time grew by nothing: what it counted before says nothing
    of now. One that fell, which no counter does, starts anew likewise.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, ...]] = {}

    def of(self, owner: Hashable, *counters: float) -> tuple[float, ...]:
        """Growth of ``owner``'s counters, zeros when any of them fell."""
        last = self._last.get(owner)
        self._last[owner] = counters
        if last is None or any(b < a for a, b in zip(last, counters, strict=True)):
            return (0.0,) * len(counters)
        return tuple(b - a for a, b in zip(last, counters, strict=True))

    def keep(self, owners: set[Hashable]) -> None:
        """Forget all others."""
        self._last = {owner: seen for owner, seen in self._last.items() if owner in owners}


class Rate:
    """Amount per second of work; old work fades with the work done since, not with time.

    So an idle night leaves the morning's knowledge as it was.
    """

    def __init__(self, half_life_s: float, least_s: float) -> None:
        self._half_life = half_life_s
        self._least = least_s
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """``seconds`` of work did ``amount``."""
        fade = math.exp2(-seconds / self._half_life)
        self._amount = self._amount * fade + amount
        self._seconds = self._seconds * fade + seconds

    @property
    def value(self) -> float | None:
        """None before enough work was seen."""
        if self._seconds < self._least or self._amount <= 0:
            return None
        return self._amount / self._seconds
