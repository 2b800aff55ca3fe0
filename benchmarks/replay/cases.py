"""The cases that are played: traces, limits, bounds, and the variations that test robustness.

Limits: chats and code completion as MLPerf Inference sets them for a 70B model's server (first
token within 2 s), with 50 ms between tokens; Mooncake's own for its long contexts (30 s, 100 ms).
"""

from __future__ import annotations

from dataclasses import dataclass

from .cluster import Slo
from .oracle import Case
from .service import ServiceModel
from .traces import load

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
class Variation:
    """One thing that is otherwise; ``slowness``: factor on all service times."""

    name: str
    cold_s: float = 60.0
    slowness: float = 1.0


VARIATIONS = (
    Variation("plain"),
    Variation("cold 10 s", cold_s=10.0),
    Variation("cold 180 s", cold_s=180.0),
    Variation("30 % slower", slowness=1.3),
    Variation("30 % faster", slowness=0.7),
)


def case(trace: str, variation: Variation = VARIATIONS[0]) -> Case:
    """A trace under a variation."""
    service = ServiceModel().scaled(variation.slowness)
    return Case(load(trace), service, SLOS[trace], variation.cold_s, MOST)
