"""The decode side of a handoff: control messages and timers, from Reserve to Release.

Invariants: a grant is named by (incarnation, slot, generation), and freeing a slot raises its
generation, so a late message can only be stale; every Reserve, Commit and Release is answered, with
the same answer if it is repeated.

Theory of operation
-------------------

*Names.* A frame or a message of an ended grant names a generation that no longer exists, so it is
dropped without any memory of that grant. Only two things are remembered, until they expire
(:mod:`.past_attempts`): the attempts that were released or aborted, since a late Reserve of one
would hold blocks for no request, and each Committed, since it may have to be repeated.

*All or nothing.* A Reserve gets the blocks of its whole prompt and growth, or Busy. Two prompts
with half of their blocks each would wait for each other for ever. There is no queue here: the
prefill worker tries again, and the router chooses another decode worker after a few tries.

*Ownership passes once*, when each (layer, block) cell has arrived intact and the digest of the
manifest agrees. Commit may overtake frames, which have another connection. So an incomplete
manifest is answered only if no frame came for ``patience``: with the list of missing frames, and
with new credit for their bytes. After ``max_refusals`` such rounds the handoff fails.

*Ends.* A grant without an owner ends by its sender's Release, by an Abort of a router, by a higher
attempt, by PeerDead, at its deadline, or if its sender was pinged for the whole timeout and sent
nothing. A write that is under way keeps the grant REVOKING, and only the end of that write frees
the blocks; if the sender writes them itself, its Fence does. Rejected: free them after a timeout,
since nothing bounds the pause of a writer.

*Lost Releases.* Each ``lease`` seconds the sender is asked about its grant, by a Grant. A sender
that does not want it any more answers Release. So a lost Release holds blocks for seconds, not
until the deadline of the request.

*PeerDead keeps no tombstones.* The worker may still serve another router and reserve again; the
router that declared it dead aborts the attempts that it moves, one by one.

:mod:`.receiver_grants` holds blocks and credit, :mod:`.receiver_data` handles frames. None of them
depends on sockets, pools or models: blocks come from a :class:`.store.BlockStore`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Generic

from baton.proto.layout import KVLayout
from baton.proto.limits import MAX_CONTEXT_TOKENS
from baton.proto.wire.messages import (
    Aborted,
    Busy,
    Commit,
    Fence,
    GrantRef,
    Message,
    Ping,
    Release,
    Released,
    Reserve,
    Stale,
)
from baton.proto.wire.proofs import Holder

from .grants import GrantState, IllegalTransition, Peer, Slot
from .past_attempts import PastAttempts
from .receiver_data import ReceiverData
from .receiver_grants import Output, ReceiverConfig, ReceiverGrants, Reply
from .store import A, BlockStore
from .timeout import Contacts


class Receiver(Generic[A]):
    """All grants of one decode worker."""

    def __init__(
        self, incarnation: int, layout: KVLayout, store: BlockStore[A], config: ReceiverConfig
    ) -> None:
        self._config = config
        self._past = PastAttempts(config.attempts)
        self._grants: ReceiverGrants[A] = ReceiverGrants(incarnation, layout, store, config)
        self.data: ReceiverData[A] = ReceiverData(self._grants, self._past)
        self.contacts = Contacts(config.timeout)

    # ------------------------------------------------------------------ control messages

    def on_reserve(
        self,
        peer: Peer,
        message: Reserve,
        now: float,
        *,
        key: bytes = b"",
        in_place: bool = False,
        until: float = float("inf"),
        layout: KVLayout | None = None,
    ) -> list[Output[A]]:
        """Grant blocks or answer Busy. A repeated Reserve gets the same answer.

        ``key``: of the sender's connection; only it may use the grant. ``in_place``: this worker
        reads the blocks of the sender's GPU. ``until``: end of the grant, if it is earlier than the
        deadline that the sender states. ``layout``: of the frames, if their type differs from this
        worker's.
        """
        name = (message.request, message.attempt)
        past = self._past.is_past(message.request, message.attempt, now)
        if past or not self._plausible(message):
            aborted = Aborted(request=message.request, attempt=message.attempt)
            return self._grants.when_drained(peer, name, aborted)
        if self._past.committed.get(name, now):
            # Reserve after Commit means that a router reused an attempt number.
            return [Reply(peer, Aborted(request=message.request, attempt=message.attempt))]
        slot = self._grants.table.live.get(message.request)
        if slot and self.holds(message) and slot.key == key:
            slot.peer = peer
            if in_place:
                self._grants.read_in_place(slot)
            self._grants.unblock(slot, now)
            return [Reply(peer, self._grants.grant_message(slot))]
        outputs = self._grants.drop(slot) if slot else []
        granted = self._reserve(
            peer, message, now, key=key, in_place=in_place, until=until, layout=layout
        )
        return [*outputs, Reply(peer, granted)]

    def holds(self, message: Reserve) -> bool:
        """True if ``message`` repeats the Reserve of a live grant; it takes no new blocks."""
        slot = self._grants.table.live.get(message.request)
        return (
            slot is not None and slot.reserve is not None and _same_reserve(slot.reserve, message)
        )

    def expects(self, request: bytes, attempt: int) -> bool:
        """True if a live grant waits for the KV of this attempt."""
        slot = self._grants.table.find_attempt(request, attempt)
        return slot is not None and slot.state in (GrantState.GRANTED, GrantState.FILLING)

    def _plausible(self, message: Reserve) -> bool:
        """True if the sizes fit this model; otherwise nothing is allocated."""
        tokens, growth = message.num_tokens, message.growth
        if tokens < 1 or growth < 0 or tokens + growth > MAX_CONTEXT_TOKENS:
            return False
        return len(message.hashes) <= tokens // self._grants.layout.block_size

    def _reserve(
        self,
        peer: Peer,
        message: Reserve,
        now: float,
        *,
        key: bytes,
        in_place: bool,
        until: float,
        layout: KVLayout | None,
    ) -> Message:
        slot = self._grants.reserve(
            peer, message, now, key=key, in_place=in_place, until=until, layout=layout
        )
        if slot is None:
            return Busy(
                request=message.request,
                attempt=message.attempt,
                reason="no free KV blocks",
                retry_after=self._config.retry_after,
            )
        self._past.reserved(message.request, message.attempt, slot.expires)
        return self._grants.grant_message(slot)

    def on_commit(
        self, peer: Peer, message: Commit, now: float, *, key: bytes = b""
    ) -> list[Output[A]]:
        """Take ownership if all cells arrived; an incomplete manifest is answered later.

        ``key``: of the sender's connection; only the key that committed gets the answer again.
        """
        done = self._past.committed.get((message.request, message.attempt), now)
        if done and done[1] == key:
            return [Reply(peer, done[0])]
        slot = self._grants.table.find(message.grant)
        foreign = slot is None or slot.reserve is None or _another(slot.reserve, message)
        if slot is None or foreign or slot.state is GrantState.REVOKING:
            stale = self._stale(message.grant, message.request, message.attempt)
            return self._grants.when_drained(peer, (message.request, message.attempt), stale)
        slot.peer = peer
        return self.data.on_manifest(slot, message, now)

    def on_release(self, peer: Peer, message: Release, now: float) -> list[Output[A]]:
        """Free the grant of an attempt that its sender gives up; an owned request stays."""
        # Without the tombstone, a late Reserve of this attempt would hold blocks for no request.
        self._past.abort(message.request, message.attempt, now, self._config.tombstone)
        answer = Released(request=message.request, attempt=message.attempt)
        slot = self._grants.table.find_attempt(message.request, message.attempt)
        if slot and slot.state in (GrantState.GRANTED, GrantState.FILLING):
            slot.peer = peer
            return self._grants.part(slot, answer)
        key = (message.request, message.attempt)
        return [*self._grants.when_drained(peer, key, answer), *self._grants.credit_outputs()]

    def on_fence(self, message: Fence) -> list[Output[A]]:
        """Device path: free the blocks, because the sender has stopped writing."""
        slot = self._grants.table.find(message.grant)
        if slot is None or slot.state is not GrantState.REVOKING:
            self._grants.stale += 1
            return []
        slot.fenced = True
        return self._grants.drained(slot)

    # ------------------------------------------------------------------ data frames

    def owner(self, grant: GrantRef) -> Holder | None:
        """The prefill worker that reserved a grant; None if the grant has ended."""
        slot = self._grants.table.find(grant)
        return None if slot is None else _owner(slot)

    def layout_of(self, grant: GrantRef) -> KVLayout | None:
        """Return the layout of a grant's frames if their type differs from this worker's."""
        slot = self._grants.table.find(grant)
        return None if slot is None else slot.layout

    def attempt_of(self, grant: GrantRef) -> tuple[bytes, int] | None:
        """Return the attempt that a grant serves; None if the grant has ended."""
        slot = self._grants.table.find(grant)
        reserve = None if slot is None else slot.reserve
        return None if reserve is None else (reserve.request, reserve.attempt)

    def owner_of_attempt(self, request: bytes, attempt: int) -> Holder | None:
        """The prefill worker whose grant serves this attempt or a later one, or None."""
        slot = self._grants.table.live.get(request)
        if slot is None or slot.reserve is None or slot.reserve.attempt < attempt:
            return None
        return _owner(slot)

    # ------------------------------------------------------------------ ends

    def abort(self, request: bytes, attempt: int, now: float, keep: float) -> list[Output[A]]:
        """Free every grant of this request up to ``attempt``; refuse them for ``keep`` seconds.

        An owned request is freed by its owner, which calls :meth:`close`.
        """
        self._past.abort(request, attempt, now, keep)
        slot = self._grants.table.live.get(request)
        if slot and slot.reserve and slot.reserve.attempt <= attempt:
            return [*self._grants.drop(slot), *self._grants.credit_outputs()]
        return []

    def is_over(self, request: bytes, attempt: int, now: float) -> bool:
        """True if the attempt is aborted, superseded or was taken over here."""
        past = self._past.is_past(request, attempt, now)
        return past or self._past.committed.get((request, attempt), now) is not None

    def close(self, request: bytes, attempt: int) -> None:
        """Remove the grant of an owned request that ended; the owner frees the blocks."""
        slot = self._grants.table.find_attempt(request, attempt)
        if slot and slot.state is GrantState.OWNED:
            self._grants.free(slot)

    def peer_dead(self, incarnation: int) -> list[Output[A]]:
        """Free the grants of a prefill worker that a router has declared dead.

        The worker may still serve another router and reserve again. So no tombstones are kept:
        the router aborts the attempts that it moves, one by one.
        """
        for slot in self._grants.table.taken():
            theirs = slot.reserve is not None and slot.reserve.incarnation == incarnation
            if theirs and slot.state is not GrantState.OWNED:
                self._grants.part(slot, None)  # the sender is dead: no answer
        return self._grants.credit_outputs()

    def peer_moved(self, holder: Holder, peer: Peer) -> None:
        """Send answers for a prefill worker's grants over its new connection."""
        for slot in self._grants.table.taken():
            if _owner(slot) == holder:
                slot.peer = peer

    def tick(self, now: float) -> list[Output[A]]:
        """Check deadlines, timeouts and incomplete manifests."""
        outputs: list[Output[A]] = []
        self.contacts.excuse(now)
        for slot in self._grants.table.taken():
            if slot.state is GrantState.OWNED:
                continue
            revoked = slot.state is GrantState.REVOKING
            if revoked and slot.fenced and not slot.moving:
                # An exception of our own code came between the last write and the end.
                outputs += self._grants.drained(slot)
                continue
            over = now >= slot.expires or self.contacts.is_unreachable(slot.peer, now)
            if over and not revoked:
                outputs += self._grants.drop(slot)
            elif slot.moving:
                continue  # this worker's own write: it will end, or the whole process has
            elif not revoked and slot.commit and now >= slot.progress_at + self._config.patience:
                slot.progress_at = now
                outputs += self.data.ask_missing(slot, slot.commit)
            elif now >= slot.asked_at + self._config.lease:
                slot.asked_at = now
                outputs.append(self._ask(slot))
        silent = self.contacts.to_ask({slot.peer for slot in self.ungiven()}, now)
        outputs += [Reply(peer, Ping()) for peer in silent]
        self._past.expire(now)
        return outputs + self._grants.credit_outputs()

    def _ask(self, slot: Slot[A]) -> Reply:
        """Ask the sender to confirm its grant; its Release may have been lost."""
        if slot.state is GrantState.REVOKING:
            return self._grants.revoke(slot)
        return Reply(slot.peer, self._grants.grant_message(slot))

    @property
    def granted(self) -> int:
        """Number of grants whose blocks wait for KV."""
        return len(self.ungiven())

    def ungiven(self) -> list[Slot[A]]:
        """Slots without an owner: they wait for KV or for the end of their last write."""
        return [slot for slot in self._grants.table.taken() if slot.state is not GrantState.OWNED]

    def held(self) -> list[A]:
        """Allocations held by grants, for integrity checks."""
        return [
            slot.allocation for slot in self._grants.table.taken() if slot.allocation is not None
        ]

    # ------------------------------------------------------------------ slots

    def _stale(self, grant: GrantRef, request: bytes, attempt: int) -> Stale:
        self._grants.stale += 1
        return Stale(grant=grant, request=request, attempt=attempt)

    @property
    def remembered(self) -> int:
        """Number of entries kept to answer late messages; each entry expires."""
        return len(self._past)

    @property
    def forgotten(self) -> int:
        """Number of those entries that were lost before their time, because too many came."""
        return self._past.evicted


def _owner(slot: Slot[Any]) -> Holder | None:
    return None if slot.reserve is None else Holder(slot.reserve.incarnation, slot.key)


def _same_reserve(held: Reserve, asked: Reserve) -> bool:
    """True if ``asked`` repeats ``held``, and is not a new reservation."""
    names = ("attempt", "incarnation", "serial")
    return all(getattr(held, name) == getattr(asked, name) for name in names)


def _another(held: Reserve, commit: Commit) -> bool:
    """True if a grant is used for another request or attempt than it was given for."""
    return (held.request, held.attempt) != (commit.request, commit.attempt)


def check_receiver(receiver: Receiver[Any], owned: Collection[bytes]) -> None:
    """Raise if slots, live table and states disagree or the credit exceeds its budget."""
    receiver._grants.check_integrity()
    live = receiver._grants.table.live
    for slot in receiver._grants.table.taken():
        request = b"" if slot.reserve is None else slot.reserve.request
        if slot.state is not GrantState.REVOKING and live.get(request) is not slot:
            raise IllegalTransition(f"slot {slot.index} is {slot.state.value}, but not live")
    for request, slot in live.items():
        if slot.reserve is None or slot.reserve.request != request:
            raise IllegalTransition(f"the live table names slot {slot.index} of another request")
        if slot.state is GrantState.OWNED and request not in owned:
            raise IllegalTransition(f"owned grant {slot.index} has no owner")
        if (slot.state is GrantState.OWNED) != (slot.allocation is None):
            raise IllegalTransition(f"slot {slot.index}: allocation and state disagree")
