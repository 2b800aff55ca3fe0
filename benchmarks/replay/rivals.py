"""The policy beside its rivals on one case: fixed pools, and the schedules of oracles.

The schedules that the search of :mod:`.oracle` found are kept in a file, so that a run can replay
them. ``python -m baton.benchmarks.autoscale --search`` finds them again (minutes). A schedule is
data to be played like any other: what it costs and attains is measured in every run, never stored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...deploy.autoscale.metrics import ROLES
from ...deploy.autoscale.policy import Autoscaler
from ...deploy.autoscale.settings import ScaleSettings
from ...deploy.plan.bounds import Bounds
from .cases import GOAL, WHERE_ANY_CAN, case
from .cluster import Outcome, Targets
from .oracle import Case, Schedule, refine, search, smallest

FILE = Path(__file__).with_name("oracles.json")
INTERVAL_S = 300.0
"""An oracle may change each pool every five minutes, twice as often as the policy."""
OFFSETS_S = (0.0, 150.0)
FINE_S = 15.0
FINE_TRIES = {"mooncake_conversation": 200}
KINDS = ("can", "least", "fine")
"""What the oracle keeps: nearly all that any pool could keep; 95 % of all, however chosen; the
same with sizes that change every :data:`FINE_S`, however often they turn."""


@dataclass(frozen=True)
class Row:
    """One line of the table; ``turns``: most changes of direction of a pool, per hour."""

    name: str
    attained: float
    hours: float
    prefill: float
    decode: float
    turns: float = 0.0


def row(name: str, outcome: Outcome, case: Case, first: Targets | None = None) -> Row:
    """What an outcome amounts to; pool sizes are means over the trace."""
    scale = 3600 / outcome.end
    return Row(
        name,
        outcome.attained(case.slo),
        outcome.hours(),
        outcome.hours("prefill") * scale,
        outcome.hours("decode") * scale,
        max(turns(outcome, first, role) for role in ROLES) * scale if first else 0.0,
    )


def turns(outcome: Outcome, first: Targets, role: str) -> int:
    """How often a pool's target changed its direction."""
    sizes = [first[role], *(size for _, who, size in outcome.changes if who == role)]
    rises = [after > before for before, after in pairwise(sizes)]
    return sum(a != b for a, b in pairwise(rises))


def scaler(case: Case, first: Targets) -> Autoscaler:
    """The policy as the controller makes it, knowing limits, bounds and the usual start."""
    settings = ScaleSettings(
        slo_ttft=case.slo.ttft,
        slo_itl=case.slo.itl,
        bounds=Bounds(prefill_max=case.most["prefill"], decode_max=case.most["decode"]),
    )
    return Autoscaler(settings, first)


def policy(case: Case, first: Targets) -> Outcome:
    """The case under the policy, from pools of size ``first``."""
    judge = scaler(case, first)
    return case.replay(first).run(lambda metrics, now: judge.observe(metrics(), now))


def at_once(case: Case, first: Targets) -> Outcome:
    """The largest pools, ordered when the trace begins: hardly more can be kept."""
    return case.replay(first).run(lambda _metrics, _now: case.most)


def first_pools(case: Case) -> Targets:
    """What an operator has before any autoscaling: the smallest fixed pools that keep 95 %."""
    return smallest(case, GOAL)


def equal_cost(case: Case, hours: float) -> Outcome:
    """The best fixed pools of no more than ``hours`` (to half a worker), split in hindsight."""
    workers = round(hours * 3600 / case.trace[-1].at)
    splits = [
        {"prefill": workers - decode, "decode": decode}
        for decode in range(1, min(case.most["decode"], workers - 1) + 1)
        if workers - decode <= case.most["prefill"]
    ]
    played = [case.fixed(split) for split in splits]
    return max(played, key=lambda outcome: outcome.attained(case.slo))


def stored(trace: str, kind: str) -> Schedule:
    """The schedule found for a trace."""
    found: dict[str, Any] = json.loads(FILE.read_text())[trace][kind]
    return Schedule(
        found["interval_s"], found["offset_s"], tuple(found["prefill"]), tuple(found["decode"])
    )


def goal(trace: str, kind: str) -> float:
    """Share of requests within the limits that this oracle must reach."""
    this = case(trace)
    can = this.fixed(this.most).attained(this.slo)
    return WHERE_ANY_CAN * can if kind == "can" else min(GOAL, can)


def find(trace: str, kind: str) -> Schedule:
    """Search anew; the fine one goes on from the stored one of kind ``least``."""
    this, least = case(trace), goal(trace, kind)
    if kind == "fine":
        tries = FINE_TRIES.get(trace, 500)
        return refine(this, least, stored(trace, "least"), FINE_S, tries)
    return search(this, least, INTERVAL_S, OFFSETS_S)
