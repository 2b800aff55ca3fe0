"""One handoff at the prefill worker: its states, frames and credit, from Reserve to Committed.

Invariants: a frame is queued only for cells whose KV is final; frames leave within the grant's
cumulative credit; Commit is built only after every frame was packed. What happens between handoffs
and to decode workers is in :mod:`.sender`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from baton.proto.errors import InternalError
from baton.proto.layout import KVLayout
from baton.proto.wire.messages import (
    Commit,
    Committed,
    Grant,
    GrantRef,
    KVFrame,
    Message,
    Refused,
    Release,
    Reserve,
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
    seconds: float  # since the Reserve
    sent_at: float  # when the first frame was sent; 0.0 without frames


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


@dataclass(slots=True)
class Handoff:
    """The state of one handoff at the sender."""

    layout: KVLayout
    config: SenderConfig
    key: Key
    endpoint: str
    incarnation: int  # of the decode worker, as the router reported it; 0 = any
    reserve: Reserve
    started: float
    frame_limit: int  # bytes the receiver accepts in one frame
    shared: bool  # the receiver reads the blocks from this worker's pool
    fenced: bool  # the receiver reads the blocks: hold them until it confirms that it stopped
    blocks: int = field(init=False)
    deadline: float = field(init=False)
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
    sent_at: float = 0.0  # when the first frame was sent
    refusals: int = 0  # highest refusal round received from the other side

    def __post_init__(self) -> None:
        self.blocks = self.layout.blocks_for(self.reserve.num_tokens)
        self.deadline = self.started + self.reserve.deadline

    def step(self, event: str) -> None:
        """Change the state. Raises ValueError if the state forbids ``event``."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise ValueError(f"handoff {self.key}: {event} in state {self.state.value}")
        self.state = target

    @property
    def decode_incarnation(self) -> int:
        """Incarnation of the decode worker; 0 if not known."""
        return self.grant.incarnation if self.grant else self.incarnation

    @property
    def may_be_read(self) -> bool:
        """True if the decode worker may still read the blocks."""
        return self.fenced and bool(self.frames)

    # ------------------------------------------------------------------ control messages

    def control(self, message: Message, now: float) -> Send:
        """Send a control message, and repeat it later if it stays unanswered."""
        wait = min(self.config.retry * (1 << min(self.retries, 8)), self.config.retry_max)
        self.retries += 1
        self.retry_at = now + wait
        return Send(self.endpoint, message)

    def calm(self, now: float) -> None:
        """Start the back-off of repeated messages again, because the peer has answered."""
        self.retries = 0
        self.retry_at = now + self.config.retry

    def due(self) -> float:
        """Time of the next action; never while the handoff waits for compute."""
        if self.state is HandoffState.SENDING:
            return self.retry_at if self.queue else math.inf
        return self.retry_at

    def current_message(self, now: float) -> Message:
        """Return the message to repeat to the decode worker in the current state."""
        if self.state in (HandoffState.RESERVING, HandoffState.SENDING):
            # Repeating Reserve asks for credit again: the answering Grant carries the total.
            return msgspec.structs.replace(self.reserve, deadline=self.deadline - now)
        if self.state is HandoffState.COMMITTING and self.commit:
            return msgspec.structs.replace(self.commit, deadline=self.deadline - now)
        return self.release_message()

    def release_message(self) -> Release:
        """Return the Release of this attempt."""
        request, attempt = self.key
        return Release(
            request=request,
            attempt=attempt,
            grant=self.grant,
            incarnation=self.reserve.incarnation,
            ticket=self.reserve.ticket,
        )

    def release_once(self) -> list[Output]:
        """Send Release once. If it is lost, the receiver's lease asks again."""
        return [Send(self.endpoint, self.release_message())] if self.grant else []

    def withdraw(self) -> None:
        """Give the handoff up: send no more frames and wait for the peer's confirmation."""
        self.step("release")
        self.queue.clear()
        self.retries = 0

    def accept(self, message: Grant, now: float) -> None:
        """Adopt the promised blocks; cached ones need no frames."""
        self.step("grant")
        self.grant = message.grant
        self.agree(message)
        self.cached_tokens = message.cached_tokens
        self.cached_blocks = message.cached_tokens // self.layout.block_size
        self.block_done = self.cached_blocks
        self.calm(now)
        self.progress_at = now

    def done(self, message: Committed, now: float) -> Done:
        """Return the result of a handoff that the decode worker confirmed."""
        return Done(
            key=self.key,
            endpoint=self.endpoint,
            bytes_sent=sum(f.nbytes for f in self.frames),
            bytes_received=message.bytes,
            frames=len(self.frames),
            resent=self.resent,
            blocks=self.blocks - self.cached_blocks,
            cached_tokens=self.cached_tokens,
            seconds=now - self.started,
            sent_at=self.sent_at,
        )

    # ------------------------------------------------------------------ credit and arrivals

    def agree(self, message: Grant | Refused) -> None:
        """Adopt the receiver's credit, and the part of it that the receiver has written off.

        If a message with credit was lost, the receiver writes that credit off; so must the sender.
        """
        self.credit = max(self.credit, message.credit)
        self.sent_bytes = max(self.sent_bytes, min(message.counted, self.credit))

    def note_arrived(self, message: Grant | Refused, now: float) -> bool:
        """Record how many bytes arrived; return whether that is more than before.

        With nothing in flight, the timeout starts again.
        """
        arrived = message.counted if message.arrived is None else message.arrived
        more = arrived > self.arrived
        if more:
            self.arrived = min(arrived, self.pushed)
        if self.arrived == self.pushed:
            self.progress_at = now
        return more

    def nothing_arrives(self, peer_arrival: float, now: float) -> bool:
        """True if no frame in flight to this peer has arrived for the timeout.

        ``peer_arrival``: last arrival of any frame at this peer. All handoffs with a peer share one
        connection, where a frame may wait for frames of other handoffs. So the arrival of any frame
        counts as progress.
        """
        return now >= max(self.progress_at, peer_arrival) + self.config.timeout

    def check_integrity(self) -> None:
        """Raise InternalError if more bytes were sent than the credit allows."""
        if self.sent_bytes > self.credit:
            text = f"{self.sent_bytes} bytes sent, credit is {self.credit}"
            raise InternalError(f"handoff {self.key}: {text}")

    # ------------------------------------------------------------------ frames

    def ready(self, layer_end: int, token_end: int, now: float, *, last: bool) -> list[Output]:
        """Queue the KV that is now final and send what the credit allows."""
        if not self.queue:
            self.calm(now)  # the handoff waited for compute, not for the peer
            self.progress_at = now
        block_end = self.blocks if last else token_end // self.layout.block_size
        self._cut(layer_end, block_end)
        if layer_end == self.layout.num_layers:
            self.layer_done = 0
            self.block_done = max(self.block_done, block_end)
        else:
            self.layer_done = layer_end
        return self.push(now)

    def send_again(self, wanted: list[int], message: Refused, now: float) -> list[Output]:
        """Queue frames that the receiver misses."""
        self.step("resend")
        self.commit = None
        self.resent += len(wanted)
        self.agree(message)
        for index in wanted:
            self.checksums.pop(index, None)
            self.queue.append(self.frames[index])
        self.calm(now)
        return self.push(now)

    def push(self, now: float) -> list[Output]:
        """Send queued frames within the credit; commit if none is left."""
        outputs: list[Output] = []
        while self.queue and self.sent_bytes + self.queue[0].nbytes <= self.credit:
            frame = self.queue.popleft()
            self.sent_bytes += frame.nbytes
            self.pushed += frame.nbytes
            outputs.append(SendFrame(self.endpoint, self.key, frame))
        if not outputs:
            return self.maybe_commit(now)
        self.sent_at = self.sent_at or now
        self.calm(now)
        return outputs

    def maybe_commit(self, now: float) -> list[Output]:
        """Send Commit if all cells were announced and every frame is packed."""
        ready = self.maker and not self.queue
        complete = len(self.checksums) == len(self.frames)
        if not ready or not complete or self.state is not HandoffState.SENDING:
            return []
        if self.maker is None or self.grant is None:
            return []
        digest = 0
        for checksum in self.checksums.values():
            digest ^= checksum
        self.step("commit")
        nbytes = sum(f.nbytes for f in self.frames)
        self.commit = self.maker(self.grant, len(self.frames), nbytes, digest)
        self.retries = 0
        return [self.control(self.commit, now)]

    def _cut(self, layer_end: int, block_end: int) -> None:
        """Queue frames for the newly final cells."""
        first, last = self.block_done, block_end
        layers = layer_end - self.layer_done
        if last <= first or layers <= 0 or self.grant is None:
            return
        per_block, target = self.layout.block_bytes, self._frame_bytes()
        blocks_per_frame = max(1, min(last - first, target // per_block))
        whole = blocks_per_frame == last - first
        per_layer = blocks_per_frame * per_block
        layers_per_frame = max(1, target // per_layer) if whole else 1
        for layer in range(self.layer_done, layer_end, layers_per_frame):
            for block in range(first, last, blocks_per_frame):
                count = min(layers_per_frame, layer_end - layer)
                blocks = min(blocks_per_frame, last - block)
                frame = KVFrame(
                    grant=self.grant,
                    index=len(self.frames),
                    layer_start=layer,
                    layer_count=count,
                    block_start=block,
                    block_count=blocks,
                    nbytes=count * blocks * per_block,
                    checksum=0,
                )
                self.frames.append(frame)
                self.queue.append(frame)

    def _frame_bytes(self) -> int:
        """Choose the frame size: large frames cost less per byte, several frames overlap.

        A GPU's blocks are read in place, by one kernel: one frame names all that became final.
        """
        if self.fenced:
            return self.frame_limit
        layer = (self.blocks - self.cached_blocks) * self.layout.block_bytes
        least = MIN_JOINED_BYTES if layer < MIN_FRAME_BYTES else MIN_FRAME_BYTES
        if self.shared:
            least = MIN_SHARED_BYTES
        most = min(self.config.frame_bytes, self.frame_limit)
        total = layer * self.layout.num_layers
        return max(min(least, most), min(most, total // FRAMES_IN_FLIGHT))
