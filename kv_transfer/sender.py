"""The prefill side of a handoff: from Reserve to Committed.

Invariants: a frame is sent only for cells whose KV is final, and only within the grant's
cumulative credit; Commit is sent only after every frame was packed; the blocks are held until the
decode worker answers Committed, so any frame can be packed again; every handoff ends in exactly
one of Done, Failed or Gone.

Exception: a decode worker may read the blocks directly in this worker's memory (``fenced``). Then
Failed is followed by Gone, and the blocks must stay until Gone, because the decode worker may still
read them (:meth:`Sender.may_be_read`). Gone needs the decode worker's confirmation or its death;
a timeout is never enough.

The sender names blocks by their logical index. The shell owns packing, checksums and sockets: it
performs :class:`SendFrame` and then calls :meth:`Sender.on_packed`.
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
from ..proto.wire.messages import (
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
"""Smallest frame, in bytes, that a large layer is cut into so that transfer and compute overlap."""
MIN_JOINED_BYTES = 1 << 20
"""Smallest frame, in bytes, if layers are small and travel together.

Such a frame is always gathered. Each frame costs both sides together about 200 µs of CPU time, and
that cost outweighs the overlap."""
MIN_SHARED_BYTES = 2 << 20
"""Smallest frame, in bytes, if the receiver reads the sender's pool.

No payload travels, so overlap gains nothing and small frames only add header costs."""
FRAMES_IN_FLIGHT = 8
"""Number of frames a handoff is cut into at least, unless they would become too small."""

Key = tuple[bytes, int]
"""(request, attempt): identifies one handoff."""


class HandoffState(Enum):
    """Life of a handoff at the sender."""

    RESERVING = "reserving"  # Reserve was sent
    SENDING = "sending"  # granted: frames are sent as layers finish and credit allows
    COMMITTING = "committing"  # Commit was sent
    RELEASING = "releasing"  # given up: Release was sent
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
    """Builds the Commit of a handoff after its manifest is known (context, first token, router)."""

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
    """Pack these cells of handoff ``key`` and send them to the data socket of ``endpoint``."""

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
    """The decode worker has no free blocks. The handoff ended; retry later or on another worker."""

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
    """The handoff cannot succeed; the decode worker holds nothing for it."""

    key: Key
    code: str
    message: str
    lost_peer: bool = False


@dataclass(slots=True, frozen=True)
class Gone:
    """A released handoff is confirmed: neither side holds anything for it."""

    key: Key


Output = Send | SendFrame | Granted | Refusal | Done | Failed | Gone


@dataclass(slots=True)
class _Handoff:
    key: Key
    endpoint: str
    incarnation: int  # of the decode worker, as the router reported it; 0 = any
    reserve: Reserve
    blocks: int
    started: float
    deadline: float
    frame_limit: int  # bytes the receiver accepts in one frame
    shared: bool  # the receiver reads the blocks from this worker's pool
    fenced: bool  # the receiver reads the blocks: hold them until it confirms that it stopped
    state: HandoffState = HandoffState.RESERVING
    grant: GrantRef | None = None
    cached_blocks: int = 0
    cached_tokens: int = 0
    credit: int = 0
    sent_bytes: int = 0  # cumulative, with repeated frames; limited by credit
    pushed: int = 0  # cumulative, with bytes the receiver has written off as lost
    arrived: int = 0  # part of ``pushed`` that the receiver has reported
    frames: list[KVFrame] = field(default_factory=list)
    checksums: dict[int, int] = field(default_factory=dict)
    queue: deque[KVFrame] = field(default_factory=deque)
    layer_done: int = 0  # layers already queued in the current step
    block_done: int = 0  # blocks final in every layer
    maker: CommitMaker | None = None
    commit: Commit | None = None
    retry_at: float = 0.0
    progress_at: float = 0.0  # last time frames were known to arrive, or none was in flight
    retries: int = 0
    resent: int = 0
    refusals: int = 0  # highest refusal round received from the other side

    def agree(self, message: Grant | Refused) -> None:
        """Adopt the receiver's credit, and the part of it that the receiver has written off.

        If a message with credit was lost, the receiver writes that credit off; so must the sender.
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

    ``frame_bytes``: target size of a frame. ``retry``: seconds before an unanswered control
    message is repeated (doubles up to ``retry_max``). ``timeout``: the handoff fails if no frame
    in flight to a peer arrives for this many seconds.
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
        self._by_grant: dict[tuple[str, GrantRef], Key] = {}  # a grant is unique per endpoint only
        self._arrived: dict[str, float] = {}  # by endpoint: last time a frame was known to arrive
        self.stale = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: Key) -> bool:
        return key in self._live

    def endpoints(self) -> set[str]:
        """Decode endpoints with a live handoff."""
        return {h.endpoint for h in self._live.values()}

    # ------------------------------------------------------------------ calls of the worker

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
        """Reserve blocks at ``endpoint``. No frame will exceed ``frame_limit`` bytes.

        ``shared``: the decode worker reads the blocks from this worker's pool. ``fenced``: the
        decode worker may still read them after the handoff has failed.
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
        """Send the KV that is now final: layers below ``layer_end``, tokens below ``token_end``.

        Only whole blocks are sent. The last, partial block is sent at the prompt's end (``last``).
        """
        handoff = self._live.get(key)
        if handoff is None or handoff.state is not HandoffState.SENDING:
            return []
        if not handoff.queue:
            self._calm(handoff, now)  # the handoff waited for compute, not for the peer
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
        """Commit after all frames are packed. :meth:`ready` must have announced every cell."""
        handoff = self._live.get(key)
        if handoff is None or handoff.state is not HandoffState.SENDING:
            return []
        handoff.maker = maker
        return self._push(handoff, now)

    def on_packed(self, key: Key, index: int, checksum: int, now: float) -> list[Output]:
        """Record the checksum of a frame that the shell has packed and sent."""
        handoff = self._live.get(key)
        if handoff is None:
            return []
        handoff.checksums[index] = checksum
        return self._maybe_commit(handoff, now)

    def release(self, key: Key, now: float) -> list[Output]:
        """Give the handoff up. :class:`Gone` follows after the other side has confirmed."""
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
        """True if the decode worker may still read the handoff's blocks, so they must stay."""
        handoff = self._live.get(key)
        return handoff is not None and handoff.fenced and bool(handoff.frames)

    # ------------------------------------------------------------------ messages of the peer

    def is_with(self, endpoint: str, request: bytes, attempt: int) -> bool:
        """True unless the handoff of this attempt belongs to a worker at another endpoint."""
        handoff = self._live.get((request, attempt))
        return handoff is None or handoff.endpoint == endpoint

    def on_grant(self, endpoint: str, message: Grant, now: float) -> list[Output]:
        """Start sending into the promised blocks. A grant that is no longer wanted is released."""
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
        """Handle a repeated Grant: the peer is alive, and a Credit may have been lost.

        While frames are in flight, a repeated Grant does not prove that frames arrive: the
        receiver gives the same answer if it receives none of them.
        """
        if message.grant != handoff.grant:
            return self._fail(handoff, "handoff_failed", "the grant was replaced")
        self._note_arrived(handoff, message, now)
        handoff.agree(message)
        self._calm(handoff, now)
        return self._push(handoff, now)

    def on_busy(self, message: Busy) -> list[Output]:
        """End the handoff, because the decode worker has no free blocks; requeue the request."""
        key = (message.request, message.attempt)
        handoff = self._live.get(key)
        if handoff is None or handoff.state is not HandoffState.RESERVING:
            return []
        self._end(handoff)
        return [Refusal(key, message.retry_after)]

    def on_credit(self, endpoint: str, message: Credit, now: float) -> list[Output]:
        """Send more frames with the raised credit."""
        handoff = self._of(endpoint, message.grant)
        if handoff is None:
            return []
        handoff.credit = max(handoff.credit, message.credit)
        if handoff.pushed > handoff.arrived:
            self._arrived[handoff.endpoint] = now
        else:
            handoff.progress_at = now  # nothing was in flight: it waited for credit
        self._calm(handoff, now)
        return self._push(handoff, now)

    def on_committed(self, message: Committed, now: float) -> list[Output]:
        """End the handoff: the decode worker now owns the request."""
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
        """Send the requested frames again, or fail the handoff if none is requested."""
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
            return []  # a repeated refusal: its frames are already in flight
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
        """Fail or end the handoff, because the decode worker no longer has this grant."""
        handoff = self._live.get((message.request, message.attempt))
        if handoff is None or (message.grant and handoff.grant != message.grant):
            return []
        if handoff.state is HandoffState.RELEASING:
            self._end(handoff)
            return [Gone(handoff.key)]
        return self._fail(handoff, "handoff_failed", "the grant is stale")

    def on_gone(self, request: bytes, attempt: int) -> list[Output]:
        """Handle Released or Aborted: the decode worker holds nothing for this attempt."""
        handoff = self._live.get((request, attempt))
        if handoff is None:
            return []
        if handoff.state is HandoffState.RELEASING:
            self._end(handoff)
            return [Gone(handoff.key)]
        return self._fail(handoff, "handoff_failed", "aborted by the decode worker")

    def on_revoke(self, endpoint: str, message: Revoke) -> list[Output]:
        """Device path: stop writing and answer Fence, also for an unknown grant."""
        handoff = self._of(endpoint, message.grant)
        outputs: list[Output] = [Send(endpoint, Fence(grant=message.grant))]
        if handoff is None:
            return outputs
        return outputs + self._fail(handoff, "handoff_failed", "the grant was revoked")

    def peer_lost(self, endpoint: str, reason: str, incarnation: int = 0) -> list[Output]:
        """End all handoffs with a decode worker that died or refused the link."""
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
        """Fail all handoffs with a worker that does not answer or receives no frame.

        That worker frees their blocks by its own timeout. Blocks that it may be reading stay here
        until it confirms that it stopped reading, or is dead.
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
        """Repeat each handoff's current message over a new connection to the same worker."""
        return [
            self._control(handoff, self._words(handoff, now), now)
            for handoff in self._live.values()
            if handoff.endpoint == endpoint
        ]

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> list[Output]:
        """Repeat unanswered messages and fail handoffs without progress."""
        outputs: list[Output] = []
        for handoff in list(self._live.values()):
            if handoff.key in self._live and now >= self._due(handoff):
                outputs += self._overdue(handoff, now)
        if not self._live:
            self._arrived.clear()
        return outputs

    def _due(self, handoff: _Handoff) -> float:
        """Time of the next action; never while the handoff waits for compute."""
        if handoff.state is HandoffState.SENDING:
            return handoff.retry_at if handoff.queue else math.inf
        return handoff.retry_at

    def _overdue(self, handoff: _Handoff, now: float) -> list[Output]:
        if handoff.state is HandoffState.SENDING and self._nothing_arrives(handoff, now):
            return self._no_data(handoff)
        return self._repeat(handoff, self._words(handoff, now), now)

    def _note_arrived(self, handoff: _Handoff, message: Grant | Refused, now: float) -> None:
        """Record how many bytes arrived. With nothing in flight, restart the timeout."""
        arrived = message.counted if message.arrived is None else message.arrived
        if arrived > handoff.arrived:
            handoff.arrived = min(arrived, handoff.pushed)
            self._arrived[handoff.endpoint] = now
        if handoff.arrived == handoff.pushed:
            handoff.progress_at = now

    def _nothing_arrives(self, handoff: _Handoff, now: float) -> bool:
        """True if no frame in flight to this peer has arrived for the timeout.

        All handoffs with a peer share one connection, where a frame may wait for frames of other
        handoffs. So the arrival of any frame counts as progress.
        """
        last = max(handoff.progress_at, self._arrived.get(handoff.endpoint, 0.0))
        return now >= last + self._config.timeout

    def _no_data(self, handoff: _Handoff) -> list[Output]:
        """Fail all handoffs with the peer now; the waiting ones would only time out later."""
        return self.unreachable(handoff.endpoint, f"no KV frame arrives at {handoff.endpoint}")

    @staticmethod
    def _words(handoff: _Handoff, now: float) -> Message:
        """Return the message to repeat to the decode worker in the current state."""
        if handoff.state in (HandoffState.RESERVING, HandoffState.SENDING):
            # Repeating Reserve asks for credit again: the answering Grant carries the total.
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
        """Time at which :meth:`tick` should run next, or None."""
        due = min((self._due(h) for h in self._live.values()), default=math.inf)
        return None if due == math.inf else due

    def check_integrity(self) -> None:
        """Raise InternalError if a handoff has sent more bytes than its credit."""
        for handoff in self._live.values():
            if handoff.sent_bytes > handoff.credit:
                text = f"{handoff.sent_bytes} bytes sent, credit is {handoff.credit}"
                raise InternalError(f"handoff {handoff.key}: {text}")

    # ------------------------------------------------------------------ internals

    def _cut(self, handoff: _Handoff, layer_end: int, block_end: int) -> None:
        """Queue frames for the newly final cells."""
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
        """Choose the frame size: large frames cost less per byte, several frames overlap."""
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
        handoff.retries, handoff.retry_at = 0, 0.0  # tick() repeats Release until it is answered
        return [*self._give_up(handoff), failed]

    @staticmethod
    def _give_up(handoff: _Handoff) -> list[Output]:
        """Send Release once. If it is lost, the receiver's lease asks again."""
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
