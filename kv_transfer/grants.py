"""The grant table of a decode worker: slots with generations, each in one state.

Invariants: freeing a slot raises its generation, so a :class:`GrantRef` to an earlier grant no
longer resolves; states change only along :data:`TRANSITIONS`; a request has one live grant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic

import numpy as np
import numpy.typing as npt

from ..proto.errors import ProtocolError
from ..proto.wire.messages import Commit, GrantRef, KVFrame, Message, Reserve
from .store import A

Peer = bytes
"""Routing identity of a prefill worker's control connection."""


class GrantState(Enum):
    """Life of a slot."""

    FREE = "free"
    GRANTED = "granted"  # blocks reserved, nothing arrived
    FILLING = "filling"  # frames arrive
    OWNED = "owned"  # committed: the decode scheduler holds the blocks
    REVOKING = "revoking"  # ended, but this worker or the sender may still write to the blocks


TRANSITIONS: dict[tuple[GrantState, str], GrantState] = {
    (GrantState.FREE, "reserve"): GrantState.GRANTED,
    (GrantState.GRANTED, "frame"): GrantState.FILLING,
    (GrantState.FILLING, "frame"): GrantState.FILLING,
    (GrantState.GRANTED, "own"): GrantState.OWNED,  # everything was cached
    (GrantState.FILLING, "own"): GrantState.OWNED,
    (GrantState.GRANTED, "free"): GrantState.FREE,
    (GrantState.FILLING, "free"): GrantState.FREE,
    (GrantState.OWNED, "free"): GrantState.FREE,
    (GrantState.GRANTED, "revoke"): GrantState.REVOKING,
    (GrantState.FILLING, "revoke"): GrantState.REVOKING,
    (GrantState.REVOKING, "free"): GrantState.FREE,
}


class IllegalTransition(ProtocolError):
    """An event that the grant's state forbids; always a bug of this worker."""

    code = "illegal_transition"


@dataclass(slots=True)
class Slot(Generic[A]):
    """The table entry of one grant; each new generation starts as a fresh Slot."""

    index: int
    generation: int = 0
    state: GrantState = GrantState.FREE
    reserve: Reserve | None = None
    peer: Peer = b""
    allocation: A | None = None
    arrived: npt.NDArray[np.bool_] | None = None  # bool [layers, blocks]: cells received intact
    moving: dict[int, KVFrame] = field(default_factory=dict)  # by index: being written
    fenced: bool = False  # the sender has stopped writing
    parting: Message | None = None  # final answer to the peer, sent when the blocks are free
    damaged: dict[int, int] = field(default_factory=dict)  # frame index -> bytes
    frames: dict[int, int] = field(default_factory=dict)  # frame index -> checksum
    sizes: int = 0  # intact bytes
    came: int = 0  # bytes of all received frames, including damaged ones
    commit: Commit | None = None
    refusals: int = 0
    expires: float = 0.0
    progress_at: float = 0.0
    asked_at: float = 0.0
    credit: int = 0

    def step(self, event: str) -> None:
        """Change the state. Raises IllegalTransition if the state forbids ``event``."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalTransition(f"grant {self.index}: {event} in state {self.state.value}")
        self.state = target


class GrantTable(Generic[A]):
    """All slots of one decode incarnation, and the live grant of each request."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._slots: list[Slot[A]] = []
        self._free: list[int] = []
        self.live: dict[bytes, Slot[A]] = {}  # by request: the grant of its highest attempt

    def take(self) -> Slot[A]:
        """Return a free slot."""
        if not self._free:
            self._slots.append(Slot(len(self._slots)))
            return self._slots[-1]
        return self._slots[self._free.pop()]

    def free(self, slot: Slot[A]) -> None:
        """End a grant. Its slot starts again with the next generation."""
        slot.step("free")
        if slot.reserve and self.live.get(slot.reserve.request) is slot:
            del self.live[slot.reserve.request]
        self._slots[slot.index] = Slot(slot.index, slot.generation + 1)
        self._free.append(slot.index)

    def find(self, grant: GrantRef) -> Slot[A] | None:
        """Return the slot of a grant that has not ended, else None."""
        if grant.incarnation != self._incarnation or not 0 <= grant.slot < len(self._slots):
            return None
        slot = self._slots[grant.slot]
        live = slot.generation == grant.generation and slot.state is not GrantState.FREE
        return slot if live else None

    def find_attempt(self, request: bytes, attempt: int) -> Slot[A] | None:
        """Return the live grant of a request if it belongs to this attempt, else None."""
        slot = self.live.get(request)
        held = slot is not None and slot.reserve is not None and slot.reserve.attempt == attempt
        return slot if held else None

    def find_revoking(self, request: bytes, attempt: int) -> Slot[A] | None:
        """Return the ended grant of this attempt whose blocks are still being written, or None."""
        for slot in self._slots:
            reserve = slot.reserve
            if slot.state is not GrantState.REVOKING or reserve is None:
                continue
            if (reserve.request, reserve.attempt) == (request, attempt):
                return slot
        return None

    def taken(self) -> list[Slot[A]]:
        """All grants. A request has two while its previous grant is being revoked."""
        return [slot for slot in self._slots if slot.state is not GrantState.FREE]

    def at(self, index: int) -> Slot[A]:
        """Return the slot with this index."""
        return self._slots[index]

    def ref(self, slot: Slot[A]) -> GrantRef:
        """Return the reference that names the slot's grant on the wire."""
        return GrantRef(self._incarnation, slot.index, slot.generation)
