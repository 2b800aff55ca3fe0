"""The prefill side of a handoff: from Reserve to Committed.

Invariants: a frame is sent only for cells whose KV is final and only within the grant's
cumulative credit; nothing is committed before every frame was packed; the blocks are held
until the decode worker answered Committed, so any frame can be packed again; every handoff
ends in exactly one of Done, Failed or Gone. Of a handoff whose blocks the decode worker reads where
they are (``fenced``), Failed is followed by Gone: until then it may read them
(:meth:`Sender.may_be_read`). Gone is its word that it does not, or its death; never a timeout.

The sender names blocks by their logical index. Packing, checksums and sockets are the
shell's: it performs :class:`SendFrame` and reports :meth:`Sender.on_packed`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from ..proto.errors import InternalError
from ..proto.layout import KVLayout
from ..proto.limits import MAX_KV_FRAME_BYTES
from ..proto.messages import (
    Busy,
    Commit,
    Committed,
    Credit,
    Fence,
    Grant,
    GrantRef,
    KVFrame,
    Message,
    Refused,
    Release,
    Reserve,
    Revoke,
    Stale,
)
from .timeout import HANDOFF_TIMEOUT_S

MIN_FRAME_BYTES = 512 << 10
"""Frames are not made smaller than this for the sake of overlap."""
MIN_JOINED_BYTES = 1 << 20
"""The same where layers are smaller and travel together: such a frame is always gathered, so what
counts is that each costs both sides together some 200 µs of their processors."""
MIN_SHARED_BYTES = 2 << 20
"""The same where the receiver reads the sender's pool: nothing travels that could overlap, so small
frames only cost both sides their headers."""
FRAMES_IN_FLIGHT = 8
"""Frames a handoff is cut into at least, if they do not get too small."""

Key = tuple[bytes, int]
"""(request, attempt): names one handoff."""


class HandoffState(Enum):
    """Life of a handoff at the sender."""

    RESERVING = "reserving"  # Reserve is out
    SENDING = "sending"  # granted: frames go as layers finish and credit allows
    COMMITTING = "committing"  # Commit is out
    RELEASING = "releasing"  # given up: Release is out
    ENDED = "ended"


TRANSITIONS: dict[tuple[HandoffState, str], HandoffState] = {
    (HandoffState.RESERVING, "grant"): HandoffState.SENDING,
    (HandoffState.RESERVING, "end"): HandoffState.ENDED,
    (HandoffState.RESERVING, "release"): HandoffState.RELEASING,
    (HandoffState.SENDING, "commit"): HandoffState.COMMITTING,
    (HandoffState.SENDING, "release"): HandoffState.RELEASING,
    (HandoffState.SENDING, "end"): HandoffState.ENDED,
    (HandoffState.COMMITTING, "resend"): HandoffState.SENDING,
    (HandoffState.COMMITTING, "release"): HandoffState.RELEASING,
    (HandoffState.COMMITTING, "end"): HandoffState.ENDED,
    (HandoffState.RELEASING, "end"): HandoffState.ENDED,
}


class CommitMaker(Protocol):
    """Builds the Commit of a handoff once its manifest is known (context, first token, router)."""

    def __call__(self, grant: GrantRef, frames: int, nbytes: int, digest: int) -> Commit:
        """Return the message to send."""
        ...


@dataclass(slots=True, frozen=True)
class Send:
    """Send a control message to the decode worker at ``endpoint``."""

    endpoint: str
    message: Message


@dataclass(slots=True, frozen=True)
class SendFrame:
    """Pack these cells of request ``key`` and send them to ``endpoint``'s data socket."""

    endpoint: str
    key: Key
    frame: KVFrame  # checksum 0: the packer fills it in


@dataclass(slots=True, frozen=True)
class Granted:
    """The decode worker promised blocks: compute may start."""

    key: Key
    cached_tokens: int


@dataclass(slots=True, frozen=True)
class Refusal:
    """The decode worker has no room; the handoff is over, try again later or elsewhere."""

    key: Key
    retry_after: float


@dataclass(slots=True, frozen=True)
class Done:
    """The decode worker owns the request; the prefill copy may be freed."""

    key: Key
    endpoint: str
    bytes_sent: int
    bytes_received: int
    frames: int
    resent: int
    blocks: int
    cached_tokens: int
    seconds: float


@dataclass(slots=True, frozen=True)
class Failed:
    """The handoff cannot succeed; nothing is held on the other side."""

    key: Key
    code: str
    message: str
    lost_peer: bool = False


@dataclass(slots=True, frozen=True)
class Gone:
    """A released handoff is acknowledged: nothing of it is held anywhere."""

    key: Key


Output = Send | SendFrame | Granted | Refusal | Done | Failed | Gone


@dataclass(slots=True)
class _Handoff:
    key: Key
    endpoint: str
    incarnation: int  # of the decode worker, as the router knows it; 0 = any
    reserve: Reserve
    blocks: int
    started: float
    deadline: float
    frame_limit: int  # bytes the receiver takes in one frame
    shared: bool  # the receiver reads the blocks where they are
    fenced: bool  # the receiver reads the blocks: they stay until it says that it does not
    state: HandoffState = HandoffState.RESERVING
    grant: GrantRef | None = None
    cached_blocks: int = 0
    cached_tokens: int = 0
    credit: int = 0
    sent_bytes: int = 0  # cumulative, repeated frames included: what credit is compared with
    pushed: int = 0  # cumulative, whatever the other side has written off as lost
    arrived: int = 0  # of these, as far as is known
    frames: list[KVFrame] = field(default_factory=list)
    checksums: dict[int, int] = field(default_factory=dict)
    queue: deque[KVFrame] = field(default_factory=deque)
    layer_done: int = 0  # within the step that runs
    block_done: int = 0  # blocks final in every layer
    maker: CommitMaker | None = None
    commit: Commit | None = None
    retry_at: float = 0.0
    progress_at: float = 0.0  # when frames were last known to arrive, or none was under way
    retries: int = 0
    resent: int = 0
    refusals: int = 0  # of the other side, as far as they arrived

    def agree(self, message: Grant | Refused) -> None:
        """Take over how much credit there is, and how much of it the other side has written off.

        It gives up as lost what it had granted in a message that never came here.
        """
        self.credit = max(self.credit, message.credit)
        self.sent_bytes = max(self.sent_bytes, min(message.counted, self.credit))

    def step(self, event: str) -> None:
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise ValueError(f"handoff {self.key}: {event} in state {self.state.value}")
        self.state = target


@dataclass(slots=True, frozen=True)
class SenderConfig:
    """Sizes and timers of the sending side.

    ``frame_bytes``: target size of a frame. ``retry``: seconds until an unanswered control
    message is repeated (doubling up to ``retry_max``); ``timeout``: seconds in which none of the
    frames sent to a peer arrives there before the handoff is given up as lost.
    """

    frame_bytes: int = 2 << 20
    retry: float = 0.2
    retry_max: float = 1.6
    timeout: float = HANDOFF_TIMEOUT_S


class Sender:
    """All handoffs of one prefill worker."""

    def __init__(self, incarnation: int, layout: KVLayout, config: SenderConfig) -> None:
        self._incarnation = incarnation
        self._layout = layout
        self._config = config
        self._live: dict[Key, _Handoff] = {}
        self._by_grant: dict[tuple[str, GrantRef], Key] = {}  # by endpoint: who says it
        self._arrived: dict[str, float] = {}  # by endpoint: when a frame was last known to arrive
        self.stale = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: Key) -> bool:
        return key in self._live

    def endpoints(self) -> set[str]:
        """Decode endpoints with a live handoff."""
        return {h.endpoint for h in self._live.values()}

    # ------------------------------------------------------------------ what the worker says

    def start(
        self,
        endpoint: str,
        incarnation: int,
        reserve: Reserve,
        now: float,
        frame_limit: int = MAX_KV_FRAME_BYTES,
        *,
        shared: bool = False,
        fenced: bool = False,
    ) -> list[Output]:
        """Ask ``endpoint`` for blocks; no frame will be larger than ``frame_limit`` bytes.

        ``shared``: the worker there reads the blocks from this one's pool. ``fenced``: and may
        still do so when the handoff has failed.
        """
        key = (reserve.request, reserve.attempt)
        handoff = _Handoff(
            key=key,
            endpoint=endpoint,
            incarnation=incarnation,
            reserve=reserve,
            blocks=self._layout.blocks_for(reserve.num_tokens),
            started=now,
            deadline=now + reserve.deadline,
            frame_limit=frame_limit,
            shared=shared,
            fenced=fenced,
        )
        self._live[key] = handoff
        return [self._control(handoff, reserve, now)]

    def ready(
        self, key: Key, *, layer_end: int, token_end: int, last: bool, now: float
    ) -> list[Output]:
        """KV of layers below ``layer_end`` is final for tokens below ``token_end``.

        Only whole blocks are sent, the partial one with the prompt's end (``last``).
        """
        handoff = self._live.get(key)
        if handoff is None or handoff.state is not HandoffState.SENDING:
            return []
        if not handoff.queue:
            self._calm(handoff, now)  # it waited for compute, not for the peer
            handoff.progress_at = now
        size = self._layout.block_size
        block_end = handoff.blocks if last else token_end // size
        self._cut(handoff, layer_end, block_end)
        if layer_end == self._layout.num_layers:
            handoff.layer_done = 0
            handoff.block_done = max(handoff.block_done, block_end)
        else:
            handoff.layer_done = layer_end
        return self._push(handoff, now)

    def finish(self, key: Key, maker: CommitMaker, now: float) -> list[Output]:
        """Every cell was announced by :meth:`ready`; commit as soon as all frames are packed."""
        handoff = self._live.get(key)
        if handoff is None or handoff.state is not HandoffState.SENDING:
            return []
        handoff.maker = maker
        return self._push(handoff, now)

    def on_packed(self, key: Key, index: int, checksum: int, now: float) -> list[Output]:
        """The shell has packed and sent a frame."""
        handoff = self._live.get(key)
        if handoff is None:
            return []
        handoff.checksums[index] = checksum
        return self._maybe_commit(handoff, now)

    def release(self, key: Key, now: float) -> list[Output]:
        """Give the handoff up; :class:`Gone` follows when the other side confirmed."""
        handoff = self._live.get(key)
        if handoff is None:
            return [Gone(key)]
        if handoff.state is HandoffState.RELEASING:
            return []
        handoff.step("release")
        handoff.queue.clear()
        handoff.retries = 0
        return [self._control(handoff, _release(handoff), now)]

    def may_be_read(self, key: Key) -> bool:
        """Whether the decode worker may be reading the handoff's blocks: they must stay."""
        handoff = self._live.get(key)
        return handoff is not None and handoff.fenced and bool(handoff.frames)

    # ------------------------------------------------------------------ what the peer says

    def is_with(self, endpoint: str, request: bytes, attempt: int) -> bool:
        """Whether the worker at ``endpoint`` may speak about the handoff of this attempt."""
        handoff = self._live.get((request, attempt))
        return handoff is None or handoff.endpoint == endpoint

    def on_grant(self, endpoint: str, message: Grant, now: float) -> list[Output]:
        """Blocks are promised; those nobody waits for are given back at once."""
        key = (message.request, message.attempt)
        handoff = self._live.get(key)
        if handoff is None or handoff.endpoint != endpoint:
            self.stale += 1
            release = Release(
                request=key[0], attempt=key[1], grant=message.grant, incarnation=self._incarnation
            )
            return [Send(endpoint, release)]
        if handoff.state not in (HandoffState.RESERVING, HandoffState.SENDING):
            return []
        if handoff.state is HandoffState.SENDING:
            return self._granted_again(handoff, message, now)
        handoff.step("grant")
        handoff.grant = message.grant
        handoff.agree(message)
        handoff.cached_tokens = message.cached_tokens
        handoff.cached_blocks = message.cached_tokens // self._layout.block_size
        handoff.block_done = handoff.cached_blocks
        self._calm(handoff, now)
        handoff.progress_at = now
        self._by_grant[endpoint, message.grant] = key
        return [Granted(key, message.cached_tokens)]

    def _granted_again(self, handoff: _Handoff, message: Grant, now: float) -> list[Output]:
        """Alive, and perhaps a Credit was lost.

        While frames are under way this says nothing about the path they take: the other side
        answers in the same way when it receives none of them.
        """
        if message.grant != handoff.grant:
            return self._fail(handoff, "handoff_failed", "the grant was replaced")
        self._note_arrived(handoff, message, now)
        handoff.agree(message)
        self._calm(handoff, now)
        return self._push(handoff, now)

    def on_busy(self, message: Busy) -> list[Output]:
        """No blocks now: the handoff ends, the request goes back to the queue."""
        key = (message.request, message.attempt)
        handoff = self._live.get(key)
        if handoff is None or handoff.state is not HandoffState.RESERVING:
            return []
        self._end(handoff)
        return [Refusal(key, message.retry_after)]

    def on_credit(self, endpoint: str, message: Credit, now: float) -> list[Output]:
        """More bytes may go."""
        handoff = self._of(endpoint, message.grant)
        if handoff is None:
            return []
        handoff.credit = max(handoff.credit, message.credit)
        if handoff.pushed > handoff.arrived:
            self._arrived[handoff.endpoint] = now
        else:
            handoff.progress_at = now  # it waited for its turn
        self._calm(handoff, now)
        return self._push(handoff, now)

    def on_committed(self, message: Committed, now: float) -> list[Output]:
        """Ownership has passed."""
        handoff = self._live.get((message.request, message.attempt))
        if handoff is None:
            return []
        if handoff.state is HandoffState.RELEASING:
            self._end(handoff)
            return [Gone(handoff.key)]
        self._arrived[handoff.endpoint] = now
        self._end(handoff)
        return [
            Done(
                key=handoff.key,
                endpoint=handoff.endpoint,
                bytes_sent=sum(f.nbytes for f in handoff.frames),
                bytes_received=message.bytes,
                frames=len(handoff.frames),
                resent=handoff.resent,
                blocks=handoff.blocks - handoff.cached_blocks,
                cached_tokens=handoff.cached_tokens,
                seconds=now - handoff.started,
            )
        ]

    def on_refused(self, message: Refused, now: float) -> list[Output]:
        """Frames are wanted again, or the handoff has failed on the other side."""
        handoff = self._live.get((message.request, message.attempt))
        if handoff is None or handoff.grant != message.grant:
            return []
        if handoff.state is HandoffState.RELEASING:
            return []
        wanted = [i for i in message.frames if 0 <= i < len(handoff.frames)]
        if not wanted or handoff.state is not HandoffState.COMMITTING:
            if message.frames:
                return []  # an answer to an earlier Commit
            return self._fail(handoff, message.code, message.message)
        if message.round <= handoff.refusals:
            return []  # said again: those frames are under way
        handoff.refusals = message.round
        self._note_arrived(handoff, message, now)
        if self._nothing_arrives(handoff, now):
            return self._no_data(handoff)
        handoff.step("resend")
        handoff.commit = None
        handoff.resent += len(wanted)
        handoff.agree(message)
        for index in wanted:
            handoff.checksums.pop(index, None)
            handoff.queue.append(handoff.frames[index])
        self._calm(handoff, now)
        return self._push(handoff, now)

    def on_stale(self, message: Stale) -> list[Output]:
        """The decode worker does not know this grant any more."""
        handoff = self._live.get((message.request, message.attempt))
        if handoff is None or (message.grant and handoff.grant != message.grant):
            return []
        if handoff.state is HandoffState.RELEASING:
            self._end(handoff)
            return [Gone(handoff.key)]
        return self._fail(handoff, "handoff_failed", "the grant is stale")

    def on_gone(self, request: bytes, attempt: int) -> list[Output]:
        """Released or Aborted: the other side holds nothing."""
        handoff = self._live.get((request, attempt))
        if handoff is None:
            return []
        if handoff.state is HandoffState.RELEASING:
            self._end(handoff)
            return [Gone(handoff.key)]
        return self._fail(handoff, "handoff_failed", "aborted by the decode worker")

    def on_revoke(self, endpoint: str, message: Revoke) -> list[Output]:
        """Device path: stop writing, then fence; into an unknown grant nothing is written."""
        handoff = self._of(endpoint, message.grant)
        outputs: list[Output] = [Send(endpoint, Fence(grant=message.grant))]
        if handoff is None:
            return outputs
        return outputs + self._fail(handoff, "handoff_failed", "the grant was revoked")

    def peer_lost(self, endpoint: str, reason: str, incarnation: int = 0) -> list[Output]:
        """The decode worker died or refused the link: all its handoffs are over."""
        outputs: list[Output] = []
        self._arrived.pop(endpoint, None)
        for handoff in list(self._live.values()):
            if handoff.endpoint != endpoint or incarnation not in (0, self._peer_of(handoff)):
                continue
            if handoff.state is HandoffState.RELEASING:
                self._end(handoff)
                outputs.append(Gone(handoff.key))
            else:
                self._end(handoff)
                outputs.append(Failed(handoff.key, "worker_lost", reason, lost_peer=True))
        return outputs

    def unreachable(self, endpoint: str, reason: str) -> list[Output]:
        """The worker does not answer, or no frame reaches it: all its handoffs are over.

        What it holds for them it frees by itself. Blocks it may be reading stay until it says
        that it does not read them, or is dead.
        """
        outputs: list[Output] = []
        for handoff in list(self._live.values()):
            if handoff.endpoint != endpoint:
                continue
            if handoff.state is not HandoffState.RELEASING:
                outputs += self._fail(handoff, "worker_lost", reason, lost_peer=True)
            elif not self.may_be_read(handoff.key):
                self._end(handoff)
                outputs.append(Gone(handoff.key))
        return outputs

    def reconnected(self, endpoint: str, now: float) -> list[Output]:
        """A new connection to the same worker: tell it where its answers go from now on."""
        return [
            self._control(handoff, self._words(handoff, now), now)
            for handoff in self._live.values()
            if handoff.endpoint == endpoint
        ]

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> list[Output]:
        """Repeat unanswered messages; give up what makes no progress."""
        outputs: list[Output] = []
        for handoff in list(self._live.values()):
            if handoff.key in self._live and now >= self._due(handoff):
                outputs += self._overdue(handoff, now)
        if not self._live:
            self._arrived.clear()
        return outputs

    def _due(self, handoff: _Handoff) -> float:
        """When an unchanged handoff needs attention; a transfer that waits for compute never."""
        if handoff.state is HandoffState.SENDING:
            return handoff.retry_at if handoff.queue else math.inf
        return handoff.retry_at

    def _overdue(self, handoff: _Handoff, now: float) -> list[Output]:
        if handoff.state is HandoffState.SENDING and self._nothing_arrives(handoff, now):
            return self._no_data(handoff)
        return self._repeat(handoff, self._words(handoff, now), now)

    def _note_arrived(self, handoff: _Handoff, message: Grant | Refused, now: float) -> None:
        """Learn how much has arrived; with nothing under way the time begins anew."""
        arrived = message.counted if message.arrived is None else message.arrived
        if arrived > handoff.arrived:
            handoff.arrived = min(arrived, handoff.pushed)
            self._arrived[handoff.endpoint] = now
        if handoff.arrived == handoff.pushed:
            handoff.progress_at = now

    def _nothing_arrives(self, handoff: _Handoff, now: float) -> bool:
        """Whether none of the frames under way has arrived for the timeout.

        The handoffs of a peer share one connection, on which a frame may wait for those of the
        others: so what arrived of any of them counts.
        """
        last = max(handoff.progress_at, self._arrived.get(handoff.endpoint, 0.0))
        return now >= last + self._config.timeout

    def _no_data(self, handoff: _Handoff) -> list[Output]:
        """End all handoffs of the peer: those that wait for their turn would find out later."""
        return self.unreachable(handoff.endpoint, f"no KV frame arrives at {handoff.endpoint}")

    @staticmethod
    def _words(handoff: _Handoff, now: float) -> Message:
        """What is to be said to the decode worker in the present state."""
        if handoff.state in (HandoffState.RESERVING, HandoffState.SENDING):
            # Without credit it is asked for once more: the answer tells how much there is.
            return msgspec.structs.replace(handoff.reserve, deadline=handoff.deadline - now)
        if handoff.state is HandoffState.COMMITTING and handoff.commit:
            return msgspec.structs.replace(handoff.commit, deadline=handoff.deadline - now)
        return _release(handoff)

    def _repeat(self, handoff: _Handoff, message: Message, now: float) -> list[Output]:
        if now >= handoff.deadline:
            if handoff.state is not HandoffState.RELEASING:
                return self._fail(handoff, "worker_lost", "the decode worker does not answer")
            if not self.may_be_read(handoff.key):
                self._end(handoff)
                return [Gone(handoff.key)]
        return [self._control(handoff, message, now)]

    def next_timer(self) -> float | None:
        """When :meth:`tick` should run."""
        due = min((self._due(h) for h in self._live.values()), default=math.inf)
        return None if due == math.inf else due

    def check_integrity(self) -> None:
        """Raise InternalError unless every handoff keeps to its credit."""
        for handoff in self._live.values():
            if handoff.sent_bytes > handoff.credit:
                text = f"{handoff.sent_bytes} bytes sent, credit is {handoff.credit}"
                raise InternalError(f"handoff {handoff.key}: {text}")

    # ------------------------------------------------------------------ inside

    def _cut(self, handoff: _Handoff, layer_end: int, block_end: int) -> None:
        """Queue frames of at most ``frame_bytes`` for the new cells."""
        first, last = handoff.block_done, block_end
        layers = layer_end - handoff.layer_done
        if last <= first or layers <= 0 or handoff.grant is None:
            return
        per_block, target = self._layout.block_bytes, self._frame_bytes(handoff)
        blocks_per_frame = max(1, min(last - first, target // per_block))
        whole = blocks_per_frame == last - first
        per_layer = blocks_per_frame * per_block
        layers_per_frame = max(1, target // per_layer) if whole else 1
        for layer in range(handoff.layer_done, layer_end, layers_per_frame):
            for block in range(first, last, blocks_per_frame):
                count = min(layers_per_frame, layer_end - layer)
                blocks = min(blocks_per_frame, last - block)
                frame = KVFrame(
                    grant=handoff.grant,
                    index=len(handoff.frames),
                    layer_start=layer,
                    layer_count=count,
                    block_start=block,
                    block_count=blocks,
                    nbytes=count * blocks * per_block,
                    checksum=0,
                )
                handoff.frames.append(frame)
                handoff.queue.append(frame)

    def _frame_bytes(self, handoff: _Handoff) -> int:
        """Large frames cost less each; a few of them let packing, sending and writing overlap."""
        layer = (handoff.blocks - handoff.cached_blocks) * self._layout.block_bytes
        least = MIN_JOINED_BYTES if layer < MIN_FRAME_BYTES else MIN_FRAME_BYTES
        if handoff.shared:
            least = MIN_SHARED_BYTES
        most = min(self._config.frame_bytes, handoff.frame_limit)
        total = layer * self._layout.num_layers
        return max(min(least, most), min(most, total // FRAMES_IN_FLIGHT))

    def _push(self, handoff: _Handoff, now: float) -> list[Output]:
        outputs: list[Output] = []
        while handoff.queue and handoff.sent_bytes + handoff.queue[0].nbytes <= handoff.credit:
            frame = handoff.queue.popleft()
            handoff.sent_bytes += frame.nbytes
            handoff.pushed += frame.nbytes
            outputs.append(SendFrame(handoff.endpoint, handoff.key, frame))
        if not outputs:
            return self._maybe_commit(handoff, now)
        self._calm(handoff, now)
        return outputs

    def _maybe_commit(self, handoff: _Handoff, now: float) -> list[Output]:
        ready = handoff.maker and not handoff.queue
        complete = len(handoff.checksums) == len(handoff.frames)
        if not ready or not complete or handoff.state is not HandoffState.SENDING:
            return []
        if handoff.maker is None or handoff.grant is None:
            return []
        digest = 0
        for checksum in handoff.checksums.values():
            digest ^= checksum
        handoff.step("commit")
        nbytes = sum(f.nbytes for f in handoff.frames)
        handoff.commit = handoff.maker(handoff.grant, len(handoff.frames), nbytes, digest)
        handoff.retries = 0
        return [self._control(handoff, handoff.commit, now)]

    def _control(self, handoff: _Handoff, message: Message, now: float) -> Send:
        wait = min(self._config.retry * (1 << min(handoff.retries, 8)), self._config.retry_max)
        handoff.retries += 1
        handoff.retry_at = now + wait
        return Send(handoff.endpoint, message)

    def _calm(self, handoff: _Handoff, now: float) -> None:
        handoff.retries = 0
        handoff.retry_at = now + self._config.retry

    def _fail(
        self, handoff: _Handoff, code: str, message: str, *, lost_peer: bool = False
    ) -> list[Output]:
        failed = Failed(handoff.key, code, message, lost_peer)
        if not self.may_be_read(handoff.key):
            self._end(handoff)
            return [*self._give_up(handoff), failed]
        handoff.step("release")
        handoff.queue.clear()
        handoff.retries, handoff.retry_at = 0, 0.0  # said until it is answered
        return [*self._give_up(handoff), failed]

    @staticmethod
    def _give_up(handoff: _Handoff) -> list[Output]:
        """Said once: whoever has not heard it asks whether its grant is still wanted."""
        return [Send(handoff.endpoint, _release(handoff))] if handoff.grant else []

    def _end(self, handoff: _Handoff) -> None:
        handoff.step("end")
        self._live.pop(handoff.key, None)
        if handoff.grant:
            self._by_grant.pop((handoff.endpoint, handoff.grant), None)

    def _of(self, endpoint: str, grant: GrantRef) -> _Handoff | None:
        key = self._by_grant.get((endpoint, grant))
        if key is None:
            self.stale += 1
            return None
        return self._live.get(key)

    @staticmethod
    def _peer_of(handoff: _Handoff) -> int:
        return handoff.grant.incarnation if handoff.grant else handoff.incarnation


def _release(handoff: _Handoff) -> Release:
    request, attempt = handoff.key
    reserve = handoff.reserve
    return Release(
        request=request,
        attempt=attempt,
        grant=handoff.grant,
        incarnation=reserve.incarnation,
        ticket=reserve.ticket,
    )
