"""Histograms of TTFT and ITL, with percentiles of the last one to two minutes.

A histogram has a fixed size. Each bucket is a twelfth of an octave wide, so a percentile is within
3 % of the exact value at any load. Pure: the caller passes the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

PERIOD_S = 60.0
"""Length of a period; percentiles cover the current and the previous period."""
SHORTEST_S = 1e-5
"""Start of the first bucket in seconds; shorter durations count as this."""
PER_OCTAVE = 12
BUCKETS = 27 * PER_OCTAVE
"""Number of buckets: up to 1342 s; longer durations count as this."""
PERCENTILES = (50, 90, 99)


class Latency:
    """A histogram of recent durations; ``now`` is monotonic seconds in all calls."""

    __slots__ = ("_current", "_ends", "_last", "count")

    def __init__(self) -> None:
        self.count = 0  # since the start
        self._current = [0] * BUCKETS
        self._last = [0] * BUCKETS
        self._ends = -math.inf

    def add(self, seconds: float, now: float, count: int = 1) -> None:
        """Add the same duration ``count`` times."""
        self.add_to_bucket(bucket(seconds), now, count)

    def add_to_bucket(self, index: int, now: float, count: int = 1) -> None:
        """Add to the bucket ``index`` instead of a duration."""
        if now >= self._ends:
            self._turn(now)
        self.count += count
        self._current[index] += count

    def summary(self, now: float) -> dict[str, float | int | None]:
        """Return the count since the start, and :data:`PERCENTILES` in seconds (None if empty)."""
        if now >= self._ends:
            self._turn(now)
        counts = [one + other for one, other in zip(self._current, self._last, strict=True)]
        shares: dict[str, float | int | None] = {"count": self.count}
        for percent in PERCENTILES:
            shares[f"p{percent}"] = percentile(counts, percent)
        return shares

    def _turn(self, now: float) -> None:
        """Begin a period; drop all periods before the previous one."""
        recent = now < self._ends + PERIOD_S
        self._last = self._current if recent else [0] * BUCKETS
        self._current = [0] * BUCKETS
        self._ends = now + PERIOD_S


def bucket(seconds: float) -> int:
    """Return the index of the bucket for a duration."""
    if seconds <= SHORTEST_S:
        return 0
    index = int(math.log2(seconds / SHORTEST_S) * PER_OCTAVE)
    return index if index < BUCKETS else BUCKETS - 1


def percentile(counts: list[int], percent: float) -> float | None:
    """Return the middle, in seconds, of the bucket that holds this percentile, None if empty."""
    rank = math.ceil(sum(counts) * percent / 100)
    if not rank:
        return None
    index = bisect_left(list(accumulate(counts)), rank)
    return SHORTEST_S * math.exp2((index + 0.5) / PER_OCTAVE)
