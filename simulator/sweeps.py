"""Every single fault of a kind in one small run; random faults would take long to cover them.

The small run has two prefill and two decode workers and a few requests; one is cancelled, one
has a short deadline. The run is repeated for every message lost, duplicated or delayed, and for
every node killed after every event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from .cluster import Cluster
from .network import Aim
from .run import Run
from .scenarios import Scenario
from .shape import Shape, Sizes

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
"""Seed of the small run: it has a cancel, a deadline, a shared prefix and a streamed prompt."""
KINDS = ("drop", "duplicate", "delay")


def measure(scenario: Scenario = SMALL, seed: int = SEED) -> tuple[int, int]:
    """Return the numbers of messages and events in the small run without faults."""
    run = Run(seed, scenario)
    figures = run.play()
    return figures["messages_settled"], figures["events_settled"]


def messages(kind: str, numbers: range, scenario: Scenario = SMALL) -> Iterator[Run]:
    """Yield one run per message, with that message lost, duplicated or delayed."""
    for number in numbers:
        yield Run(SEED, scenario, Aim(**{kind: number}))


def crashes(events: range, scenario: Scenario = SMALL) -> Iterator[Run]:
    """Yield one run per event and node, with that node killed after that event."""
    count = len(Cluster(SEED, scenario.shape).nodes)
    for event in events:
        for index in range(count):
            strike: Callable[[Cluster], None] = partial(_kill, index)
            patient = replace(scenario, allowed=scenario.allowed | {"poisoned", "worker_lost"})
            yield Run(SEED, patient, at_event={event: strike})


def _kill(index: int, cluster: Cluster) -> None:
    cluster.nodes[index].crash()
