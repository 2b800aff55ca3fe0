"""The spread of measured times around their fitted costs, and a simulation's draws from it. Pure.

A spread is a list of equally frequent values. The spread of steps has multiples of the fitted cost,
with a mean of 1. The spread of waits has differences from the fitted seconds, with a mean of 0.
From an empty spread nothing is drawn. Each worker has its own generators, so that equal seeds give
equal runs.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

Spread = tuple[float, ...]
Values = npt.NDArray[np.float64]
SHARES = 100
"""Maximum number of values of a spread; each is the mean of an equal share of the times."""
LEAST = 0.05
"""Minimum multiple: a step takes time, although two tokens may come in one message."""
MOST = 1e6
"""Maximum of a multiple or of seconds in a file."""
PERIOD = 4096
"""Minimum number of steps before the draws of a worker repeat."""


@dataclass(frozen=True, slots=True)
class Spreads:
    """The spreads of a service model; empty: each step and wait takes exactly its cost.

    ``hop_s``, ``handoff_s``: differences from the model's seconds. ``prefill``, ``decode``:
    multiples of steps with and without prompt tokens, while no other worker of the host computes.
    ``prefill_beside``, ``decode_beside``: the same while another worker computes.
    """

    hop_s: Spread = ()
    handoff_s: Spread = ()
    prefill: Spread = ()
    decode: Spread = ()
    prefill_beside: Spread = ()
    decode_beside: Spread = ()

    def scaled(self, factor: float) -> Spreads:
        """Return the spreads of a machine on which each step takes ``factor`` times as long."""
        return replace(
            self,
            hop_s=tuple(factor * one for one in self.hop_s),
            handoff_s=tuple(factor * one for one in self.handoff_s),
        )

    def wrong(self) -> str:
        """Return the name of a field with an impossible value, or an empty text."""
        for field in fields(self):
            low = -MOST if field.name.endswith("_s") else LEAST / 2
            if not all(low <= one <= MOST for one in getattr(self, field.name)):
                return field.name
        return ""


def multiples(found: Iterable[float], noise: float = 0.0) -> Spread:
    """Return the spread of times as multiples of their cost.

    ``noise``: share of their standard deviation that has another cause; it is removed.
    """
    shares = _shares(found)
    mean = statistics.mean(shares) if shares else 0.0
    if mean <= 0:
        return ()
    kept = math.sqrt(max(0.0, 1 - noise * noise))
    values = [max(LEAST, 1 + kept * (one / mean - 1)) for one in shares]
    mean = statistics.mean(values)
    return tuple(one / mean for one in values)


def seconds(found: Iterable[float], noise: float = 0.0) -> Spread:
    """Return the differences of seconds from their mean; ``noise``: see :func:`multiples`."""
    shares = _shares(found)
    if not shares:
        return ()
    mean, kept = statistics.mean(shares), math.sqrt(max(0.0, 1 - noise * noise))
    return tuple(kept * (one - mean) for one in shares)


def deviation(spread: Spread) -> float:
    """Return the standard deviation; 0 without values."""
    return statistics.pstdev(spread) if spread else 0.0


def _shares(found: Iterable[float]) -> list[float]:
    ordered = np.sort(np.array(list(found)))
    parts = np.array_split(ordered, min(SHARES, len(ordered))) if len(ordered) else []
    return [float(part.mean()) for part in parts]


class Draws:
    """Draws single values. ``name``: of the worker or of the wait; each name has a generator."""

    def __init__(self, seed: int, name: str) -> None:
        self._random = random.Random(f"{seed} {name}")  # noqa: S311 -- a simulation

    def multiple(self, spread: Spread) -> float:
        """Return the multiple of its cost that a step takes."""
        return self._random.choice(spread) if spread else 1.0

    def seconds(self, mean: float, spread: Spread) -> float:
        """Return the seconds of a wait with this mean."""
        return max(0.0, mean + self._random.choice(spread)) if spread else mean


class Steps:
    """The times of a worker's steps whose costs are an arithmetic series.

    Step number ``first`` costs ``cost`` seconds, and each later step ``growth`` seconds more.
    """

    def span(self, first: int, count: int, cost: float, growth: float) -> float:
        """Return the seconds of ``count`` steps."""
        return count * cost + growth * count * (count - 1) / 2

    def until(self, first: int, left: float, cost: float, growth: float) -> int:
        """Return the least number of steps that take ``left`` seconds or more."""
        half = growth / 2
        base = cost - half
        steps = 2 * left / (base + math.sqrt(base * base + 4 * half * left))
        return math.ceil(steps - 1e-9)

    def each(self, first: int, count: int, cost: float, growth: float) -> Values:
        """Return the seconds of each of ``count`` steps, float64 ``[count]``."""
        return np.arange(count, dtype=np.float64) * growth + cost


class DrawnSteps(Steps):
    """Steps that take drawn multiples of their costs. Prefix sums replace loops over steps."""

    def __init__(self, seed: int, name: str, spread: Spread) -> None:
        table = np.tile(np.array(spread), math.ceil(PERIOD / len(spread)))
        random_ = np.random.default_rng([seed, *name.encode()])
        self._factors: Values = random_.permutation(table)
        start: Values = np.zeros(1)
        self._plain: Sequence[float] = np.concatenate([start, self._factors.cumsum()]).tolist()
        weighted = np.arange(len(table)) * self._factors
        self._weighted: Sequence[float] = np.concatenate([start, weighted.cumsum()]).tolist()

    def span(self, first: int, count: int, cost: float, growth: float) -> float:
        """See :class:`Steps`."""
        plain, weighted = self._sums(first)
        plain_end, weighted_end = self._sums(first + count)
        return (cost - growth * first) * (plain_end - plain) + growth * (weighted_end - weighted)

    def until(self, first: int, left: float, cost: float, growth: float) -> int:
        """See :class:`Steps`."""
        if left <= 0:
            return 0
        most = 1
        while self.span(first, most, cost, growth) < left - 1e-12:
            most *= 2
        return bisect_left(
            range(most), left - 1e-12, key=lambda count: self.span(first, count, cost, growth)
        )

    def each(self, first: int, count: int, cost: float, growth: float) -> Values:
        """See :class:`Steps`."""
        numbers = np.arange(first, first + count) % len(self._factors)
        return super().each(first, count, cost, growth) * self._factors[numbers]

    def _sums(self, number: int) -> tuple[float, float]:
        """Return the sums of the factors of the first steps, alone and times their numbers."""
        period = len(self._factors)
        full, rest = divmod(number, period)
        plain, weighted = self._plain[period], self._weighted[period]
        return (
            full * plain + self._plain[rest],
            period * plain * full * (full - 1) / 2 + full * weighted
            + full * period * self._plain[rest] + self._weighted[rest],
        )  # fmt: skip


def steps_of(seed: int, name: str, spread: Spread) -> Steps:
    """Return the steps of a worker with this name."""
    return DrawnSteps(seed, name, spread) if spread else Steps()
