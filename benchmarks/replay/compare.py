"""The policy beside its rivals on one case."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ...deploy.autoscale.metrics import ROLES
from ...deploy.autoscale.policy import Autoscaler
from ...deploy.autoscale.settings import ScaleSettings
from ...deploy.plan.bounds import Bounds
from .cases import GOAL
from .cluster import Outcome, Targets
from .oracle import Case, smallest


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
