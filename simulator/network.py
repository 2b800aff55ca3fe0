"""A seeded network and clock.

Messages between two nodes use a named connection. A connection delivers in order unless a
reordering fault strikes, and loses messages in flight when it breaks. Faults are drawn from the
seed or aimed at single messages by number, so every run can be repeated exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

Link = tuple[str, str]
"""Source and target of one direction of a connection."""


@dataclass(slots=True, frozen=True)
class Faults:
    """Fault probabilities per message, and the range of delays in seconds."""

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    damage: float = 0.0  # of KV payloads and of control messages between workers
    min_delay: float = 0.0001
    max_delay: float = 0.002


@dataclass(slots=True, frozen=True)
class Aim:
    """Faults for single messages, numbered from 1 in sending order."""

    drop: int = 0
    duplicate: int = 0
    delay: int = 0
    delay_s: float = 0.3


@dataclass(slots=True)
class Network:
    """Event queue and message delivery."""

    random: Random
    faults: Faults = field(default_factory=Faults)
    aim: Aim = field(default_factory=Aim)
    now: float = 0.0
    sent: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    events: int = 0
    blocked: set[Link] = field(default_factory=set)
    """Directions that pass no messages."""
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: int = 0
    _last: dict[Link, float] = field(default_factory=dict)
    _lives: dict[Link, int] = field(default_factory=dict)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Schedule a call at simulated time ``when``."""
        self._order += 1
        heapq.heappush(self._heap, (max(when, self.now), self._order, call))

    def after(self, delay: float, call: Callable[[], None]) -> None:
        """Schedule a call ``delay`` seconds from now."""
        self.at(self.now + delay, call)

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Deliver from ``source`` to ``target``, unless a fault prevents it."""
        self.sent += 1
        faults, random, link = self.faults, self.random, (source, target)
        dropped = self.sent == self.aim.drop or link in self.blocked
        if random.random() < faults.loss or dropped:
            self.lost += 1
            return
        twice = random.random() < faults.duplication or self.sent == self.aim.duplicate
        self.duplicated += twice
        for _ in range(1 + twice):
            when = self.now + random.uniform(faults.min_delay, faults.max_delay)
            if self.sent == self.aim.delay:
                self.reordered += 1
                when += self.aim.delay_s
            elif random.random() < faults.reordering:
                self.reordered += 1
                when += faults.max_delay * 5
            else:
                when = max(when, self._last.get(link, 0.0))
                self._last[link] = when
            self._deliver(link, when, deliver)

    def _deliver(self, link: Link, when: float, deliver: Callable[[], None]) -> None:
        lives = self._lives
        life = lives.get(link, 0)

        def arrive() -> None:
            if lives.get(link, 0) == life:
                deliver()
            else:
                self.lost += 1

        self._order += 1
        heapq.heappush(self._heap, (when, self._order, arrive))

    def cut(self, one: str, other: str) -> None:
        """Lose all messages in flight between two nodes, in both directions."""
        for link in ((one, other), (other, one), (one + "/data", other), (other + "/data", one)):
            self._lives[link] = self._lives.get(link, 0) + 1

    def step(self) -> bool:
        """Run the next event. Return False if none is left."""
        if not self._heap:
            return False
        self.now, _, call = heapq.heappop(self._heap)
        self.events += 1
        call()
        return True
