"""Every single fault of a kind in one small run: what chance would take long to find.

The small run has two prefill and two decode workers and a few requests, one cancelled, one
with a short deadline. It is played again for every message lost, repeated or late, and for
every node killed after every event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from .cluster import Cluster, Shape
from .network import Aim
from .run import Run
from .scenarios import Scenario
from .workers import Sizes

SMALL = Scenario(
    requests=5,
    load_s=0.06,
    settle_s=25.0,
    shape=Shape(clients=1, sizes=Sizes(frame_bytes=64, window=160, budget=480, stream_tokens=12)),
    prompt=20,
    answer=6,
    cancels=0.3,
    deadlines=0.2,
)
SEED = 123
"""Of the small run: it holds a cancel, a deadline, a shared prefix and a streamed prompt."""
KINDS = ("drop", "duplicate", "delay")


def measure(scenario: Scenario = SMALL, seed: int = SEED) -> tuple[int, int]:
    """Messages and events of the small run until everything has ended, without a fault."""
    run = Run(seed, scenario)
    figures = run.play()
    return figures["messages_settled"], figures["events_settled"]


def messages(kind: str, numbers: range, scenario: Scenario = SMALL) -> Iterator[Run]:
    """One run per message, with that message lost, repeated or late."""
    for number in numbers:
        yield Run(SEED, scenario, Aim(**{kind: number}))


def crashes(events: range, scenario: Scenario = SMALL) -> Iterator[Run]:
    """One run per event and node, with that node killed after that event."""
    count = len(Cluster(SEED, scenario.shape).nodes)
    for event in events:
        for index in range(count):
            strike: Callable[[Cluster], None] = partial(_kill, index)
            patient = replace(scenario, allowed=scenario.allowed | {"poisoned", "worker_lost"})
            yield Run(SEED, patient, at_event={event: strike})


def _kill(index: int, cluster: Cluster) -> None:
    cluster.nodes[index].crash()
