"""Totals of each worker name over all of its incarnations.

A worker reports its counts since its start. Invariant: a total never falls while the router
lives. Of each incarnation the highest values that were read count, also after its death, and one
that returns is not counted twice. The memory is bounded: old incarnations are added up, and names
above a limit become "other".
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

from msgspec.structs import replace

from baton.proto.wire.messages import Buckets, ExtensionCounts, WorkerLoad
from baton.runtime.metrics.families import OTHER, WORKER_HISTOGRAMS, Histogram, Limited

KEEP_INCARNATIONS = 256
"""Dead incarnations that may still return; what older ones counted is added up."""
MAX_NAMES = 1024
MAX_CLASSES = 64
"""Users' classes of all workers, ever."""
COUNTERS = (
    "prompt_tokens", "generated_tokens", "prefix_hit_tokens", "preemptions", "compute_seconds",
)  # fmt: skip
"""Fields of WorkerLoad that count from the worker's start."""
Owner = tuple[str, str]
"""A worker's name and role."""
Life = tuple[Owner, int]
"""One incarnation under one name; another name may claim the same incarnation."""
Series = tuple[str, str]
"""A histogram's name, and the role of its workers."""


class Counted(Protocol):
    """What is read of a worker. ``finished``: it was drained."""

    id: str
    role: str
    incarnation: int
    load: WorkerLoad
    finished: bool


class WorkerTotals:
    """Sums of the counters of all incarnations, restarts and changes of role, by worker."""

    def __init__(self) -> None:
        self._dead: OrderedDict[Life, WorkerLoad] = OrderedDict()
        self._read: dict[Life, WorkerLoad] = {}  # highest values of live workers
        self._before: dict[Owner, list[float]] = {}  # of older incarnations
        self._histograms_before: dict[Series, Histogram] = {}
        self._name = Limited(MAX_NAMES)
        self._class = Limited(MAX_CLASSES)
        self._lost: set[Owner] = set()  # died undrained, and have no successor yet
        self.restarts: Counter[Owner] = Counter()
        self.role_changes: Counter[Owner] = Counter()
        self._roles: dict[str, str] = {}  # last role of each name

    def owner(self, worker: Counted) -> Owner:
        """Return the labels of a worker's series."""
        return self._name(worker.id), worker.role

    def extension(self, counts: ExtensionCounts) -> tuple[str, str]:
        """Return the labels of a user's class: its extension point and its name."""
        if self._class(f"{counts.point} {counts.name}") == OTHER:
            return OTHER, OTHER
        return counts.point, counts.name

    def joined(self, worker: Counted) -> None:
        """Record a registration: of a new incarnation, or of a dead incarnation that returns."""
        owner = name, role = self.owner(worker)
        if self._roles.get(name, role) != role and name != OTHER:
            self.role_changes[owner] += 1
        self._roles[name] = role
        life = owner, worker.incarnation
        counted = self._dead.pop(life, None)
        if counted is not None:
            self._read[life] = counted
            self._lost.discard(owner)
        elif owner in self._lost:
            self._lost.remove(owner)
            self.restarts[owner] += 1

    def died(self, worker: Counted) -> None:
        """Keep what a dead incarnation has counted."""
        owner = self.owner(worker)
        if not worker.finished:
            self._lost.add(owner)
        life = owner, worker.incarnation
        self._dead[life] = self._highest(worker)
        del self._read[life]
        while len(self._dead) > KEEP_INCARNATIONS:
            (old, _), load = self._dead.popitem(last=False)
            sums = self._before.setdefault(old, [0.0] * len(COUNTERS))
            self._before[old] = [one + more for one, more in zip(sums, _counted(load), strict=True)]
            _add(self._histograms_before, old[1], load)

    def sums(self, live: Iterable[Counted]) -> dict[Owner, list[float]]:
        """Return the sums of all :data:`COUNTERS` by worker; ``live``: registered workers."""
        found = {owner: list(sums) for owner, sums in self._before.items()}
        for owner, load in self._loads(live):
            sums = found.setdefault(owner, [0.0] * len(COUNTERS))
            for index, value in enumerate(_counted(load)):
                sums[index] += value
        return found

    def histograms(self, live: Iterable[Counted]) -> dict[Series, Histogram]:
        """Return the sums of all histograms that workers report."""
        found: dict[Series, Histogram] = {}
        for series, before in self._histograms_before.items():
            found[series] = Histogram(before.bounds)
            found[series].add(before.counts, before.total)
        for (_, role), load in self._loads(live):
            _add(found, role, load)
        return found

    def _loads(self, live: Iterable[Counted]) -> Iterator[tuple[Owner, WorkerLoad]]:
        for (owner, _), load in self._dead.items():
            yield owner, load
        for worker in live:
            yield self.owner(worker), self._highest(worker)

    def _highest(self, worker: Counted) -> WorkerLoad:
        """Return the highest values that were read of the worker, and keep them."""
        life = self.owner(worker), worker.incarnation
        before = self._read.get(life)
        load = worker.load if before is None else _highest(before, worker.load)
        self._read[life] = load
        return load


def _highest(before: WorkerLoad, load: WorkerLoad) -> WorkerLoad:
    """Return ``load`` with the higher value of each counter and of each bucket."""
    counts = {name: max(getattr(before, name), getattr(load, name)) for name in COUNTERS}
    histograms: dict[str, Buckets] = {}
    for name, bounds in WORKER_HISTOGRAMS.items():
        both = [one for one in (before.histograms.get(name), load.histograms.get(name)) if one]
        both = [one for one in both if len(one.counts) == len(bounds) + 1]
        if both:
            most = [max(values) for values in zip(*(one.counts for one in both), strict=True)]
            histograms[name] = Buckets(most, max(one.total for one in both))
    return replace(load, histograms=histograms, **counts)


def _counted(load: WorkerLoad) -> list[float]:
    return [getattr(load, name) for name in COUNTERS]


def _add(sums: dict[Series, Histogram], role: str, load: WorkerLoad) -> None:
    """Add a worker's histograms; those with an unknown name or other bounds are ignored."""
    for name, buckets in load.histograms.items():
        bounds = WORKER_HISTOGRAMS.get(name)
        if bounds is not None and len(buckets.counts) == len(bounds) + 1:
            if (name, role) not in sums:
                sums[name, role] = Histogram(bounds)
            sums[name, role].add(buckets.counts, buckets.total)
