"""Measurements over time: rows of the last minutes, trends in them, counters, and rates.

Owners of counters may restart. In rates, old work fades.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
LONGEST_GAP_S = 10
"""After a longer gap between observations, the history restarts: the gap cannot be filled."""


class History:
    """Rows of ``width`` numbers, one row per second, at most ``seconds`` rows."""

    def __init__(self, width: int, seconds: float) -> None:
        self._values = np.zeros((width, math.ceil(seconds)))
        self._known = 0
        self._at: float | None = None

    def __len__(self) -> int:
        """Number of recorded seconds."""
        return self._known

    def add(self, row: tuple[float, ...], now: float, *, amounts: bool) -> None:
        """Add a row for the time since the last call, which must be a second or more.

        ``amounts``: the values are amounts, spread evenly over that time; else current states.
        """
        seconds = 0 if self._at is None else int(now - self._at)
        if self._at is None or seconds > LONGEST_GAP_S:
            self._at, self._known = now, 0
            return
        if not seconds:
            raise ValueError("a row of less than a second")
        self._at += seconds
        size = self._values.shape[1]
        seconds = min(seconds, size)
        self._values[:, :-seconds] = self._values[:, seconds:]
        value = np.array(row, np.float64) / (seconds if amounts else 1)
        self._values[:, -seconds:] = value[:, None]
        self._known = min(size, self._known + seconds)

    def due(self, now: float) -> bool:
        """Whether a second has passed, so that :meth:`add` accepts a row."""
        return self._at is None or now - self._at >= 1

    def columns(self) -> Values:
        """Return a view, float64 ``[width, seconds]``, the latest second last."""
        return self._values[:, self._values.shape[1] - self._known :]


def growth(values: Values, ahead_s: float, most: float = 1.3) -> float:
    """Expected growth of ``values`` (one per second) over their latest mean, from 1 to ``most``.

    The second half must rise as well as the whole, because a single past step is not a trend.
    """
    half = values[len(values) // 2 :]
    return min(most, _trend(values, ahead_s), _trend(half, ahead_s))


def _trend(values: Values, ahead_s: float) -> float:
    """Extrapolate a straight line through the means of ten seconds each.

    The slope is reduced by twice its standard error, because bursts make the slope uncertain.
    """
    whole = len(values) // 10
    if whole < 6:
        return 1.0
    means = values[-10 * whole :].reshape(whole, 10).mean(axis=1)
    x = 10.0 * (np.arange(whole) - (whole - 1) / 2)
    spread = float(x @ x)
    slope = float(x @ means) / spread
    rest = means - means.mean() - slope * x
    error = math.sqrt(float(rest @ rest) / (whole - 2) / spread)
    recent = float(means[-6:].mean())
    sure = slope - 2 * error
    if sure <= 0 or recent <= 0:
        return 1.0
    return 1 + sure * (ahead_s + 30) / recent


def headroom(values: Values, share: float = 0.3, most: float = 1.5) -> float:
    """Factor by which the next burst may exceed past bursts, from 1 to ``most``.

    ``values``: one per second. A steady load reaches its peak within minutes, but the window
    contains only a few bursts of a bursty load. So the factor grows with the variation between
    minutes.
    """
    whole = len(values) // 60
    if whole < 3:
        return 1.0
    means = values[-60 * whole :].reshape(whole, 60).mean(axis=1)
    mean = float(means.mean())
    return min(most, 1 + share * float(means.std()) / mean) if mean > 0 else 1.0


def fewest(enough: Callable[[int], bool], most: int) -> int:
    """The smallest number of workers, from 1, that is enough; ``most`` if no smaller number is."""
    return 1 + bisect_left(range(1, most), x=True, key=enough)


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
