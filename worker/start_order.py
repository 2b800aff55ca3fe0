"""Decides which waiting prompt starts next, and learns how fast prompts are computed.

Without a TTFT target, prompts start in arrival order. With a target, the oldest prompt that can
still meet it goes first. A prompt that is already late gains nothing from an early start, but would
make the prompts after it late as well. So in a burst beyond the pool's capacity, first come first
served makes nearly every request late; this order makes only the excess late, and as the excess the
longest prompts, because fewest requests are late then. Late prompts start
when no other prompt waits. While others wait, one part of the time in :data:`LATE_TURN` is for late
prompts, so that they do not starve. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic, TypeVar

from baton.runtime.tables import KeyedHeap

LATE_TURN = 16
"""While both kinds wait, one part of the time in this many is for late prompts, of
:class:`RankedOrder` one start in this many for the oldest prompt."""
LOOK = 64
"""Waiting prompts that are looked at when one starts; a start costs no more with further ones."""
SPARE = 0.1
"""Part of the TTFT target kept as reserve, because in a burst every prompt starts at its latest."""
K = TypeVar("K")


def latest_start(asked: float, limit: float, own: float) -> float:
    """Return when a prompt that takes ``own`` seconds must start to meet its TTFT ``limit``."""
    return asked + (1 - SPARE) * limit - own


class StartOrder(Generic[K]):
    """Waiting keys in two ranks (in time, late), each ordered by place (arrival number).

    ``start_by``: latest start time at which a key is still in time. It is called when a key may
    be next, because its result depends on the cache content. None: arrival order only.
    ``seconds``: how long a key takes, the same; None: as if it took no time.

    Invariant: a key is contained once; a key found late stays late until it is taken. Whatever
    raised here before, :meth:`pop` returns each key once: an entry of the line without its place
    is no key.
    """

    def __init__(
        self,
        start_by: Callable[[K], float] | None = None,
        seconds: Callable[[K], float] | None = None,
    ) -> None:
        self._start_by = start_by
        self._own = seconds
        self._line: list[tuple[float, int, K]] = []  # in time, by place
        self._places: dict[K, tuple[float, int]] = {}  # of these
        self._late: KeyedHeap[K] = KeyedHeap()
        self._puts = 0
        self._passed = 0.0  # seconds, or starts, since the last late one, while late keys wait

    def put(self, key: K, place: float) -> None:
        """Add ``key``. It must not be contained yet."""
        self._puts += 1
        insort(self._line, (place, self._puts, key))
        self._places[key] = place, self._puts

    def drop(self, key: K) -> None:
        """Remove ``key`` if it is contained."""
        self._leave(key)
        self._late.drop(key)

    def pop(self, now: float) -> K | None:
        """Remove and return the key that starts now; None if no key waits."""
        late = self._late.peek()
        if late is not None and self._passed >= (LATE_TURN - 1) * self._weight(late):
            return self._pop_late()
        while self._line:
            key = self._next(now)
            if key is None:
                continue  # some were late, or no keys
            place = self._leave(key)
            if self._start_by is None or now <= self._start_by(key):
                self._passed += self._weight(key) if self._late else 0.0
                return key
            self._late.put(key, place)
        return self._pop_late()

    def _weight(self, key: K) -> float:
        """Return how much a start counts for the turns of late keys: its seconds, if known."""
        return (self._own(key) if self._own is not None else 0.0) or 1.0

    def _next(self, now: float) -> K | None:
        """Return the first key that starts in time with the most others, or None.

        Each key that would be late after those before it costs the longest so far its turn (the
        rule of Moore and Hodgson, which makes the fewest late). A key that lost its turn waits for
        its next one until its deadline has passed: it may take less time by then. If no key starts
        in time, all that were looked at are late.
        """
        start_by, own = self._start_by, self._own
        looked = self._line[: 1 if start_by is None or own is None else LOOK]
        if any(self._places.get(key) != (place, number) for place, number, key in looked):
            places = self._places.items()  # something raised between the two changes of a key
            self._line = sorted((place, number, key) for key, (place, number) in places)
            return None
        if start_by is None or own is None:
            return looked[0][2]
        at, given_up = now, set[K]()
        longest: list[tuple[float, int, K]] = []
        for place, number, key in looked:
            seconds = own(key)
            deadline = start_by(key) + seconds
            if now + seconds > deadline:
                given_up.add(key)
                if now > deadline:
                    self._leave(key)
                    self._late.put(key, place)
                continue
            at += seconds
            if deadline < math.inf:
                heappush(longest, (-seconds, number, key))
            if at > deadline:
                taken, _, other = heappop(longest)
                at += taken
                given_up.add(other)
        for _, _, key in looked:
            if key not in given_up:
                return key
        for place, _, key in looked:
            if key in self._places:
                self._leave(key)
                self._late.put(key, place)
        return None

    def _leave(self, key: K) -> float:
        """Remove a key from those in time; return its place."""
        found = self._places.pop(key, None)
        if found is None:
            return 0.0
        at = bisect_left(self._line, found, key=lambda one: one[:2])
        del self._line[at]
        return found[0]

    def _pop_late(self) -> K | None:
        self._passed = 0.0
        return self._late.pop(math.inf)

    def __len__(self) -> int:
        return len(self._places) + len(self._late)


class RankedOrder(Generic[K]):
    """Waiting keys by rank, equal ranks by place (arrival number).

    ``rank``: called when the key's turn may have come, once; None: the key has no rank. Such a key
    starts before all keys that arrived later. Every :data:`LATE_TURN`-th start goes to the key that
    arrived first, so that no key waits for ever.

    Invariant: ``_arrived`` has exactly the contained keys. After an error another heap can have a
    key too many or too few, but every contained key starts at some time, and no other key does.
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
        for heap in (self._arrived, self._new, self._ranked, self._unranked):
            heap.drop(key)
        self._places.pop(key, None)

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
        oldest = self._arrived.peek()
        if self._turn % LATE_TURN == 0:
            return oldest
        best, other = self._first(self._ranked), self._first(self._unranked)
        if best is None:
            return oldest if other is None else other
        return other if other is not None and self._places[other] < self._places[best] else best

    def _first(self, heap: KeyedHeap[K]) -> K | None:
        """Return the first contained key of a heap."""
        while (key := heap.peek()) is not None and key not in self._arrived:
            heap.drop(key)
        return key

    def __len__(self) -> int:
        return len(self._arrived)


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
