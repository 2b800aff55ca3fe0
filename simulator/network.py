"""A network and a clock that obey a seed.

Messages between two nodes travel over named connections; a connection delivers in order
unless reordering strikes, and loses what is under way when an end dies. Faults are drawn
from the seed, so a run is repeated exactly by its seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random


@dataclass(slots=True, frozen=True)
class Faults:
    """Chances per message, and the spread of delays in seconds."""

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    damage: float = 0.0  # of a KV frame's payload
    min_delay: float = 0.0001
    max_delay: float = 0.002


@dataclass(slots=True)
class Network:
    """Event heap and message delivery."""

    random: Random
    faults: Faults = field(default_factory=Faults)
    now: float = 0.0
    sent: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    events: int = 0
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: int = 0
    _last: dict[tuple[str, str], float] = field(default_factory=dict)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at simulated time ``when``."""
        self._order += 1
        heapq.heappush(self._heap, (max(when, self.now), self._order, call))

    def after(self, delay: float, call: Callable[[], None]) -> None:
        """Call ``delay`` seconds from now."""
        self.at(self.now + delay, call)

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Deliver over the connection from ``source`` to ``target``, if the faults allow."""
        self.sent += 1
        faults, random = self.faults, self.random
        if random.random() < faults.loss:
            self.lost += 1
            return
        copies = 1
        if random.random() < faults.duplication:
            self.duplicated += 1
            copies = 2
        for _ in range(copies):
            when = self.now + random.uniform(faults.min_delay, faults.max_delay)
            if random.random() < faults.reordering:
                self.reordered += 1
                when += faults.max_delay * 5
            else:
                when = max(when, self._last.get((source, target), 0.0))
                self._last[(source, target)] = when
            self.at(when, deliver)

    def step(self) -> bool:
        """Run the next event; False when nothing is left."""
        if not self._heap:
            return False
        self.now, _, call = heapq.heappop(self._heap)
        self.events += 1
        call()
        return True
