"""The cases that are played: traces, limits, bounds, and the variations that test robustness.

Limits: chats and code completion as MLPerf Inference sets them for a 70B model's server (first
token within 2 s), with 50 ms between tokens; Mooncake's own for its long contexts (30 s, 100 ms).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.forecast.cluster import Outcome, Replay, Setup, Slo, Targets, fixed
from baton.forecast.service import ServiceModel
from baton.loadgen.traces import Arrival, read_trace

FOLDER = Path(__file__).parents[1] / "traces"
"""Request traces, with their sources and licences in README.md there."""

MOST = {"prefill": 16, "decode": 8}
SLOS = {
    "azure2023_code": Slo(ttft=2.0, itl=0.05),
    "azure2023_conv": Slo(ttft=2.0, itl=0.05),
    "mooncake_conversation": Slo(ttft=30.0, itl=0.1),
    "mooncake_synthetic": Slo(ttft=30.0, itl=0.1),
}
GOAL = 0.95
"""Share of requests within the limits that a policy must reach."""
WHERE_ANY_CAN = 0.99
"""Share of the requests which the largest pools keep that the oracle keeps."""


@dataclass(frozen=True)
class Case:
    """What a schedule is played against; ``most``: largest pools allowed."""

    trace: Sequence[Arrival]
    service: ServiceModel
    slo: Slo
    cold_s: float
    most: Targets
    turn_s: float = 0.0

    def replay(self, first: Targets) -> Replay:
        """A run from pools of size ``first``, with the order of prompts that limits bring."""
        return Replay(self.trace, self.service, self.cold_s, first, self._setup)

    def fixed(self, pool: Targets) -> Outcome:
        """On pools that never change."""
        return fixed(self.trace, self.service, pool, self._setup)

    @property
    def _setup(self) -> Setup:
        return Setup(slo_ttft=self.slo.ttft, turn_s=self.turn_s)


@dataclass(frozen=True)
class Variation:
    """One deviation from the operator's assumptions.

    ``slowness``: factor on all service times. ``rate``: 0.5 leaves every other request out by
    chance, 2 lays the trace over itself, half its length later and with other prefixes.
    ``shift``: part of the trace that is played last instead of first.
    """

    name: str
    cold_s: float = 60.0
    slowness: float = 1.0
    rate: float = 1.0
    shift: float = 0.0


VARIATIONS = (
    Variation("plain"),
    Variation("start 5 s, a local process", cold_s=5.0),
    Variation("start 45 s, a Ray host", cold_s=45.0),
    Variation("start 180 s", cold_s=180.0),
    Variation("workers 30 % slower", slowness=1.3),
    Variation("workers 30 % faster", slowness=0.7),
    Variation("half the requests", rate=0.5),
    Variation("twice the requests", rate=2.0),
    Variation("begun after a quarter", shift=0.25),
    Variation("begun in the middle", shift=0.5),
    Variation("begun after three quarters", shift=0.75),
)


def load(name: str, folder: Path = FOLDER) -> list[Arrival]:
    """Return all requests of the trace ``name``. Raises InputError for a damaged file."""
    return read_trace(folder / f"{name}.csv.gz")


def case(trace: str, variation: Variation = VARIATIONS[0]) -> Case:
    """A trace under a variation; twice the requests may have twice the workers."""
    service = ServiceModel().scaled(variation.slowness)
    most = {role: round(size * max(1.0, variation.rate)) for role, size in MOST.items()}
    return Case(varied(load(trace), variation), service, SLOS[trace], variation.cold_s, most)


def varied(trace: list[Arrival], variation: Variation) -> list[Arrival]:
    """The requests that come under a variation, by arrival."""
    if variation.rate == 0.5:
        chance = random.Random(1)
        trace = [arrival for arrival in trace if chance.random() < 0.5]
    elif variation.rate == 2:
        others = [
            replace(arrival, blocks=tuple(b"other" + name for name in arrival.blocks))
            for arrival in begun_at(trace, 0.5)
        ]
        trace = sorted([*trace, *others], key=lambda arrival: arrival.at)
    elif variation.rate != 1:
        raise ValueError(f"no trace of {variation.rate} times the requests")
    return begun_at(trace, variation.shift)


def begun_at(trace: list[Arrival], part: float) -> list[Arrival]:
    """The trace as a ring, begun after this part of it."""
    end = trace[-1].at
    if not part:
        return trace
    moved = [replace(arrival, at=(arrival.at - part * end) % end) for arrival in trace]
    return sorted(moved, key=lambda arrival: arrival.at)
