"""Plans changes of role: which workers of a cluster should change, and when. Pure.

A change of role keeps hosts and loaded weights, so a cluster can follow it while it serves. Workers
may change at the start, and again during the trace if its load shifts. The times are guessed from
what fixed splits keep of each part of the trace. Then the schedule is simulated with its drains,
and it is reported only if the simulation shows a gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from baton.deploy.autoscale.policy import TURN_S

from .cluster import Replay, Scaler, Slo, fixed
from .goodput import KEEP, STEP, Cluster, Trials, Values

WINDOWS = 24
"""Maximum number of parts of the trace; each part has one split."""
PART_S = 2 * TURN_S
"""Minimum seconds of a part: in less time a change does not repay its drain."""
PER_MOVE = 0.002
"""Share of all requests that a change of role must win."""
WORTH = 1.02
"""Minimum goodput of a reported schedule, as a multiple of the best fixed split's."""
TRIED = (2, 5, 10, 20, 30, 40)
"""Steps above the rate of the best fixed split, for each of which a schedule is guessed."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's change of role, ``at`` seconds after the start of the trace; 0: now."""

    at: float
    worker: str
    role: str

    @property
    def command(self) -> str:
        """The command that makes the change."""
        return f"baton role {self.worker} {self.role}"


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of role and their gain.

    ``goodput``, ``kept``: with the changes. ``goodput_now``, ``kept_now``: of the present split, or
    of the best fixed split if no cluster runs. ``goodput_fixed``: of the best fixed split.
    """

    mode: str
    order: str
    moves: list[Move]
    goodput: float
    kept: float
    goodput_now: float
    kept_now: float
    goodput_fixed: float

    @property
    def gain(self) -> float:
        """Relative rise of the goodput; infinite if it was 0."""
        if self.goodput_now:
            return self.goodput / self.goodput_now - 1
        return math.inf if self.goodput else 0.0


class Schedule(msgspec.Struct, frozen=True):
    """Splits, each with the time from which it is wanted. ``start``: split before the first."""

    start: Cluster
    splits: Sequence[tuple[float, Cluster]]

    def scaler(self, speed: float) -> Scaler:
        """Return the targets at each moment of the trace at ``speed`` times its rate."""

        def targets(_metrics: object, now: float) -> dict[str, int]:
            wanted = self.start
            for at, split in self.splits:
                if at <= now * speed:
                    wanted = split
            return wanted.pools

        return targets

    def moves(self) -> Iterator[Move]:
        """Yield the changes. The worker that changed last changes back first."""
        pools = {
            "prefill": [f"prefill-{number}" for number in range(self.start.prefill)],
            "decode": [f"decode-{number}" for number in range(self.start.decode)],
        }
        for at, split in self.splits:
            for role, other in (("prefill", "decode"), ("decode", "prefill")):
                while len(pools[role]) < split.pools[role]:
                    worker = pools[other].pop()
                    pools[role].append(worker)
                    yield Move(at=at, worker=worker, role=role)


def find_moves(trials: Trials, slo: Slo, like: Cluster, now: Cluster | None = None) -> Moves | None:
    """Return the changes of role that raise the goodput of a cluster; None if none do.

    ``like``: its mode, order and number of workers. ``now``: its present split; None: no cluster
    runs, and it will start with the best fixed split.
    """
    workers = like.prefill + like.decode
    splits = [replace(like, prefill=p, decode=workers - p) for p in range(1, workers)]
    powers = {split: _power(trials.goodput(split, slo)) for split in splits}
    steady = max(splits, key=lambda split: (_floor(powers[split]), trials.kept(split, slo)))
    if now is not None and powers[now] == powers[steady]:
        steady = now
    start = now or steady
    best = Schedule(start, [(0.0, steady)] if steady != start else [])
    power = powers[steady]
    if power is not None:
        found = _scheduled(trials, slo, start, splits, power)
        if found is not None:
            best, power = found
    moves = list(best.moves())
    if not moves:
        return None
    return Moves(
        mode=like.mode,
        order=like.order,
        moves=moves,
        goodput=_rate(power),
        kept=_kept(trials, slo, best, 0),
        goodput_now=_rate(powers[start]),
        kept_now=trials.kept(start, slo),
        goodput_fixed=_rate(powers[steady]),
    )


def _scheduled(
    trials: Trials, slo: Slo, start: Cluster, splits: Sequence[Cluster], power: int
) -> tuple[Schedule, int] | None:
    """Return the best schedule and its power; None if it wins too little over a fixed split."""
    found: tuple[Schedule, int] | None = None
    least = power + math.ceil(math.log(WORTH, STEP))
    for more in TRIED:
        schedule = _guess(trials, slo, start, splits, power + more)
        if len(schedule.splits) < 2 or _kept(trials, slo, schedule, least) < KEEP:
            continue
        highest = least
        while _kept(trials, slo, schedule, highest + 1) >= KEEP:
            highest += 1
        if found is None or highest > found[1]:
            found = schedule, highest
    return found


def _guess(
    trials: Trials, slo: Slo, start: Cluster, splits: Sequence[Cluster], power: int
) -> Schedule:
    """Choose a split for each part of the trace, by the requests that each split keeps of it."""
    trace, speed = trials.trace, STEP**power
    span = trace[-1].at
    count = max(1, min(WINDOWS, int(span / speed / PART_S)))
    begins = [span * number / count for number in range(count)]
    wins: Values = np.zeros((count, len(splits)))
    for number, begin in enumerate(begins):
        end = begins[number + 1] if number + 1 < count else math.inf
        part = [replace(one, at=one.at - begin) for one in trace if begin <= one.at < end]
        for column, split in enumerate(splits if part else ()):
            outcome = fixed(part, trials.service, split.pools, trials.setup(split, slo), speed)
            wins[number, column] = sum(outcome.kept(slo))
    prefill = np.array([split.prefill for split in splits])
    cost = PER_MOVE * len(trace) * np.abs(prefill[:, None] - prefill[None, :])
    chosen = _cheapest(wins, cost, PER_MOVE * len(trace) * np.abs(prefill - start.prefill))
    found: list[tuple[float, Cluster]] = []
    before = start
    for at, index in zip(begins, chosen, strict=True):
        if splits[index] != before:
            before = splits[index]
            found.append((at, before))
    if not found or found[0][0]:
        found.insert(0, (0.0, start))
    return Schedule(start, found)


def _cheapest(wins: Values, cost: Values, first: Values) -> list[int]:
    """Return the column of each row, with the highest sum of wins minus costs of changes."""
    best = wins[0] - first
    came: list[npt.NDArray[np.int64]] = []
    for row in wins[1:]:
        options = best[:, None] - cost
        came.append(options.argmax(axis=0))
        best = options.max(axis=0) + row
    path = [int(best.argmax())]
    for before in reversed(came):
        path.append(int(before[path[-1]]))
    return path[::-1]


def _kept(trials: Trials, slo: Slo, schedule: Schedule, power: int) -> float:
    """Return the share of requests within both limits while workers change their roles."""
    setup = replace(trials.setup(schedule.start, slo), turn_s=TURN_S)
    speed = STEP**power
    replay = Replay(trials.trace, trials.service, 0.0, schedule.start.pools, setup, speed)
    return replay.run(schedule.scaler(speed)).attained(slo)


def _power(goodput: float) -> int | None:
    return round(math.log(goodput, STEP)) if goodput else None


def _floor(power: int | None) -> float:
    return -math.inf if power is None else power


def _rate(power: int | None) -> float:
    return 0.0 if power is None else STEP**power
