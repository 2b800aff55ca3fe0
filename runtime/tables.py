"""Timers, and tables that forget their entries.

=================== ==================================== ======================================
container           use                                  cost per operation
=================== ==================================== ======================================
:class:`TimerWheel` one timer per object, moved often    O(1); a timer may be late by one slot
:class:`KeyedHeap`  keys by time or position, in order   O(log n) amortized; exact
:class:`ExpiringMap` values with expiry times, bounded    O(log n) amortized; exact
:class:`RecentMap`  the values put last, without times   O(1)
=================== ==================================== ======================================

Memory is proportional to the live entries: cancelled, moved and replaced entries are cleaned up.
Pure: the caller passes the time, in monotonic seconds.
"""

from __future__ import annotations

import heapq
from math import ceil
from typing import Generic, Protocol, TypeVar

SLOT_S = 0.01
"""Width of a slot of :class:`TimerWheel` in seconds; a timer may be late by this much."""
COARSE = 50
"""Slots per coarse slot."""
FAR_S = 2.0
"""Times more than this many seconds ahead share coarse slots."""
SLACK = 64
"""Stale entries that :class:`KeyedHeap` always tolerates."""
_ROUNDING_S = 1e-6  # a slot's time may round to slightly before its owners' times


class Timed(Protocol):
    """Attributes that :class:`TimerWheel` sets on an owner."""

    slot: int
    """Index of the owner's slot, -1 if not armed."""
    due_at: float
    """Time of the timer, in monotonic seconds."""


T = TypeVar("T", bound=Timed)
K = TypeVar("K")
V = TypeVar("V")


class TimerWheel(Generic[T]):
    """At most one timer per owner: arm, move and cancel in O(1).

    Invariant: an armed owner is in exactly one slot, and the slot's time is not after the owner's
    time. The wheel returns the owner once, never before its time and at most one slot width after
    it.

    Distant times share coarse slots; an owner found there before its time is armed again. So the
    number of slots is bounded for any deadlines, and moving a timer to a later time is free.
    """

    def __init__(self) -> None:
        self._slots: dict[int, dict[T, None]] = {}  # owners by identity, in the order of arm()
        self._order: list[int] = []

    def arm(self, owner: T, when: float, now: float) -> None:
        """Set the timer of ``owner`` to ``when``, replacing its current timer."""
        owner.due_at = when
        slot = ceil(when / SLOT_S)
        if when - now > FAR_S:
            slot = (slot - COARSE) // COARSE * COARSE
        if owner.slot >= 0:
            if owner.slot <= slot:
                return  # due() finds it there early and arms it again
            del self._slots[owner.slot][owner]
        owner.slot = slot
        members = self._slots.get(slot)
        if members is None:
            members = self._slots[slot] = {}
            heapq.heappush(self._order, slot)
        members[owner] = None

    def cancel(self, owner: T) -> None:
        """Cancel the timer of ``owner``, if it is armed."""
        if owner.slot >= 0:
            del self._slots[owner.slot][owner]
            owner.slot = -1

    def due(self, now: float) -> list[T]:
        """Remove and return every owner whose time has come."""
        ready: list[T] = []
        while self._order and self._order[0] * SLOT_S <= now:
            members = self._slots.pop(heapq.heappop(self._order))
            for owner in members:
                owner.slot = -1
                if owner.due_at <= now + _ROUNDING_S:
                    ready.append(owner)
                else:
                    self.arm(owner, owner.due_at, now)
        return ready

    def next_time(self) -> float | None:
        """Return the time of the next call of :meth:`due`, None without timers."""
        while self._order and not self._slots[self._order[0]]:
            del self._slots[heapq.heappop(self._order)]
        return self._order[0] * SLOT_S if self._order else None

    def __len__(self) -> int:
        return sum(len(members) for members in self._slots.values())


class KeyedHeap(Generic[K]):
    """A priority queue of unique keys by ascending number; any key can be removed or moved.

    Invariant: each key is queued once, at the number of its last put. Keys with equal numbers keep
    their put order. The heap has at most twice as many entries as keys, plus :data:`SLACK`.
    """

    def __init__(self) -> None:
        self._entries: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []  # with stale entries of moved or dropped keys
        self._serial = 0  # breaks ties

    def put(self, key: K, at: float) -> None:
        """Queue ``key`` at number ``at``, or move it there."""
        self._serial += 1
        self._entries[key] = (at, self._serial)
        heapq.heappush(self._heap, (at, self._serial, key))
        if len(self._heap) > 2 * len(self._entries) + SLACK:
            self._heap = [(*entry, key) for key, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Remove ``key`` if it is queued."""
        self._entries.pop(key, None)

    def pop(self, limit: float) -> K | None:
        """Remove and return the first key with a number up to ``limit``, or None."""
        while self._heap and self._heap[0][0] <= limit:
            at, serial, key = heapq.heappop(self._heap)
            if self._entries.get(key) == (at, serial):
                del self._entries[key]
                return key
        return None

    def first(self) -> float | None:
        """Return the smallest number in the queue, or None."""
        while self._heap:
            at, serial, key = self._heap[0]
            if self._entries.get(key) == (at, serial):
                return at
            heapq.heappop(self._heap)
        return None

    def peek(self) -> K | None:
        """Return the first key in the queue, or None."""
        return None if self.first() is None else self._heap[0][2]

    def due(self, limit: float) -> list[K]:
        """Remove and return all keys with numbers up to ``limit``, in order."""
        keys: list[K] = []
        while (key := self.pop(limit)) is not None:
            keys.append(key)
        return keys

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)


class ExpiringMap(Generic[K, V]):
    """At most ``capacity`` values by key, each with an expiry time.

    Invariant: an entry is returned before its expiry time and never after it. A full map evicts
    the entry that would expire first. :meth:`expire` frees expired entries earlier, so
    ``evicted`` counts entries that were evicted although they were needed.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[K, tuple[V, float]] = {}
        # Expiry times, also stale ones of replaced entries. Not a KeyedHeap: it would keep a
        # second dictionary with the same keys.
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0  # breaks ties
        self._now = float("-inf")  # of the last expire()
        self.evicted = 0
        """Number of entries that a full map has evicted before their expiry time."""

    def put(self, key: K, value: V, until: float) -> None:
        """Set ``key`` to ``value``, to expire at ``until``."""
        entries = self._entries
        entries.pop(key, None)  # the order is that of the last puts
        entries[key] = (value, until)
        self._serial += 1
        heapq.heappush(self._heap, (until, self._serial, key))
        if len(entries) > self._capacity:
            self._evict()
        if len(self._heap) > 2 * len(entries) + SLACK:
            live = enumerate(entries.items())
            self._heap = [(until, serial, key) for serial, (key, (_, until)) in live]
            heapq.heapify(self._heap)

    def _evict(self) -> None:
        while True:
            until, _, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is not None and entry[1] == until:
                del self._entries[key]
                self.evicted += until > self._now
                return

    def get(self, key: K, now: float) -> V | None:
        """Return the value, or None if it is missing or expired at ``now``."""
        entry = self._entries.get(key)
        return entry[0] if entry is not None and entry[1] > now else None

    def holds(self, key: K, now: float) -> bool:
        """True if ``key`` has an entry that is not expired at ``now``."""
        entry = self._entries.get(key)
        return entry is not None and entry[1] > now

    def expire(self, now: float) -> None:
        """Remove expired entries."""
        self._now = now
        heap, entries = self._heap, self._entries
        while heap and heap[0][0] <= now:
            key = heapq.heappop(heap)[2]
            entry = entries.get(key)
            if entry is not None and entry[1] <= now:
                del entries[key]

    def __len__(self) -> int:
        return len(self._entries)


class RecentMap(Generic[K, V]):
    """The values of the ``size`` keys put last, and of fewer than ``size`` older keys.

    Invariant: a key is in one of two generations. A full new generation becomes the old one, whose
    keys are forgotten. This costs a third of an exact order, and the routers put two keys for
    every request.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._new: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def put(self, key: K, value: V) -> None:
        """Set ``key`` to ``value``."""
        self._new[key] = value
        if len(self._new) >= self._size:
            self._old, self._new = self._new, {}

    def get(self, key: K) -> V | None:
        """Return the value that was put last, or None if it is missing or forgotten."""
        value = self._new.get(key)
        return self._old.get(key) if value is None else value

    def __len__(self) -> int:
        return len(self._new) + len(self._old)
