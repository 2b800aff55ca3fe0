"""The last minutes, one entry a second; the material of every judgement here."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
LONGEST_GAP_S = 10
"""Observations further apart leave a hole: what happened between them is not known."""


class History:
    """Rows of ``width`` numbers, one per second, ``seconds`` of them at most."""

    def __init__(self, width: int, seconds: float) -> None:
        self._values = np.zeros((width, math.ceil(seconds)))
        self._known = 0
        self._at: float | None = None

    def __len__(self) -> int:
        """Seconds known."""
        return self._known

    def add(self, row: tuple[float, ...], now: float, *, amounts: bool) -> None:
        """What the time since the last call brought (``amounts``), or how it stands now."""
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
        """Whether a second is over, so that :meth:`add` takes a row."""
        return self._at is None or now - self._at >= 1

    def columns(self) -> Values:
        """Float64 ``[width, seconds]``, the latest last; a view."""
        return self._values[:, self._values.shape[1] - self._known :]


def growth(values: Values, ahead_s: float, most: float = 1.3) -> float:
    """Factor by which ``values`` (one a second) will probably be above their latest mean.

    The last half must rise as well as the whole: a step that is over is no trend. From 1 to
    ``most``.
    """
    half = values[len(values) // 2 :]
    return min(most, _trend(values, ahead_s), _trend(half, ahead_s))


def _trend(values: Values, ahead_s: float) -> float:
    """A straight line through the means of ten seconds, carried on.

    It is believed only as far as it rises by more than twice its own uncertainty; bursts make a
    line uncertain.
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
    """Factor by which the next burst may be larger than those seen; ``values`` one a second.

    A steady load shows its peak within minutes; of a bursty one the window holds a few bursts
    only. So: the more minutes differ from each other, the more room. From 1 to ``most``.
    """
    whole = len(values) // 60
    if whole < 3:
        return 1.0
    means = values[-60 * whole :].reshape(whole, 60).mean(axis=1)
    mean = float(means.mean())
    return min(most, 1 + share * float(means.std()) / mean) if mean > 0 else 1.0


def fewest(enough: Callable[[int], bool], most: int) -> int:
    """The smallest number of workers that is enough, ``most`` if none below is; from 1."""
    return 1 + bisect_left(range(1, most), x=True, key=enough)
