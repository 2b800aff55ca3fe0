"""Decides which waiting prompt starts next, and learns how fast prompts are computed.

Without a TTFT target, prompts start in arrival order. With a target, the oldest prompt that can
still meet it goes first. A prompt that is already late gains nothing from an early start, but would
make the prompts after it late as well. So in a burst beyond the pool's capacity, first come first
served makes nearly every request late; this order makes only the excess late. Late prompts start
when no other prompt waits. While others wait, every :data:`LATE_TURN`-th start goes to a late
prompt, so that late prompts do not starve. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.runtime.tables import KeyedHeap

LATE_TURN = 16
"""While both kinds wait, one start out of this many goes to a late prompt."""
SPARE = 0.1
"""Part of the TTFT target kept as reserve, because in a burst every prompt starts at its latest."""
K = TypeVar("K")


def latest_start(asked: float, limit: float, own: float) -> float:
    """Return when a prompt that takes ``own`` seconds must start to meet its TTFT ``limit``."""
    return asked + (1 - SPARE) * limit - own


class StartOrder(Generic[K]):
    """Waiting keys in two ranks (in time, late), each ordered by place (arrival number).

    ``start_by``: latest start time at which a key is still in time. It is called when the
    key's turn comes, because its result depends on the cache content. None: arrival order only.

    Invariant: a key is contained once; a key found late stays late until it is taken.
    """

    def __init__(self, start_by: Callable[[K], float] | None = None) -> None:
        self._start_by = start_by
        self._in_time: KeyedHeap[K] = KeyedHeap()
        self._late: KeyedHeap[K] = KeyedHeap()
        self._passed = 0  # starts since the last late one, while late keys wait

    def put(self, key: K, place: float) -> None:
        """Add ``key``. It must not be contained yet."""
        self._in_time.put(key, place)

    def drop(self, key: K) -> None:
        """Remove ``key`` if it is contained."""
        self._in_time.drop(key)
        self._late.drop(key)

    def pop(self, now: float) -> K | None:
        """Remove and return the key that starts now; None if no key waits."""
        if self._late and self._passed + 1 >= LATE_TURN:
            return self._pop_late()
        while (place := self._in_time.first()) is not None:
            key = self._in_time.pop(place)
            if key is None:
                break
            if self._start_by is None or now <= self._start_by(key):
                self._passed += 1 if self._late else 0
                return key
            self._late.put(key, place)
        return self._pop_late()

    def _pop_late(self) -> K | None:
        self._passed = 0
        return self._late.pop(math.inf)

    def __len__(self) -> int:
        return len(self._in_time) + len(self._late)


class RankedOrder(Generic[K]):
    """Waiting keys by rank, equal ranks by place (arrival number).

    ``rank``: called when the key's turn may have come, once; None: the key has no rank. Such a key
    starts before all keys that arrived later. Every :data:`LATE_TURN`-th start goes to the key that
    arrived first, so that no key waits for ever.
    """

    def __init__(self, rank: Callable[[K, float], float | None]) -> None:
        self._rank = rank
        self._new: KeyedHeap[K] = KeyedHeap()  # without a call of rank yet
        self._ranked: KeyedHeap[K] = KeyedHeap()
        self._unranked: KeyedHeap[K] = KeyedHeap()  # by place
        self._arrived: KeyedHeap[K] = KeyedHeap()  # all of them by place
        self._places: dict[K, float] = {}
        self._turn = 0

    def put(self, key: K, place: float) -> None:
        """Add ``key``. It must not be contained yet."""
        self._places[key] = place
        self._new.put(key, place)
        self._arrived.put(key, place)

    def drop(self, key: K) -> None:
        """Remove ``key`` if it is contained."""
        if self._places.pop(key, None) is not None:
            for heap in (self._new, self._ranked, self._unranked, self._arrived):
                heap.drop(key)

    def pop(self, now: float) -> K | None:
        """Remove and return the key that starts now; None if no key waits."""
        while (fresh := self._new.pop(math.inf)) is not None:
            rank = self._rank(fresh, now)
            if rank is None:
                self._unranked.put(fresh, self._places[fresh])
            else:
                self._ranked.put(fresh, rank)
        self._turn += 1
        key = self._next()
        if key is not None:
            self.drop(key)
        return key

    def _next(self) -> K | None:
        if self._turn % LATE_TURN == 0:
            return self._arrived.peek()
        best, other = self._ranked.peek(), self._unranked.peek()
        if best is None or other is None:
            return other if best is None else best
        return other if self._places[other] < self._places[best] else best

    def __len__(self) -> int:
        return len(self._places)


NEW = 0.1
"""Weight of the latest step. A smaller step weighs less, in proportion to the usual step size."""


class Pace:
    """Seconds per prompt token; 0 before the first step."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self._usual = 0.0  # typical number of tokens per step

    def learn(self, tokens: int, seconds: float) -> None:
        """Update the average: a step of ``tokens`` prompt tokens took ``seconds``."""
        if tokens <= 0 or not seconds > 0:
            return
        if not self.seconds_per_token:
            self.seconds_per_token, self._usual = seconds / tokens, float(tokens)
            return
        weight = NEW * min(1.0, tokens / self._usual)
        self._usual += NEW * (tokens - self._usual)
        self.seconds_per_token += weight * (seconds / tokens - self.seconds_per_token)
