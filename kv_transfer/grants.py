"""The grants of a decode worker: their slots with generations, and the byte credit they share.

Invariants of :class:`GrantTable`: freeing a slot raises its generation, so a :class:`GrantRef` to
an earlier grant no longer resolves; states change only along :data:`TRANSITIONS`; a request has one
live grant.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic

import numpy as np
import numpy.typing as npt

from baton.proto.errors import InternalError, ProtocolError
from baton.proto.layout import KVLayout
from baton.proto.wire.messages import Commit, GrantRef, KVFrame, Message, Reserve

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
    key: bytes = b""  # CURVE key of the connection that reserved; empty without keys
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
    layout: KVLayout | None = None  # of frames, unless they have this worker's blocks
    in_place: bool = False  # frames name blocks of the sender's GPU and carry no payload

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
        self._taken: dict[int, Slot[A]] = {}  # by index
        self._revoking: dict[tuple[bytes, int], list[Slot[A]]] = {}  # by request and attempt
        self.live: dict[bytes, Slot[A]] = {}  # by request: the grant of its highest attempt

    def take(self) -> Slot[A]:
        """Return a free slot."""
        if not self._free:
            self._slots.append(Slot(len(self._slots)))
            self._free.append(len(self._slots) - 1)
        slot = self._slots[self._free.pop()]
        self._taken[slot.index] = slot
        return slot

    def revoke(self, slot: Slot[A]) -> None:
        """Note that a grant has ended while its blocks may still be written."""
        slot.step("revoke")
        if slot.reserve is not None:
            key = (slot.reserve.request, slot.reserve.attempt)
            self._revoking.setdefault(key, []).append(slot)

    def free(self, slot: Slot[A]) -> None:
        """End a grant. Its slot starts again with the next generation."""
        if slot.state is GrantState.REVOKING and slot.reserve is not None:
            key = (slot.reserve.request, slot.reserve.attempt)
            self._revoking[key].remove(slot)
            if not self._revoking[key]:
                del self._revoking[key]
        slot.step("free")
        if slot.reserve and self.live.get(slot.reserve.request) is slot:
            del self.live[slot.reserve.request]
        del self._taken[slot.index]
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
        slots = self._revoking.get((request, attempt))
        return slots[0] if slots else None

    def taken(self) -> list[Slot[A]]:
        """All grants. A request has two while its previous grant is being revoked."""
        return list(self._taken.values())

    def check_integrity(self) -> None:
        """Raise IllegalTransition if a slot is in no list, in two, or in one of another state."""
        for slot in self._taken.values():
            if slot.state is GrantState.FREE or self._slots[slot.index] is not slot:
                raise IllegalTransition(f"slot {slot.index} is taken and {slot.state.value}")
        if sorted([*self._taken, *self._free]) != list(range(len(self._slots))):
            raise IllegalTransition("a slot is in no list, or in two")
        ended = [slot for slots in self._revoking.values() for slot in slots]
        revoking = [s for s in self._taken.values() if s.state is GrantState.REVOKING]
        if {slot.index for slot in ended} != {slot.index for slot in revoking}:
            raise IllegalTransition("the list of grants that end is wrong")

    def at(self, index: int) -> Slot[A]:
        """Return the slot with this index."""
        return self._slots[index]

    def ref(self, slot: Slot[A]) -> GrantRef:
        """Return the reference that names the slot's grant on the wire."""
        return GrantRef(self._incarnation, slot.index, slot.generation)


# --------------------------------------------------------------------------- byte credit


@dataclass(slots=True)
class _Account:
    expected: int  # bytes the whole transfer will need
    limited: bool = True
    credit: int = 0
    received: int = 0
    served: bool = False

    @property
    def outstanding(self) -> int:
        return self.credit - self.received


class CreditPool:
    """Limits the bytes that all senders of one receiver have in flight together.

    Shares ``budget`` bytes among grants, at most ``window`` each, first come first served.

    Invariant: the sum over all grants of (credit - bytes received) never exceeds the budget. So
    the receiver's memory for KV in flight is bounded, even if a sender misbehaves. Credit is
    cumulative per grant, so a repeated credit message changes nothing.

    Grants are served in order of arrival. A grant is served once its whole window fits into the
    budget, and it keeps that reservation. Otherwise many grants could each hold a remainder
    smaller than one frame, and none of them could send.

    An account that is not ``limited`` gets all its credit at once, outside the budget: its bytes
    are read where they are and occupy no memory here.

    The cost of a frame does not depend on the number of grants: ``_low`` lists the accounts that
    need more credit.
    """

    def __init__(self, budget: int, window: int) -> None:
        self._budget = budget
        self._window = min(window, budget)
        self._outstanding = 0
        self._reserved = 0  # sum of _share() over the served accounts
        self._accounts: OrderedDict[int, _Account] = OrderedDict()
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._low: dict[int, None] = {}  # served accounts whose credit must be raised, see _is_low
        self._news: dict[int, int] = {}  # raised credits, not yet returned by open() or top_up()

    @property
    def outstanding(self) -> int:
        """Bytes of credit that have been granted but not received yet."""
        return self._outstanding

    def keys(self) -> set[int]:
        """Return the keys of the accounts."""
        return set(self._accounts)

    def open(self, key: int, expected: int, *, limited: bool = True) -> int:
        """Start an account for ``expected`` bytes and return its first credit (may be 0)."""
        account = self._accounts[key] = _Account(expected, limited)
        if not limited:
            account.credit = expected
            return expected
        self._waiting[key] = None
        self._serve()
        return self._news.pop(key, 0)

    def close(self, key: int) -> None:
        """Remove an account and return its unused credit to the pool."""
        account = self._accounts.pop(key, None)
        if account:
            self._waiting.pop(key, None)
            self._low.pop(key, None)
            self._news.pop(key, None)
            self._outstanding -= account.outstanding * account.limited
            self._reserved -= self._share(account)

    def receive(self, key: int, nbytes: int) -> bool:
        """Book received bytes. Return False and book nothing if they exceed the credit."""
        account = self._accounts[key]
        if account.received + nbytes > account.credit:
            return False
        self._reserved -= self._share(account)
        account.received += nbytes
        self._reserved += self._share(account)
        self._outstanding -= nbytes * account.limited
        if self._is_low(account):
            self._low[key] = None
        return True

    def counted(self, key: int) -> int:
        """Credit already used, in bytes: received or written off as lost; 0 for a closed key."""
        account = self._accounts.get(key)
        return 0 if account is None else account.received

    def expect_again(self, key: int, nbytes: int) -> int:
        """Write off the bytes in flight as lost, expect ``nbytes`` more, return the new credit.

        If the budget has no room now, the credit is raised later by :meth:`top_up`. The account
        moves to the head of the queue, because its handoff is already under way.
        """
        account = self._accounts[key]
        self._outstanding -= account.outstanding * account.limited
        self._reserved -= self._share(account)
        account.received = account.credit
        account.expected = account.credit + nbytes
        if not account.limited:
            account.credit = account.expected
            return account.credit
        account.served = False
        self._low.pop(key, None)
        self._waiting[key] = None
        self._waiting.move_to_end(key, last=False)
        self._serve()
        return self._news.pop(key, account.credit)

    def unlimit(self, key: int, nbytes: int) -> int:
        """Give the rest of an account, ``nbytes``, all its credit, because it is read in place.

        Bytes in flight are written off. Returns the new credit.
        """
        account = self._accounts[key]
        if account.limited:
            self._outstanding -= account.outstanding
            self._reserved -= self._share(account)
            account.limited = account.served = False
            for queue in (self._waiting, self._low, self._news):
                queue.pop(key, None)
        return self.expect_again(key, nbytes)

    def top_up(self) -> list[tuple[int, int]]:
        """Raise credits that ran low. Return ``(key, new cumulative credit)`` for each raise."""
        self._serve()
        for key in self._low:
            self._raise(key, self._accounts[key])
        self._low.clear()
        raised, self._news = self._news, {}
        return list(raised.items())

    def check_integrity(self) -> None:
        """Raise InternalError if the sums disagree with the accounts or exceed the budget."""
        accounts = self._accounts.values()
        outstanding = sum(account.outstanding for account in accounts if account.limited)
        reserved = sum(self._share(account) for account in accounts)
        if (outstanding, reserved) != (self._outstanding, self._reserved):
            raise InternalError("the credit sums do not match the accounts")
        if {k for k, account in self._accounts.items() if self._is_low(account)} != set(self._low):
            raise InternalError("the list of accounts that need credit is wrong")
        if not 0 <= outstanding <= reserved <= self._budget:
            text = f"{outstanding} bytes of credit outstanding, {reserved} reserved"
            raise InternalError(f"{text}, budget {self._budget}")

    def _is_low(self, account: _Account) -> bool:
        """True if half the window of a served account is used up and more bytes are expected."""
        low = account.served and account.outstanding * 2 <= self._window
        return low and account.credit < account.expected

    def _share(self, account: _Account) -> int:
        """Bytes of the budget that a served account reserves: its largest outstanding credit."""
        return min(self._window, account.expected - account.received) if account.served else 0

    def _serve(self) -> None:
        """Serve waiting accounts in order while their shares fit into the budget."""
        while self._waiting:
            key = next(iter(self._waiting))
            account = self._accounts[key]
            account.served = True  # _share() is 0 for an account that is not served
            share = self._share(account)
            if self._reserved + share > self._budget:
                account.served = False
                break
            del self._waiting[key]
            self._reserved += share
            self._raise(key, account)

    def _raise(self, key: int, account: _Account) -> None:
        """Raise the credit to a full window. :meth:`_serve` reserved the bytes before."""
        room = min(account.expected - account.credit, self._window - account.outstanding)
        if room > 0:
            account.credit += room
            self._outstanding += room
            self._news[key] = account.credit
