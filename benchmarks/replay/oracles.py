"""The schedules that the search of :mod:`.oracle` found, kept so that a run can replay them.

``python -m baton.benchmarks.autoscale --search`` finds them again (minutes). A schedule is data
to be played like any other: what it costs and attains is measured in every run, never stored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .cases import GOAL, WHERE_ANY_CAN, case
from .oracle import Schedule, refine, search

FILE = Path(__file__).with_name("oracles.json")
INTERVAL_S = 300.0
"""An oracle may change each pool every five minutes, twice as often as the policy."""
OFFSETS_S = (0.0, 150.0)
FINE_S = 15.0
FINE_TRIES = {"mooncake_conversation": 200}
KINDS = ("can", "least", "fine")
"""What the oracle keeps: nearly all that any pool could keep; 95 % of all, however chosen; the
same with sizes that change every :data:`FINE_S`, however often they turn."""


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
