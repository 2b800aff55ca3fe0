"""The cheapest schedule for a controller with full knowledge of the trace.

A schedule is a size of each pool per interval; workers are ordered a cold start before the
interval that needs them, and a worker that a pool gives up is drained, as usual. The goal is
the least of worker-hours at which a goal is met: so many requests within both limits. Found by
descent: pools start at the smallest constant size that meets the goal, one or two more, and
every interval is lowered where most hours are won per request lost; then pairs of intervals
are traded. :func:`refine` goes on from there with short intervals and moves drawn at random. A
search can miss cheaper schedules, but never invents one: each is played. So its result is not a
bound.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.forecast.cluster import Outcome, Targets

from .cases import Case

ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class Schedule:
    """Sizes per interval of ``interval_s``; the first interval is shorter by ``offset_s``."""

    interval_s: float
    offset_s: float
    prefill: tuple[int, ...]
    decode: tuple[int, ...]

    def targets(self, now: float, ahead_s: float) -> Targets:
        """What must be ordered at ``now``: the most of now and until ``ahead_s`` from now."""
        first = int((now + self.offset_s) // self.interval_s)
        last = int((now + ahead_s + self.offset_s) // self.interval_s) + 1
        return {role: max(self._sizes(role)[first:last], default=1) for role in ROLES}

    def _sizes(self, role: str) -> tuple[int, ...]:
        return self.prefill if role == "prefill" else self.decode

    def play(self, case: Case) -> Outcome:
        """The replay under this schedule."""
        first = self.targets(0.0, case.cold_s)
        return case.replay(first).run(lambda _metrics, now: self.targets(now, case.cold_s))


def constant(case: Case, interval_s: float, offset_s: float, pool: Targets) -> Schedule:
    """The same size always."""
    count = int((case.trace[-1].at + offset_s) // interval_s) + 1
    sizes = {role: (pool[role],) * count for role in ROLES}
    return Schedule(interval_s, offset_s, sizes["prefill"], sizes["decode"])


def smallest(case: Case, goal: float) -> Targets:
    """The smallest constant pools that meet ``goal``; the largest where none does."""
    pool = dict(case.most)
    for role in ROLES:
        low, high = 0, case.most[role]
        while high - low > 1:
            middle = (low + high) // 2
            outcome = case.fixed({**pool, role: middle})
            low, high = (low, middle) if outcome.attained(case.slo) >= goal else (middle, high)
        pool[role] = high
    return pool


def search(
    case: Case, goal: float, interval_s: float, offsets: Sequence[float], trades: int = 60
) -> Schedule:
    """The cheapest schedule found that meets ``goal``, over all ``offsets`` of the intervals."""
    pool = smallest(case, goal)
    found = [_descend(case, goal, interval_s, offset, pool, trades) for offset in offsets]
    return min(found, key=lambda one: one[0])[1]


def _descend(
    case: Case, goal: float, interval_s: float, offset_s: float, pool: Targets, trades: int
) -> tuple[float, Schedule]:
    roomy = {role: min(case.most[role], pool[role] + 2) for role in ROLES}
    best = constant(case, interval_s, offset_s, roomy)
    for role in ROLES:
        best = _lower(case, goal, best, role)
    chance = random.Random(1)
    hours = best.play(case).hours()
    for _ in range(trades):
        traded = _trade(best, chance, case.most)
        outcome = traded.play(case)
        if outcome.hours() < hours and outcome.attained(case.slo) >= goal:
            best, hours = traded, outcome.hours()
    return hours, best


def _lower(case: Case, goal: float, best: Schedule, role: str) -> Schedule:
    outcome = best.play(case)
    kept, hours = outcome.attained(case.slo), outcome.hours()
    while True:
        options = []
        for place in range(len(best.prefill)):
            lower = _changed(best, role, {place: -1})
            if lower is None:
                continue
            outcome = lower.play(case)
            share, cost = outcome.attained(case.slo), outcome.hours()
            if share >= goal and cost < hours:
                worth = (hours - cost) / (max(0.0, kept - share) + 1e-4)
                options.append((worth, share, cost, lower))
        if not options:
            return best
        _, kept, hours, best = max(options, key=lambda option: option[0])


def _trade(schedule: Schedule, chance: random.Random, most: Targets) -> Schedule:
    """Two intervals of one pool changed."""
    role = chance.choice(ROLES)
    places = range(len(schedule.prefill))
    moves = {chance.choice(places): chance.choice((-2, -1)), chance.choice(places): 1}
    changed = _changed(schedule, role, moves)
    if changed is None or max(getattr(changed, role)) > most[role]:
        return schedule
    return changed


def _changed(schedule: Schedule, role: str, moves: dict[int, int]) -> Schedule | None:
    sizes = list(getattr(schedule, role))
    for place, move in moves.items():
        sizes[place] += move
    if min(sizes) < 1:
        return None
    return replace(schedule, **{role: tuple(sizes)})  # type: ignore[arg-type]


def refine(case: Case, goal: float, start: Schedule, interval_s: float, tries: int) -> Schedule:
    """A schedule of short intervals that meets ``goal``, no dearer than ``start``.

    One stretch of a pool is made smaller, and in every other try another one larger; what costs
    no more and meets the goal is kept. Equal arguments give equal schedules.
    """
    best = split(start, interval_s)
    hours = best.play(case).hours()
    chance = random.Random(tries)
    for _ in range(tries):
        role = chance.choices(ROLES, [sum(best.prefill), sum(best.decode)])[0]
        moved = _stretch(best, role, -chance.choice((1, 1, 2, 3)), chance)
        if chance.random() < 0.5:
            moved = _stretch(moved, role, 1, chance)
        if moved == best or max(getattr(moved, role)) > case.most[role]:
            continue
        outcome = moved.play(case)
        if outcome.hours() <= hours and outcome.attained(case.slo) >= goal:
            best, hours = moved, outcome.hours()
    return best


def split(schedule: Schedule, interval_s: float) -> Schedule:
    """The same sizes in shorter intervals, which must divide the longer ones and the offset."""
    times = round(schedule.interval_s / interval_s)
    skipped = round(schedule.offset_s / interval_s)
    fine = {
        role: tuple(n for n in getattr(schedule, role) for _ in range(times))[skipped:]
        for role in ROLES
    }
    return Schedule(interval_s, 0.0, fine["prefill"], fine["decode"])


def _stretch(schedule: Schedule, role: str, by: int, chance: random.Random) -> Schedule:
    """A stretch of a pool larger or smaller ``by`` so many, one worker at least."""
    sizes = list(getattr(schedule, role))
    length = chance.choice((1, 2, 4, 8, 16))
    first = chance.randrange(len(sizes))
    for place in range(first, min(len(sizes), first + length)):
        sizes[place] = max(1, sizes[place] + by)
    return replace(schedule, **{role: tuple(sizes)})  # type: ignore[arg-type]
