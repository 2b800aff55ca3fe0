"""Timers of many owners, each with at most one: arm, move and cancel in constant time.

Invariant: an armed owner is in exactly one slot, whose time is not after its own; it is
handed out once, never before its time and at most one slot width after it. A cancelled one
leaves nothing behind.

Times far away share coarse slots, and an owner found early is armed again. So the number of
slots is bounded whatever the deadlines, and moving a timer to later costs nothing.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, Protocol, TypeVar

SLOT_S = 0.01
"""Width of a slot; timers may be late by this much."""
COARSE = 50
"""Slots per coarse slot."""
FAR_S = 2.0
"""From here on times share coarse slots."""
_ROUNDING_S = 1e-6  # a slot's time in binary may be a hair before its owners' times


class Timed(Protocol):
    """What the wheel writes on its owners."""

    slot: int
    """Slot it is armed in, -1 when in none."""
    due_at: float
    """Its time."""


T = TypeVar("T", bound=Timed)


class Wheel(Generic[T]):
    """Timers kept in slots of :data:`SLOT_S` seconds."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[int, T]] = {}
        self._order: list[int] = []

    def arm(self, owner: T, when: float, now: float) -> None:
        """Hand out ``owner`` at ``when``; replaces its earlier time."""
        owner.due_at = when
        slot = math.ceil(when / SLOT_S)
        if when - now > FAR_S:
            slot = (slot - COARSE) // COARSE * COARSE
        if owner.slot >= 0:
            if owner.slot <= slot:
                return  # found early there, and armed again
            self._slots[owner.slot].pop(id(owner), None)
        owner.slot = slot
        members = self._slots.get(slot)
        if members is None:
            members = self._slots[slot] = {}
            heapq.heappush(self._order, slot)
        members[id(owner)] = owner

    def cancel(self, owner: T) -> None:
        """Do not hand out ``owner``; harmless when it is not armed."""
        if owner.slot >= 0:
            self._slots[owner.slot].pop(id(owner), None)
            owner.slot = -1

    def due(self, now: float) -> list[T]:
        """Take out every owner whose time has come."""
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
        """When :meth:`due` should be called, or None."""
        while self._order and not self._slots[self._order[0]]:
            del self._slots[heapq.heappop(self._order)]
        return self._order[0] * SLOT_S if self._order else None

    def __len__(self) -> int:
        return sum(len(members) for members in self._slots.values())
