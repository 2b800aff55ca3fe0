"""A timer wheel with at most one timer per owner: arm, move and cancel in constant time.

Invariant: an armed owner is in exactly one slot, and the slot's time is not after the owner's time.
The wheel returns the owner once, never before its time and at most one slot width after it.
A cancelled timer leaves no entry.

Distant times share coarse slots; an owner found there before its time is armed again. So the number
of slots is bounded for any deadlines, and moving a timer to a later time is free.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, Protocol, TypeVar

SLOT_S = 0.01
"""Width of a slot in seconds; a timer may be late by this much."""
COARSE = 50
"""Slots per coarse slot."""
FAR_S = 2.0
"""Times more than this many seconds ahead share coarse slots."""
_ROUNDING_S = 1e-6  # a slot's time may round to slightly before its owners' times


class Timed(Protocol):
    """Attributes that the wheel sets on an owner."""

    slot: int
    """Index of the owner's slot, -1 if not armed."""
    due_at: float
    """Time of the timer, in monotonic seconds."""


T = TypeVar("T", bound=Timed)


class TimerWheel(Generic[T]):
    """Timers kept in slots of :data:`SLOT_S` seconds."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[int, T]] = {}
        self._order: list[int] = []

    def arm(self, owner: T, when: float, now: float) -> None:
        """Set the timer of ``owner`` to ``when``, replacing its current timer."""
        owner.due_at = when
        slot = math.ceil(when / SLOT_S)
        if when - now > FAR_S:
            slot = (slot - COARSE) // COARSE * COARSE
        if owner.slot >= 0:
            if owner.slot <= slot:
                return  # due() finds it there early and arms it again
            self._slots[owner.slot].pop(id(owner), None)
        owner.slot = slot
        members = self._slots.get(slot)
        if members is None:
            members = self._slots[slot] = {}
            heapq.heappush(self._order, slot)
        members[id(owner)] = owner

    def cancel(self, owner: T) -> None:
        """Cancel the timer of ``owner``, if it is armed."""
        if owner.slot >= 0:
            self._slots[owner.slot].pop(id(owner), None)
            owner.slot = -1

    def due(self, now: float) -> list[T]:
        """Remove and return every owner whose time has come."""
        ready: list[T] = []
        while self._order and self._order[0] * SLOT_S <= now:
            members = self._slots.pop(heapq.heappop(self._order))
            for owner in members.values():
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
