"""Families of metrics: counters, gauges and histograms as plain numbers.

A process counts into its own integers and into a :class:`Histogram`; a scrape turns them into
families. On a busy path, :class:`Rows` collects values that are counted later, many at once.
Families travel between processes as JSON or msgpack. Pure: no clock, no I/O.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

Kind = Literal["counter", "gauge", "histogram"]
Bounds = tuple[float, ...]
Column = npt.NDArray[np.float64]

LATENCY_S: Bounds = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0,
)  # fmt: skip
"""TTFT, queue time, prefill time and whole requests, in seconds."""
GAP_S: Bounds = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05,
    0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""ITL, TPOT and engine steps, in seconds."""
HANDOFF_S: Bounds = (
    0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Transfers of a request's KV blocks, in seconds."""
TOKENS: Bounds = tuple(float(1 << power) for power in range(18))
"""Tokens of a prompt, of an answer or of a step: 1 to 131,072."""
BYTES: Bounds = tuple(float(1 << power) for power in range(12, 36, 2))
"""Bytes of a handoff: 4 KiB to 16 GiB."""
BYTES_PER_S: Bounds = tuple(
    part * 10.0**power for power in range(6, 12) for part in (1.0, 2.0, 5.0)
)
"""Throughput of a handoff: 1 MB/s to 500 GB/s."""

STEP_SECONDS, STEP_TOKENS = "step_seconds", "step_tokens"
WORKER_HISTOGRAMS: dict[str, Bounds] = {STEP_SECONDS: GAP_S, STEP_TOKENS: TOKENS}
"""Histograms that heartbeats report, by name: the seconds and the tokens of engine steps."""


MAX_ROWS = 512
"""Rows that :class:`Rows` keeps: enough that counting them at once costs little per row."""


class Histogram:
    """Counts by bucket since the start, and the sum of all values.

    ``counts[i]``: values up to ``bounds[i]`` and above the bound before; the last count: values
    above all bounds. Raises ValueError for bounds that do not ascend.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Bounds) -> None:
        for one, other in pairwise(bounds):
            if not one < other:
                raise ValueError(f"bounds must ascend: {one} before {other}")
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count the same value ``count`` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def observe_all(self, values: Column) -> None:
        """Count many values; shape [values]."""
        buckets = _array(self.bounds).searchsorted(values)
        found = np.bincount(buckets, minlength=len(self.counts))
        self.add(found.tolist(), float(values.sum()))

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add another histogram with the same bounds; ignore one with others."""
        if len(counts) == len(self.counts):
            self.counts = [one + other for one, other in zip(self.counts, counts, strict=True)]
            self.total += total


@lru_cache(maxsize=64)
def _array(bounds: Bounds) -> Column:
    return np.array(bounds)


class Rows:
    """Rows of numbers that are counted many at once: to keep a row takes a tenth of the time.

    Invariant: fewer than :data:`MAX_ROWS` rows are kept. ``width``: numbers per row. ``count``:
    called with the columns, float64 [width, rows], when there is no more room, and by :meth:`fold`.
    """

    __slots__ = ("_count", "_most", "_numbers", "_width")

    def __init__(self, width: int, count: Callable[[Column], None]) -> None:
        self._width = width
        self._most = MAX_ROWS * width
        self._count = count
        self._numbers: list[float] = []  # of all rows, one after the other

    def add(self, row: tuple[float, ...]) -> None:
        """Keep a row of ``width`` numbers."""
        numbers = self._numbers
        numbers += row
        if len(numbers) >= self._most:
            self.fold()

    def fold(self) -> None:
        """Count all rows that are kept."""
        if self._numbers:
            # In half the time of an array of the list.
            packed = struct.pack(f"{len(self._numbers)}d", *self._numbers)
            self._numbers.clear()
            self._count(np.frombuffer(packed).reshape(-1, self._width).T)

    def __len__(self) -> int:
        return len(self._numbers) // self._width


class Row(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """One series: the values of its labels and its number, or its counts by bucket and their sum.

    ``value``: the number, or the sum of a histogram's values.
    """

    labels: tuple[str, ...]
    value: float
    counts: list[int] = []


class Family(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All series of one name. ``labels``: names of their labels; ``bounds``: of a histogram."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...]
    rows: list[Row]
    bounds: Bounds = ()


Labels = tuple[str, ...]
Values = Mapping[Labels, float]


def counter(name: str, text: str, values: float | Values, labels: Iterable[str] = ()) -> Family:
    """Make a counter; its name ends in ``_total``. ``values``: a number, or numbers by labels.

    Raises ValueError for keys of ``values`` that do not fit ``labels``, as the others do.
    """
    return _family(name, "counter", text, values, labels)


def gauge(name: str, text: str, values: float | Values, labels: Iterable[str] = ()) -> Family:
    """Make a gauge. ``values``: a number, or numbers by labels."""
    return _family(name, "gauge", text, values, labels)


def _family(
    name: str, kind: Kind, text: str, values: float | Values, labels: Iterable[str]
) -> Family:
    found: Values = values if isinstance(values, Mapping) else {(): values}
    names = tuple(labels)
    _check_keys(name, names, found)
    return Family(name, kind, text, names, [Row(key, value) for key, value in found.items()])


def _check_keys(name: str, labels: Labels, keys: Iterable[Labels]) -> None:
    for key in keys:
        if problem := labels_problem(name, labels, key):
            raise ValueError(problem)


def labels_problem(name: str, labels: Labels, values: object) -> str:
    """Return why the values of a row's labels do not fit the labels' names; empty if they do."""
    count = len(labels)
    if isinstance(values, tuple) and len(values) == count:
        return ""
    names = f" ({', '.join(map(str, labels))})" if labels else ""
    wanted = f"tuples of {count} label value{'s' * (count != 1)}{names}"
    return f"{name}: the keys of values must be {wanted}, not {values!r:.80}"


def histogram(
    name: str,
    text: str,
    values: Histogram | Mapping[Labels, Histogram],
    labels: Iterable[str] = (),
) -> Family:
    """Make a histogram from one or several with equal bounds."""
    found: Mapping[Labels, Histogram] = {(): values} if isinstance(values, Histogram) else values
    names = tuple(labels)
    _check_keys(name, names, found)
    rows = [Row(key, one.total, list(one.counts)) for key, one in found.items()]
    bounds = next((one.bounds for one in found.values()), ())
    return Family(name, "histogram", text, names, rows, bounds)


OTHER = "other"
"""Stands for the values of a label above a limit."""


class Limited:
    """Keeps the number of a label's values small: a value above the limit becomes :data:`OTHER`.

    Label values come from other processes, and every new value is a new series in Prometheus.
    """

    def __init__(self, most: int, known: Iterable[str] = ()) -> None:
        self._known = set(known)
        self._most = most

    def __call__(self, value: str) -> str:
        """Return the value, or :data:`OTHER`."""
        if value in self._known:
            return value
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(value)
        return value
