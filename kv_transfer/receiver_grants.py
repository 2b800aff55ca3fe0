"""The grants of a decode worker with their blocks and byte credit, and how a grant ends.

Invariants: a block belongs to at most one grant. A grant that ends while it is written is REVOKING
until its last write is over; only then are its blocks freed, and only then does the sender learn
that the grant has ended, because the write may read the sender's memory. Blocks are never freed by
a timeout alone. If senders write themselves (``device``), freeing also waits for their Fence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import numpy as np

from baton.proto.layout import KVLayout
from baton.proto.wire.messages import Commit, Credit, Grant, Message, Reserve, Revoke

from .grants import CreditPool, GrantState, GrantTable, IllegalTransition, Peer, Slot
from .store import A, BlockStore
from .timeout import HANDOFF_TIMEOUT_S


@dataclass(slots=True, frozen=True)
class Reply:
    """Send ``message`` to the prefill worker ``peer``."""

    peer: Peer
    message: Message


@dataclass(slots=True, frozen=True)
class Handover(Generic[A]):
    """Run the request: its ownership has passed here. The allocation belongs to the caller.

    ``reserve``: its grant was for this. ``until``: the end of that grant.
    """

    commit: Commit
    allocation: A
    bytes_received: int
    reserve: Reserve
    until: float


@dataclass(slots=True, frozen=True)
class Evict:
    """A higher attempt supersedes an owned request: end its sequence and free its blocks."""

    request: bytes
    attempt: int


Output = Reply | Handover[A] | Evict


@dataclass(slots=True, frozen=True)
class ReceiverConfig:
    """Limits of the receiving side.

    ``patience``: seconds without a frame after which frames in flight count as lost.
    ``max_refusals``: limit of refused (incomplete) manifests per grant. ``timeout``: seconds
    without an answer after which a sender's grants are freed. ``window`` and ``budget``: see
    CreditPool, bytes. ``lease``: seconds after which a sender is asked to confirm its grant.
    ``tombstone``: seconds for which a released attempt is refused. ``attempts``: past attempts
    of each kind that are kept. ``device``: senders write the
    blocks (CUDA IPC), so freeing needs a fence.
    """

    window: int = 32 << 20
    timeout: float = HANDOFF_TIMEOUT_S
    budget: int = 256 << 20
    patience: float = 0.5
    max_refusals: int = 8
    retry_after: float = 0.02
    tombstone: float = 600.0
    attempts: int = 1 << 19
    lease: float = 2.0
    device: bool = False


class ReceiverGrants(Generic[A]):
    """Slots, blocks and credit; used by the control side and the data side of the receiver.

    ``stale``: number of messages and frames for ended grants.
    """

    def __init__(
        self, incarnation: int, layout: KVLayout, store: BlockStore[A], config: ReceiverConfig
    ) -> None:
        self.table: GrantTable[A] = GrantTable(incarnation)
        self.credits = CreditPool(config.budget, config.window)
        self.layout = layout
        self.config = config
        self._store = store
        self.stale = 0

    def reserve(
        self,
        peer: Peer,
        message: Reserve,
        now: float,
        *,
        key: bytes = b"",
        in_place: bool = False,
        until: float = float("inf"),
        layout: KVLayout | None = None,
    ) -> Slot[A] | None:
        """Reserve the blocks of a request and its first credit; None if too few blocks are free.

        ``until``: end of the grant, if the deadline of the Reserve is later.
        ``in_place``: the frames name blocks of the sender's GPU, so they need no memory here.
        ``layout``: of the frames, if their type differs from this worker's.
        """
        allocation = self._store.reserve(message.hashes, message.num_tokens, message.growth, key)
        if allocation is None:
            return None
        expires = min(now + message.deadline, until)
        slot = self.table.take()
        slot.step("reserve")
        slot.reserve, slot.peer, slot.allocation = message, peer, allocation
        slot.key, slot.layout = key, layout
        slot.expires, slot.progress_at, slot.asked_at = expires, now, now
        blocks = self.layout.blocks_for(message.num_tokens)
        slot.arrived = np.zeros((self.layout.num_layers, blocks), np.bool_)
        slot.arrived[:, : allocation.cached_blocks] = True
        missing = (blocks - allocation.cached_blocks) * self.layout.num_layers
        expected = missing * self.block_bytes(slot)
        slot.credit = self.credits.open(slot.index, expected, limited=not in_place)
        slot.in_place = in_place
        self.table.live[message.request] = slot
        return slot

    def unblock(self, slot: Slot[A], now: float) -> None:
        """Renew the credit of a sender that repeats Reserve and sends no frames.

        Its frames were probably lost, and lost frames still hold credit.
        """
        stuck = now >= slot.progress_at + self.config.patience
        if stuck and slot.commit is None and slot.state is not GrantState.OWNED:
            slot.progress_at = now
            slot.credit = self.credits.expect_again(slot.index, self.absent_bytes(slot))

    def read_in_place(self, slot: Slot[A]) -> None:
        """Follow a sender whose link now shares its GPU's memory, after a Reserve without it.

        That Reserve came before the Open of its connection. Frames that are read in place are not
        cut to the window of the credit, so within it they could never be sent.
        """
        waiting = slot.state in (GrantState.GRANTED, GrantState.FILLING)
        if waiting and slot.commit is None and not slot.in_place:
            slot.in_place = True
            slot.credit = self.credits.unlimit(slot.index, self.absent_bytes(slot))

    def check_integrity(self) -> None:
        """Raise if a grant has ended in part only, or if its credit has another end."""
        self.credits.check_integrity()
        self.table.check_integrity()
        waiting = [s for s in self.table.taken() if s.state is not GrantState.OWNED]
        if self.credits.keys() != {slot.index for slot in waiting}:
            raise IllegalTransition("the accounts of credit are not those of the grants")

    def absent_bytes(self, slot: Slot[A]) -> int:
        """Bytes of the cells that have not arrived."""
        absent = 0 if slot.arrived is None else int(np.count_nonzero(~slot.arrived))
        return absent * self.block_bytes(slot)

    def block_bytes(self, slot: Slot[A]) -> int:
        """Bytes of a block of one layer in the frames of a grant."""
        return (slot.layout or self.layout).block_bytes

    def grant_message(self, slot: Slot[A]) -> Grant:
        """Return the Grant that describes the slot now."""
        reserve, allocation = slot.reserve, slot.allocation
        if reserve is None or allocation is None:
            raise IllegalTransition(f"grant {slot.index} is described while {slot.state.value}")
        return Grant(
            request=reserve.request,
            attempt=reserve.attempt,
            grant=self.table.ref(slot),
            cached_tokens=allocation.cached_blocks * self.layout.block_size,
            credit=slot.credit,
            counted=self.credits.counted(slot.index),
            arrived=slot.came,
        )

    def credit_outputs(self) -> list[Output[A]]:
        """Return the messages that raise the senders' credit."""
        outputs: list[Output[A]] = []
        for index, credit in self.credits.top_up():
            slot = self.table.at(index)
            slot.credit = credit
            message = Credit(grant=self.table.ref(slot), credit=credit)
            outputs.append(Reply(slot.peer, message))
        return outputs

    def drop(self, slot: Slot[A]) -> list[Output[A]]:
        """End a grant that its sender has not released."""
        if slot.reserve is None:
            return []
        if slot.state is GrantState.OWNED:
            evicted = Evict(slot.reserve.request, slot.reserve.attempt)
            self.free(slot)
            return [evicted]
        if slot.state is GrantState.REVOKING:
            return []
        if self.config.device:
            self.table.revoke(slot)
            return [self.revoke(slot)]
        return self.part(slot, None)

    def part(self, slot: Slot[A], last_word: Message | None) -> list[Output[A]]:
        """End a grant whose sender has stopped writing; free it after this worker's last write.

        ``last_word``: the final answer to the sender, sent when the blocks are free.
        """
        slot.fenced = True
        slot.parting = last_word
        if slot.state is not GrantState.REVOKING and slot.moving:
            self.table.revoke(slot)
        return self.drained(slot)

    def drained(self, slot: Slot[A]) -> list[Output[A]]:
        """Free an ended grant if nothing can write to its blocks any more."""
        if slot.moving or not slot.fenced:
            return []
        peer, last_word = slot.peer, slot.parting
        self.free(slot)
        told: list[Output[A]] = [] if last_word is None else [Reply(peer, last_word)]
        return [*told, *self.credit_outputs()]

    def when_drained(self, peer: Peer, key: tuple[bytes, int], answer: Message) -> list[Output[A]]:
        """Confirm that an attempt holds nothing here, after its last read or write is over.

        If the sender asks again in the meantime, it gets one answer, to its latest question.
        """
        slot = self.table.find_revoking(*key)
        if slot is None or not slot.moving:
            return [Reply(peer, answer)]
        slot.peer, slot.parting = peer, answer
        return []

    def revoke(self, slot: Slot[A]) -> Reply:
        """Ask the sender to stop writing."""
        grant = self.table.ref(slot)
        return Reply(slot.peer, Revoke(grant=grant))

    def free(self, slot: Slot[A]) -> None:
        """Free the slot, and its blocks unless they have an owner."""
        self.table.free(slot)
        self.credits.close(slot.index)
        if slot.allocation is not None:
            self._store.free(slot.allocation)
