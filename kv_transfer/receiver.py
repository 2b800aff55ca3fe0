"""The decode side of a handoff: grants of blocks, from Reserve to ownership.

Invariants: a block belongs to at most one grant; a grant is named by (incarnation, slot,
generation), and freeing a slot raises its generation, so a late message can only be stale;
ownership passes once, after every cell (layer, block) of the manifest has arrived intact;
every Reserve, Commit and Release is answered, with the same answer if it is repeated.

Only this worker writes its blocks. A write lasts from :meth:`Receiver.locate` to
:meth:`Receiver.on_frame`. A grant that ends during a write is REVOKING until its last write is
over. Only then are its blocks freed, and only then does the sender learn that the grant has ended,
because the write may read the sender's memory. Blocks are never freed by a timeout alone. If
senders write themselves (``device``), the receiver also waits for their Fence.

The receiver does not depend on sockets, pools or models. Blocks come from a
:class:`.store.BlockStore`, and payload bytes never pass through here.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from ..proto.errors import ProtocolError
from ..proto.layout import KVLayout
from ..proto.limits import MAX_CONTEXT_TOKENS
from ..proto.wire.messages import (
    Aborted,
    Busy,
    Commit,
    Committed,
    Credit,
    Fence,
    Grant,
    GrantRef,
    KVFrame,
    Message,
    Ping,
    Refused,
    Release,
    Released,
    Reserve,
    Revoke,
    Stale,
)
from ..runtime.tables import ExpiringMap
from .credit import CreditPool
from .grants import GrantState, GrantTable, IllegalTransition, Peer, Slot
from .store import A, BlockStore
from .timeout import ASK_EVERY_S, HANDOFF_TIMEOUT_S, OWN_PAUSE_S

SILENT_S = 1.0
"""Seconds of silence after which a prefill worker with grants gets a Ping.

A prefill worker that works on handoffs sends to this worker more often than that."""


@dataclass(slots=True, frozen=True)
class Reply:
    """Send ``message`` to the prefill worker ``peer``."""

    peer: Peer
    message: Message


@dataclass(slots=True, frozen=True)
class Handover(Generic[A]):
    """Run the request: its ownership has passed here. The allocation belongs to the caller."""

    commit: Commit
    allocation: A
    cached_tokens: int
    bytes_received: int


@dataclass(slots=True, frozen=True)
class Evict:
    """A higher attempt supersedes an owned request: end its sequence and free its blocks."""

    request: bytes
    attempt: int


Output = Reply | Handover[A] | Evict


@dataclass(slots=True)
class _Contact:
    """The connection of a prefill worker that has grants.

    ``asked_since``: time of the first Ping after ``heard_at``; None while no answer is awaited.
    """

    heard_at: float
    asked_since: float | None = None
    ask_at: float = 0.0


@dataclass(slots=True, frozen=True)
class ReceiverConfig:
    """Limits of the receiving side.

    ``patience``: seconds without a frame after which frames in flight count as lost.
    ``max_refusals``: limit of refused (incomplete) manifests per grant. ``timeout``: seconds
    without an answer after which a sender's grants are freed. ``window`` and ``budget``: see
    CreditPool, bytes. ``lease``: seconds after which a sender is asked to confirm its grant.
    ``tombstone``: seconds for which a released attempt is refused. ``device``: senders write the
    blocks (CUDA IPC), so freeing needs a fence.
    """

    window: int = 32 << 20
    timeout: float = HANDOFF_TIMEOUT_S
    budget: int = 256 << 20
    patience: float = 0.5
    max_refusals: int = 8
    retry_after: float = 0.02
    tombstone: float = 600.0
    lease: float = 2.0
    device: bool = False


class Receiver(Generic[A]):
    """All grants of one decode worker."""

    def __init__(
        self, incarnation: int, layout: KVLayout, store: BlockStore[A], config: ReceiverConfig
    ) -> None:
        self._layout = layout
        self._store = store
        self._config = config
        self._grants: GrantTable[A] = GrantTable(incarnation)
        self._highest: ExpiringMap[bytes, int] = ExpiringMap()  # highest attempt
        self._tombs: ExpiringMap[bytes, int] = ExpiringMap()  # aborted up to this attempt
        self._committed: ExpiringMap[tuple[bytes, int], Committed] = ExpiringMap()
        self._credits = CreditPool(config.budget, config.window)
        self._contacts: dict[Peer, _Contact] = {}  # senders that have grants
        self._looked_at = math.inf
        self.stale = 0
        self.damaged = 0

    # ------------------------------------------------------------------ control messages

    def on_reserve(self, peer: Peer, message: Reserve, now: float) -> list[Output[A]]:
        """Grant blocks or answer Busy. A repeated Reserve gets the same answer."""
        key = (message.request, message.attempt)
        past = self._is_past(message.request, message.attempt, now)
        if past or not self._plausible(message):
            aborted = Aborted(request=message.request, attempt=message.attempt)
            return self._when_drained(peer, key, aborted)
        if self._committed.get(key, now):
            # Reserve after Commit means that a router reused an attempt number.
            return [Reply(peer, Aborted(request=message.request, attempt=message.attempt))]
        slot = self._grants.live.get(message.request)
        if slot and self.holds(message):
            slot.peer = peer
            self._unblock(slot, now)
            return [Reply(peer, self._grant_message(slot))]
        outputs = self._drop(slot) if slot else []
        return [*outputs, Reply(peer, self._reserve(peer, message, now))]

    def holds(self, message: Reserve) -> bool:
        """True if ``message`` repeats the Reserve of a live grant; it takes no new blocks."""
        slot = self._grants.live.get(message.request)
        return (
            slot is not None and slot.reserve is not None and _same_reserve(slot.reserve, message)
        )

    def expects(self, request: bytes, attempt: int) -> bool:
        """True if a live grant waits for the KV of this attempt."""
        slot = self._grants.find_attempt(request, attempt)
        return slot is not None and slot.state in (GrantState.GRANTED, GrantState.FILLING)

    def _plausible(self, message: Reserve) -> bool:
        """True if the sizes fit this model; otherwise nothing is allocated."""
        tokens, growth = message.num_tokens, message.growth
        if tokens < 1 or growth < 0 or tokens + growth > MAX_CONTEXT_TOKENS:
            return False
        return len(message.hashes) <= tokens // self._layout.block_size

    def _reserve(self, peer: Peer, message: Reserve, now: float) -> Message:
        allocation = self._store.reserve(message.hashes, message.num_tokens, message.growth)
        if allocation is None:
            return Busy(
                request=message.request,
                attempt=message.attempt,
                reason="no free KV blocks",
                retry_after=self._config.retry_after,
            )
        expires = now + message.deadline
        self._highest.put(message.request, message.attempt, expires)
        slot = self._grants.take()
        slot.step("reserve")
        slot.reserve, slot.peer, slot.allocation = message, peer, allocation
        slot.expires, slot.progress_at, slot.asked_at = expires, now, now
        blocks = self._layout.blocks_for(message.num_tokens)
        slot.arrived = np.zeros((self._layout.num_layers, blocks), np.bool_)
        slot.arrived[:, : allocation.cached_blocks] = True
        missing = (blocks - allocation.cached_blocks) * self._layout.num_layers
        slot.credit = self._credits.open(slot.index, missing * self._layout.block_bytes)
        self._grants.live[message.request] = slot
        return self._grant_message(slot)

    def _unblock(self, slot: Slot[A], now: float) -> None:
        """Renew the credit of a sender that repeats Reserve and sends no frames.

        Its frames were probably lost, and lost frames still hold credit.
        """
        stuck = now >= slot.progress_at + self._config.patience
        if stuck and slot.commit is None and slot.state is not GrantState.OWNED:
            slot.progress_at = now
            slot.credit = self._credits.expect_again(slot.index, self._absent_bytes(slot))

    def _absent_bytes(self, slot: Slot[A]) -> int:
        absent = 0 if slot.arrived is None else int(np.count_nonzero(~slot.arrived))
        return absent * self._layout.block_bytes

    def on_commit(self, peer: Peer, message: Commit, now: float) -> list[Output[A]]:
        """Take ownership if all cells arrived; an incomplete manifest is answered later."""
        done = self._committed.get((message.request, message.attempt), now)
        if done:
            return [Reply(peer, done)]
        slot = self._grants.find(message.grant)
        foreign = slot is None or slot.reserve is None or _another(slot.reserve, message)
        if slot is None or foreign or slot.state is GrantState.REVOKING:
            stale = self._stale(message.grant, message.request, message.attempt)
            return self._when_drained(peer, (message.request, message.attempt), stale)
        slot.peer = peer
        if slot.commit is None:
            slot.progress_at = now
        slot.commit = message
        fault = self._fault(slot, message)
        if fault:
            return self._fail(slot, "handoff_failed", fault)
        return self._try_own(slot, now)

    @staticmethod
    def _fault(slot: Slot[A], commit: Commit) -> str:
        """Return why a manifest can never match its grant, or an empty string."""
        reserve, cells = slot.reserve, slot.arrived
        if slot.state not in (GrantState.GRANTED, GrantState.FILLING):
            return ""
        if reserve is None or cells is None:
            return ""
        if commit.frames > cells.size:
            return f"{commit.frames} frames, but the grant has only {cells.size} cells"
        computed = len(commit.context.tokens) - 1
        if commit.context.generated_length < 1 or computed != reserve.num_tokens:
            return f"context of {computed + 1} tokens for a grant of {reserve.num_tokens}"
        return ""

    def on_release(self, peer: Peer, message: Release, now: float) -> list[Output[A]]:
        """Free the grant of an attempt that its sender gives up; an owned request stays."""
        # Without the tombstone, a late Reserve of this attempt would hold blocks for no request.
        self._bury(message.request, message.attempt, now, self._config.tombstone)
        answer = Released(request=message.request, attempt=message.attempt)
        slot = self._grants.find_attempt(message.request, message.attempt)
        if slot and slot.state in (GrantState.GRANTED, GrantState.FILLING):
            slot.peer = peer
            return self._part(slot, answer)
        key = (message.request, message.attempt)
        return [*self._when_drained(peer, key, answer), *self._credit_outputs()]

    def on_fence(self, message: Fence) -> list[Output[A]]:
        """Device path: free the blocks, because the sender has stopped writing."""
        slot = self._grants.find(message.grant)
        if slot is None or slot.state is not GrantState.REVOKING:
            self.stale += 1
            return []
        slot.fenced = True
        return self._drained(slot)

    # ------------------------------------------------------------------ data frames

    def locate(self, frame: KVFrame) -> npt.NDArray[np.int32] | None:
        """Return the pool blocks (int32) of a frame, or None if the frame must be dropped.

        After a result other than None, the caller writes the blocks and calls :meth:`on_frame`
        exactly once. Raises ProtocolError if the frame does not fit its grant: wrong bounds or
        size, overlapping cells, or more bytes than its credit.
        """
        slot = self._grants.find(frame.grant)
        if slot is None or slot.state not in (GrantState.GRANTED, GrantState.FILLING):
            self.stale += 1
            return None
        if frame.index in slot.frames or frame.index in slot.moving:
            return None  # a duplicate frame
        self._check_bounds(slot, frame)
        if slot.allocation is None:
            return None
        if not self._credits.receive(slot.index, frame.nbytes):
            raise ProtocolError(f"KV frame {frame.index} exceeds the byte credit of its grant")
        slot.moving[frame.index] = frame
        slot.came += frame.nbytes
        first, last = frame.block_start, frame.block_start + frame.block_count
        return slot.allocation.block_table[first:last]

    def owner(self, grant: GrantRef) -> int | None:
        """Incarnation of the prefill worker that reserved a grant; None if the grant has ended."""
        slot = self._grants.find(grant)
        return None if slot is None or slot.reserve is None else slot.reserve.incarnation

    def owner_of_attempt(self, request: bytes, attempt: int) -> int | None:
        """Incarnation of the prefill worker whose grant serves this attempt or a later one."""
        slot = self._grants.live.get(request)
        if slot is None or slot.reserve is None or slot.reserve.attempt < attempt:
            return None
        return slot.reserve.incarnation

    def _check_bounds(self, slot: Slot[A], frame: KVFrame) -> None:
        cells = slot.arrived
        layers = range(frame.layer_start, frame.layer_start + frame.layer_count)
        blocks = range(frame.block_start, frame.block_start + frame.block_count)
        if cells is None or not len(layers) or not len(blocks):
            raise ProtocolError(f"KV frame {frame.index} is empty")
        if layers.start < 0 or layers.stop > cells.shape[0]:
            raise ProtocolError(f"KV frame {frame.index}: layers outside the model")
        if blocks.start < 0 or blocks.stop > cells.shape[1]:
            raise ProtocolError(f"KV frame {frame.index}: blocks outside the grant")
        if frame.nbytes != len(layers) * len(blocks) * self._layout.block_bytes:
            raise ProtocolError(
                f"KV frame {frame.index}: {frame.nbytes} bytes do not fit its shape"
            )
        if cells[layers.start : layers.stop, blocks.start : blocks.stop].any():
            raise ProtocolError(f"KV frame {frame.index} covers blocks that are already filled")
        if any(_overlap(frame, other) for other in slot.moving.values()):
            raise ProtocolError(f"KV frame {frame.index} covers blocks that are being written")

    def on_frame(self, frame: KVFrame, *, intact: bool, now: float) -> list[Output[A]]:
        """Record a located frame; ``intact``: its checksum matched and it is in the pool."""
        slot = self._grants.find(frame.grant)
        if slot is None or slot.arrived is None:
            self.stale += 1
            return []
        slot.moving.pop(frame.index, None)
        if slot.state is GrantState.REVOKING:
            return self._drained(slot)
        slot.progress_at = now
        if intact:
            slot.step("frame")
            slot.frames[frame.index] = frame.checksum
            slot.sizes += frame.nbytes
            slot.damaged.pop(frame.index, None)
            slot.arrived[
                frame.layer_start : frame.layer_start + frame.layer_count,
                frame.block_start : frame.block_start + frame.block_count,
            ] = True
        else:
            self.damaged += 1
            slot.damaged[frame.index] = frame.nbytes
        outputs = self._credit_outputs()
        return outputs + (self._try_own(slot, now) if slot.commit else [])

    def _try_own(self, slot: Slot[A], now: float) -> list[Output[A]]:
        commit, cells = slot.commit, slot.arrived
        if commit is None or cells is None or slot.allocation is None:
            return []
        if slot.damaged and len(slot.frames) + len(slot.damaged) >= commit.frames:
            return self._refuse_frames(slot, sorted(slot.damaged))
        if slot.moving or len(slot.frames) < commit.frames:
            return []  # frames are in flight; tick() requests them again if they do not arrive
        if not self._manifest_agrees(slot, commit) or not cells.all():
            return self._fail(slot, "handoff_failed", "the manifest does not match the frames")
        slot.step("own")
        self._credits.close(slot.index)
        answer = Committed(
            request=commit.request,
            attempt=commit.attempt,
            grant=commit.grant,
            bytes=slot.sizes,
            frames=len(slot.frames),
        )
        self._committed.put((commit.request, commit.attempt), answer, slot.expires)
        allocation = slot.allocation
        slot.allocation = None
        cached = allocation.cached_blocks * self._layout.block_size
        handover = Handover(commit, allocation, cached, slot.sizes)
        return [Reply(slot.peer, answer), handover, *self._credit_outputs()]

    @staticmethod
    def _manifest_agrees(slot: Slot[A], commit: Commit) -> bool:
        digest = 0
        for checksum in slot.frames.values():
            digest ^= checksum
        return (len(slot.frames), slot.sizes, digest) == (
            commit.frames,
            commit.bytes,
            commit.digest,
        )

    def _refuse_frames(self, slot: Slot[A], missing: list[int]) -> list[Output[A]]:
        """Request frames again, with fresh credit for their bytes."""
        commit = slot.commit
        if commit is None:
            return []
        slot.refusals += 1
        if slot.refusals > self._config.max_refusals:
            return self._fail(slot, "handoff_failed", f"frames {missing[:8]} never arrived intact")
        slot.damaged.clear()
        slot.credit = self._credits.expect_again(slot.index, self._absent_bytes(slot))
        message = Refused(
            request=commit.request,
            attempt=commit.attempt,
            grant=commit.grant,
            code="frames_missing",
            frames=missing,
            credit=slot.credit,
            counted=self._credits.counted(slot.index),
            arrived=slot.came,
            round=slot.refusals,
        )
        slot.commit = None
        return [Reply(slot.peer, message)]

    def _fail(self, slot: Slot[A], code: str, text: str) -> list[Output[A]]:
        commit = slot.commit
        if commit is None:
            return []
        message = Refused(
            request=commit.request,
            attempt=commit.attempt,
            grant=commit.grant,
            code=code,
            message=text,
        )
        return self._part(slot, message)

    # ------------------------------------------------------------------ ends

    def abort(self, request: bytes, attempt: int, now: float, keep: float) -> list[Output[A]]:
        """Free every grant of this request up to ``attempt``; refuse them for ``keep`` seconds.

        An owned request is freed by its owner, which calls :meth:`close`.
        """
        self._bury(request, attempt, now, keep)
        slot = self._grants.live.get(request)
        if slot and slot.reserve and slot.reserve.attempt <= attempt:
            return [*self._drop(slot), *self._credit_outputs()]
        return []

    def _bury(self, request: bytes, attempt: int, now: float, keep: float) -> None:
        if attempt >= (self._tombs.get(request, now) or 0):
            self._tombs.put(request, attempt, now + keep)

    def close(self, request: bytes, attempt: int) -> None:
        """Remove the grant of an owned request that ended; the owner frees the blocks."""
        slot = self._grants.find_attempt(request, attempt)
        if slot and slot.state is GrantState.OWNED:
            self._free_slot(slot)

    def peer_dead(self, incarnation: int) -> list[Output[A]]:
        """Free the grants of a prefill worker that a router has declared dead.

        The worker may still serve another router and reserve again. So no tombstones are kept:
        the router aborts the attempts that it moves, one by one.
        """
        for slot in self._grants.taken():
            theirs = slot.reserve is not None and slot.reserve.incarnation == incarnation
            if theirs and slot.state is not GrantState.OWNED:
                self._part(slot, None)  # the sender is dead: no answer
        return self._credit_outputs()

    def peer_gone(self, peer: Peer, now: float) -> None:
        """Start the timeout of a prefill worker whose connection was lost; it may reconnect."""
        contact = self._contacts.get(peer)
        if contact is not None and contact.asked_since is None:
            contact.asked_since = now

    def peer_heard(self, peer: Peer, now: float) -> None:
        """Note that a prefill worker sent something, so it is reachable."""
        contact = self._contacts.get(peer)
        if contact is not None:
            contact.heard_at, contact.asked_since = now, None

    def peer_moved(self, incarnation: int, peer: Peer) -> None:
        """Send answers for a prefill worker's grants over its new connection."""
        for slot in self._grants.taken():
            if slot.reserve is not None and slot.reserve.incarnation == incarnation:
                slot.peer = peer

    def tick(self, now: float) -> list[Output[A]]:
        """Check deadlines, timeouts and incomplete manifests."""
        outputs: list[Output[A]] = []
        self._excuse(now)
        for slot in self._grants.taken():
            if slot.state is GrantState.OWNED:
                continue
            revoked = slot.state is GrantState.REVOKING
            over = now >= slot.expires or self._is_unreachable(slot.peer, now)
            if over and not revoked:
                outputs += self._drop(slot)
            elif slot.moving:
                continue  # this worker's own write: it will end, or the whole process has
            elif not revoked and slot.commit and now >= slot.progress_at + self._config.patience:
                slot.progress_at = now
                missing = [i for i in range(slot.commit.frames) if i not in slot.frames]
                outputs += self._refuse_frames(slot, missing)
            elif now >= slot.asked_at + self._config.lease:
                slot.asked_at = now
                outputs.append(self._ask(slot))
        outputs += self._ask_silent(now)
        self._forget(now)
        return outputs + self._credit_outputs()

    def _ask(self, slot: Slot[A]) -> Reply:
        """Ask the sender to confirm its grant; its Release may have been lost."""
        if slot.state is GrantState.REVOKING:
            return self._revoke(slot)
        return Reply(slot.peer, self._grant_message(slot))

    def _excuse(self, now: float) -> None:
        """Exclude pauses of this process from the senders' timeouts."""
        pause = now - self._looked_at
        self._looked_at = now
        if pause > OWN_PAUSE_S:
            for contact in self._contacts.values():
                if contact.asked_since is not None:
                    contact.asked_since += pause

    def _is_unreachable(self, peer: Peer, now: float) -> bool:
        """True if a sender was asked for the whole timeout and has sent nothing since."""
        contact = self._contacts.get(peer)
        if contact is None or contact.asked_since is None:
            return False
        return now >= contact.asked_since + self._config.timeout

    def _ask_silent(self, now: float) -> list[Output[A]]:
        """Ping senders with grants that are silent or disconnected.

        Without pings, the grants of an unreachable sender would hold their blocks until the
        request's deadline.
        """
        peers = {slot.peer for slot in self.ungiven()}
        known, self._contacts = self._contacts, {}
        outputs: list[Output[A]] = []
        for peer in sorted(peers):
            contact = self._contacts[peer] = known.get(peer) or _Contact(now)
            if contact.asked_since is None and now >= contact.heard_at + SILENT_S:
                contact.asked_since = now
            if contact.asked_since is not None and now >= contact.ask_at:
                contact.ask_at = now + ASK_EVERY_S
                outputs.append(Reply(peer, Ping()))
        return outputs

    @property
    def granted(self) -> int:
        """Number of grants whose blocks wait for KV."""
        return len(self.ungiven())

    def ungiven(self) -> list[Slot[A]]:
        """Slots without an owner: they wait for KV or for the end of their last write."""
        return [slot for slot in self._grants.taken() if slot.state is not GrantState.OWNED]

    def held(self) -> list[A]:
        """Allocations held by grants, for integrity checks."""
        return [slot.allocation for slot in self._grants.taken() if slot.allocation is not None]

    # ------------------------------------------------------------------ slots

    def _grant_message(self, slot: Slot[A]) -> Grant:
        reserve, allocation = slot.reserve, slot.allocation
        if reserve is None or allocation is None:
            raise IllegalTransition(f"grant {slot.index} is described while {slot.state.value}")
        return Grant(
            request=reserve.request,
            attempt=reserve.attempt,
            grant=self._grants.ref(slot),
            cached_tokens=allocation.cached_blocks * self._layout.block_size,
            credit=slot.credit,
            counted=self._credits.counted(slot.index),
            arrived=slot.came,
        )

    def _credit_outputs(self) -> list[Output[A]]:
        outputs: list[Output[A]] = []
        for index, credit in self._credits.top_up():
            slot = self._grants.at(index)
            slot.credit = credit
            message = Credit(grant=self._grants.ref(slot), credit=credit)
            outputs.append(Reply(slot.peer, message))
        return outputs

    def _drop(self, slot: Slot[A]) -> list[Output[A]]:
        """End a grant that its sender has not released."""
        if slot.reserve is None:
            return []
        if slot.state is GrantState.OWNED:
            evicted = Evict(slot.reserve.request, slot.reserve.attempt)
            self._free_slot(slot)
            return [evicted]
        if slot.state is GrantState.REVOKING:
            return []
        if self._config.device:
            slot.step("revoke")
            return [self._revoke(slot)]
        return self._part(slot, None)

    def _part(self, slot: Slot[A], last_word: Message | None) -> list[Output[A]]:
        """End a grant whose sender has stopped writing; free it after this worker's last write.

        ``last_word``: the final answer to the sender, sent when the blocks are free.
        """
        slot.fenced = True
        slot.parting = last_word
        if slot.state is not GrantState.REVOKING and slot.moving:
            slot.step("revoke")
        return self._drained(slot)

    def _drained(self, slot: Slot[A]) -> list[Output[A]]:
        """Free an ended grant if nothing can write to its blocks any more."""
        if slot.moving or not slot.fenced:
            return []
        peer, last_word = slot.peer, slot.parting
        self._free_slot(slot)
        told: list[Output[A]] = [] if last_word is None else [Reply(peer, last_word)]
        return [*told, *self._credit_outputs()]

    def _when_drained(self, peer: Peer, key: tuple[bytes, int], answer: Message) -> list[Output[A]]:
        """Confirm that an attempt holds nothing here, after its last read or write is over.

        If the sender asks again in the meantime, it gets one answer, to its latest question.
        """
        slot = self._grants.find_revoking(*key)
        if slot is None or not slot.moving:
            return [Reply(peer, answer)]
        slot.peer, slot.parting = peer, answer
        return []

    def _revoke(self, slot: Slot[A]) -> Reply:
        grant = self._grants.ref(slot)
        return Reply(slot.peer, Revoke(grant=grant))

    def _free_slot(self, slot: Slot[A]) -> None:
        self._grants.free(slot)
        self._credits.close(slot.index)
        if slot.allocation is not None:
            self._store.free(slot.allocation)

    def _is_past(self, request: bytes, attempt: int, now: float) -> bool:
        aborted = self._tombs.get(request, now) or 0
        return attempt <= aborted or attempt < (self._highest.get(request, now) or 0)

    def _stale(self, grant: GrantRef, request: bytes, attempt: int) -> Stale:
        self.stale += 1
        return Stale(grant=grant, request=request, attempt=attempt)

    def _forget(self, now: float) -> None:
        for table in (self._tombs, self._committed, self._highest):
            table.expire(now)

    @property
    def remembered(self) -> int:
        """Number of entries kept to answer late messages; each entry expires."""
        return len(self._tombs) + len(self._committed) + len(self._highest)


def _overlap(one: KVFrame, other: KVFrame) -> bool:
    """Return True if two frames share a cell."""
    layers = min(one.layer_start + one.layer_count, other.layer_start + other.layer_count)
    blocks = min(one.block_start + one.block_count, other.block_start + other.block_count)
    apart = layers <= max(one.layer_start, other.layer_start) or blocks <= max(
        one.block_start, other.block_start
    )
    return not apart


def _same_reserve(held: Reserve, asked: Reserve) -> bool:
    """True if ``asked`` repeats ``held``, and is not a new reservation."""
    names = ("attempt", "incarnation", "serial")
    return all(getattr(held, name) == getattr(asked, name) for name in names)


def _another(held: Reserve, commit: Commit) -> bool:
    """True if a grant is used for another request or attempt than it was given for."""
    return (held.request, held.attempt) != (commit.request, commit.attempt)


def check_receiver(receiver: Receiver[Any], owned: Collection[bytes]) -> None:
    """Raise if slots, live table and states disagree or the credit exceeds its budget."""
    receiver._credits.check_integrity()
    live = receiver._grants.live
    for request, slot in live.items():
        if slot.reserve is None or slot.reserve.request != request:
            raise IllegalTransition(f"the live table names slot {slot.index} of another request")
        if slot.state is GrantState.OWNED and request not in owned:
            raise IllegalTransition(f"owned grant {slot.index} has no owner")
        if (slot.state is GrantState.OWNED) != (slot.allocation is None):
            raise IllegalTransition(f"slot {slot.index}: allocation and state disagree")
