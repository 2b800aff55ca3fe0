"""How long clients wait for tokens, as percentiles of the last minutes.

A histogram of fixed size: its buckets grow by a twelfth of an octave, so a percentile is
within 3 % of the true one, at any load and for the same memory. Pure; time comes from outside.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

PERIOD_S = 60.0
"""Percentiles are of the current and the last period of this length."""
SHORTEST_S = 1e-5
"""Everything shorter counts as this, in seconds."""
PER_OCTAVE = 12
BUCKETS = 27 * PER_OCTAVE
"""Up to 1342 s; everything longer counts as this."""
PERCENTILES = (50, 90, 99)


class Latency:
    """Durations seen lately; ``now`` is monotonic seconds in all calls."""

    __slots__ = ("_current", "_ends", "_last", "count")

    def __init__(self) -> None:
        self.count = 0  # since the start
        self._current = [0] * BUCKETS
        self._last = [0] * BUCKETS
        self._ends = -math.inf

    def add(self, seconds: float, now: float, count: int = 1) -> None:
        """``count`` times the same duration."""
        self.add_to_bucket(bucket(seconds), now, count)

    def add_to_bucket(self, index: int, now: float, count: int = 1) -> None:
        """The same for a duration of the bucket ``index``."""
        if now >= self._ends:
            self._turn(now)
        self.count += count
        self._current[index] += count

    def summary(self, now: float) -> dict[str, float | int | None]:
        """Count since the start, and each of :data:`PERCENTILES` in seconds, None without any."""
        if now >= self._ends:
            self._turn(now)
        counts = [one + other for one, other in zip(self._current, self._last, strict=True)]
        shares: dict[str, float | int | None] = {"count": self.count}
        for percent in PERCENTILES:
            shares[f"p{percent}"] = percentile(counts, percent)
        return shares

    def _turn(self, now: float) -> None:
        """Begin a period; what is older than the last one is forgotten."""
        recent = now < self._ends + PERIOD_S
        self._last = self._current if recent else [0] * BUCKETS
        self._current = [0] * BUCKETS
        self._ends = now + PERIOD_S


def bucket(seconds: float) -> int:
    """Index of the bucket a duration belongs to."""
    if seconds <= SHORTEST_S:
        return 0
    index = int(math.log2(seconds / SHORTEST_S) * PER_OCTAVE)
    return index if index < BUCKETS else BUCKETS - 1


def percentile(counts: list[int], percent: float) -> float | None:
    """Seconds in the middle of the bucket that ``percent`` of all durations reach."""
    rank = math.ceil(sum(counts) * percent / 100)
    if not rank:
        return None
    index = bisect_left(list(accumulate(counts)), rank)
    return SHORTEST_S * math.exp2((index + 0.5) / PER_OCTAVE)
