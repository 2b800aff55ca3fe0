"""Histograms of TTFT and ITL, with percentiles of the last one to two minutes.

A histogram has a fixed size. Each bucket is a twelfth of an octave wide, so a percentile is within
3 % of the exact value at any load. Pure: the caller passes the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import floor, log2

PERIOD_S = 60.0
"""Length of a period; percentiles cover the current and the previous period.

The periods of all histograms of a process begin at multiples of this length, so that those of a
worker and of the cluster cover the same durations."""
SHORTEST_S = 1e-5
"""Start of the first bucket in seconds; shorter durations count as this."""
PER_OCTAVE = 12
BUCKETS = 27 * PER_OCTAVE
"""Number of buckets: up to 1342 s; longer durations count as this."""
PERCENTILES = (50, 90, 99)


class Latency:
    """A histogram of recent durations; ``now`` is monotonic seconds in all calls."""

    __slots__ = ("_begun", "_ends", "_recent", "counts")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS  # since the start
        self._begun = self.counts.copy()  # the counts when the current period began
        self._recent = self._begun  # the same of the previous period
        self._ends = -math.inf

    def add(self, seconds: float, now: float, count: int = 1) -> None:
        """Add the same duration ``count`` times."""
        self.add_to_bucket(bucket(seconds), now, count)

    def add_to_bucket(self, index: int, now: float, count: int = 1) -> None:
        """Add to the bucket ``index`` instead of a duration."""
        if now >= self._ends:
            self._turn(now)
        self.counts[index] += count

    def summary(self, now: float) -> dict[str, float | int | None]:
        """Return the count since the start, and :data:`PERCENTILES` in seconds (None if empty)."""
        if now >= self._ends:
            self._turn(now)
        counts = [one - before for one, before in zip(self.counts, self._recent, strict=True)]
        shares: dict[str, float | int | None] = {"count": sum(self.counts)}
        for percent in PERCENTILES:
            shares[f"p{percent}"] = percentile(counts, percent)
        return shares

    def _turn(self, now: float) -> None:
        """Begin a period; drop all periods before the previous one."""
        recent = now < self._ends + PERIOD_S
        begun = self.counts.copy()
        self._recent, self._begun = (self._begun if recent else begun), begun
        self._ends = (now // PERIOD_S + 1) * PERIOD_S


def bucket(seconds: float) -> int:
    """Return the index of the bucket for a duration."""
    if seconds <= SHORTEST_S:
        return 0
    index = floor(log2(seconds / SHORTEST_S) * PER_OCTAVE)  # faster than int
    return index if index < BUCKETS else BUCKETS - 1


def cumulated(counts: Sequence[int], bounds: Sequence[float]) -> list[int]:
    """Return the counts between the ``bounds`` in seconds, and above the last one.

    A fine bucket counts where its middle is, so a bound is exact to 3 %.
    """
    found = [0] * (len(bounds) + 1)
    for index, count in enumerate(counts):
        if count:
            found[bisect_left(bounds, middle(index))] += count
    return found


def middle(index: int) -> float:
    """Return the middle of a bucket in seconds."""
    return SHORTEST_S * math.exp2((index + 0.5) / PER_OCTAVE)


def percentile(counts: list[int], percent: float) -> float | None:
    """Return the middle, in seconds, of the bucket that holds this percentile, None if empty."""
    rank = math.ceil(sum(counts) * percent / 100)
    if not rank:
        return None
    index = bisect_left(list(accumulate(counts)), rank)
    return middle(index)
