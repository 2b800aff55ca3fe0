"""The prefill side of all handoffs: which handoffs live, and with which decode workers.

Invariants: a frame is sent only for cells whose KV is final, and only within the grant's
cumulative credit; Commit is sent only after every frame was packed; the blocks are held until the
decode worker answers Committed, so any frame can be packed again; every handoff ends in exactly
one of Done, Failed or Gone.

Exception: a decode worker may read the blocks directly in this worker's memory (``fenced``). Then
Failed is followed by Gone, and the blocks must stay until Gone, because the decode worker may still
read them (:meth:`Sender.may_be_read`). Gone needs the decode worker's confirmation or its death;
a timeout is never enough.

Theory of operation
-------------------

Control messages and frames travel on two connections. Each can lose, repeat or delay what it
carries, in one direction only, and the decode worker can be slow, restart, or end the grant.

*One message per state.* Reserve, then Reserve as a request for credit, then Commit, or Release: the
message of the current state is repeated until it is answered (:meth:`.Handoff.current_message`).
The receiver gives a repeated message the same answer, so Grant, Credit and Committed need no
acknowledgment of their own.

*Totals instead of increments.* Credit and arrived bytes are sums since the grant began, and the
sender keeps the larger of two. So the loss, repetition or late arrival of such a message changes
nothing. If frames are lost, the receiver counts their bytes as spent, and ``agree`` takes that
over.

*The receiver names what is missing.* Refused lists frames by index, with a round number, so that a
repeated Refused sends no frame twice. Rejected: an acknowledgment per frame, which would tell the
sender little that the credit does not.

*The timeout belongs to the peer, not to the handoff.* All handoffs with a decode worker share a
connection, and a frame may wait there for frames of others, so any arrival counts for all of them.
A handoff that waits for compute has no timer. One that waits for credit repeats Reserve. A repeated
Grant proves that the peer lives, but not that frames arrive.

*Giving up is final here, and slow only where memory is shared.* A failed handoff frees its blocks
at once, and sends Release once: if that is lost, the receiver asks about its grant and gets
another. If the peer reads this worker's memory, Release is repeated instead, until the peer
confirms that it stopped. Rejected: free those blocks after a timeout. A reader that was only paused
would copy the KV of another request.

Rejected: the decode worker pulls. Then finished blocks wait for a reader that may be dead
(docs/decisions/0004-kv-blocks-are-pushed-into-a-grant.md).

The sender names blocks by their logical index. The shell owns packing, checksums and sockets: it
performs :class:`SendFrame` and then calls :meth:`Sender.on_packed`.
"""

from __future__ import annotations

import math

from baton.proto.errors import InternalError
from baton.proto.layout import KVLayout
from baton.proto.limits import MAX_KV_FRAME_BYTES
from baton.proto.wire.messages import (
    Busy,
    Committed,
    Credit,
    Fence,
    Grant,
    GrantRef,
    Refused,
    Release,
    Reserve,
    Revoke,
    Stale,
)

from .sender_handoff import (
    CommitMaker,
    Failed,
    Gone,
    Granted,
    Handoff,
    HandoffState,
    Key,
    Output,
    Refusal,
    Send,
    SenderConfig,
)


class Sender:
    """All handoffs of one prefill worker."""

    def __init__(self, incarnation: int, layout: KVLayout, config: SenderConfig) -> None:
        self._incarnation = incarnation
        self._layout = layout
        self._config = config
        self._live: dict[Key, Handoff] = {}
        self._by_grant: dict[tuple[str, GrantRef], Key] = {}  # a grant is unique per endpoint only
        self._arrived: dict[str, float] = {}  # by endpoint: last time a frame was known to arrive

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: Key) -> bool:
        return key in self._live

    def endpoints(self) -> set[str]:
        """Decode endpoints with a live handoff."""
        return {h.endpoint for h in self._live.values()}

    def going_on(self) -> list[Key]:
        """Keys of the handoffs that were not given up."""
        live = self._live.values()
        return [handoff.key for handoff in live if handoff.state is not HandoffState.RELEASING]

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
        layout: KVLayout | None = None,
    ) -> list[Output]:
        """Reserve blocks at ``endpoint``. No frame will exceed ``frame_limit`` bytes.

        ``shared``: the decode worker reads the blocks from this worker's pool. ``fenced``: the
        decode worker may still read them after the handoff has failed. ``layout``: of the frames,
        if it differs from this worker's blocks.
        """
        key = (reserve.request, reserve.attempt)
        handoff = self._live[key] = Handoff(
            layout=layout or self._layout,
            config=self._config,
            key=key,
            endpoint=endpoint,
            incarnation=incarnation,
            reserve=reserve,
            started=now,
            frame_limit=frame_limit,
            shared=shared,
            fenced=fenced,
        )
        return [handoff.control(reserve, now)]

    def ready(
        self, key: Key, *, layer_end: int, token_end: int, last: bool, now: float
    ) -> list[Output]:
        """Send the KV that is now final: layers below ``layer_end``, tokens below ``token_end``.

        Only whole blocks are sent. The last, partial block is sent at the prompt's end (``last``).
        """
        handoff = self._live.get(key)
        if handoff is None or handoff.state is not HandoffState.SENDING:
            return []
        return handoff.ready(layer_end, token_end, now, last=last)

    def finish(self, key: Key, maker: CommitMaker, now: float) -> list[Output]:
        """Commit after all frames are packed. :meth:`ready` must have announced every cell."""
        handoff = self._live.get(key)
        if handoff is None or handoff.state is not HandoffState.SENDING:
            return []
        handoff.maker = maker
        return handoff.push(now)

    def on_packed(self, key: Key, index: int, checksum: int, now: float) -> list[Output]:
        """Record the checksum of a frame that the shell has packed and sent."""
        handoff = self._live.get(key)
        if handoff is None:
            return []
        handoff.checksums[index] = checksum
        return handoff.maybe_commit(now)

    def not_packed(self, key: Key) -> list[Output]:
        """Fail a handoff, because the shell cannot pack one of its frames."""
        handoff = self._live.get(key)
        if handoff is None or handoff.state is HandoffState.RELEASING:
            return []
        return self._fail(handoff, "handoff_failed", "the KV blocks could not be read")

    def release(self, key: Key, now: float) -> list[Output]:
        """Give the handoff up. :class:`Gone` follows after the other side has confirmed."""
        handoff = self._live.get(key)
        if handoff is None:
            return [Gone(key)]
        if handoff.state is HandoffState.RELEASING:
            return []
        handoff.withdraw()
        return [handoff.control(handoff.release_message(), now)]

    def may_be_read(self, key: Key) -> bool:
        """True if the decode worker may still read the handoff's blocks, so they must stay."""
        handoff = self._live.get(key)
        return handoff is not None and handoff.may_be_read

    # ------------------------------------------------------------------ messages of the peer

    def is_with(self, endpoint: str, request: bytes, attempt: int) -> bool:
        """True unless the handoff of this attempt belongs to a worker at another endpoint."""
        handoff = self._live.get((request, attempt))
        return handoff is None or handoff.endpoint == endpoint

    def on_grant(self, endpoint: str, message: Grant, now: float) -> list[Output]:
        """Start sending into the promised blocks. An unwanted grant is released."""
        key = (message.request, message.attempt)
        handoff = self._live.get(key)
        if handoff is None or handoff.endpoint != endpoint:
            release = Release(
                request=key[0], attempt=key[1], grant=message.grant, incarnation=self._incarnation
            )
            return [Send(endpoint, release)]
        if handoff.state is HandoffState.RESERVING:
            handoff.accept(message, now)
            self._by_grant[endpoint, message.grant] = key
            return [Granted(key, message.cached_tokens)]
        if handoff.state is not HandoffState.SENDING:
            return []
        if message.grant != handoff.grant:
            return self._fail(handoff, "handoff_failed", "the grant was replaced")
        # A repeated Grant shows that the peer is alive, and a Credit may have been lost. It does
        # not prove that frames arrive: the receiver gives the same answer if it receives none.
        if handoff.note_arrived(message, now):
            self._arrived[endpoint] = now
        handoff.agree(message)
        handoff.calm(now)
        return handoff.push(now)

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
        handoff.calm(now)
        return handoff.push(now)

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
        return [handoff.done(message, now)]

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
        if handoff.note_arrived(message, now):
            self._arrived[handoff.endpoint] = now
        return self._stalled(handoff, now) or handoff.send_again(wanted, message, now)

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
            if handoff.endpoint != endpoint or incarnation not in (0, handoff.decode_incarnation):
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
            elif not handoff.may_be_read:
                self._end(handoff)
                outputs.append(Gone(handoff.key))
        return outputs

    def reconnected(self, endpoint: str, now: float) -> list[Output]:
        """Repeat each handoff's current message over a new connection to the same worker."""
        return [
            handoff.control(handoff.current_message(now), now)
            for handoff in self._live.values()
            if handoff.endpoint == endpoint
        ]

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> list[Output]:
        """Repeat unanswered messages and fail handoffs without progress."""
        outputs: list[Output] = []
        for handoff in list(self._live.values()):
            if handoff.key not in self._live or now < handoff.due():
                continue
            releasing = handoff.state is HandoffState.RELEASING
            sending = handoff.state is HandoffState.SENDING
            if sending and (failed := self._stalled(handoff, now)):
                outputs += failed
            elif now < handoff.deadline or (releasing and handoff.may_be_read):
                outputs.append(handoff.control(handoff.current_message(now), now))
            elif releasing:
                self._end(handoff)
                outputs.append(Gone(handoff.key))
            else:
                outputs += self._fail(handoff, "worker_lost", "the decode worker does not answer")
        if not self._live:
            self._arrived.clear()
        return outputs

    def _stalled(self, handoff: Handoff, now: float) -> list[Output]:
        """Fail all handoffs with the peer if no frame arrives there; else return an empty list.

        The handoffs that wait for credit or compute would only time out later.
        """
        if not handoff.nothing_arrives(self._arrived.get(handoff.endpoint, 0.0), now):
            return []
        return self.unreachable(handoff.endpoint, f"no KV frame arrives at {handoff.endpoint}")

    def next_timer(self) -> float | None:
        """Time at which :meth:`tick` should run next, or None."""
        due = min((h.due() for h in self._live.values()), default=math.inf)
        return None if due == math.inf else due

    def check_integrity(self) -> None:
        """Raise InternalError if a handoff is kept after its end or sent more than its credit."""
        for handoff in self._live.values():
            handoff.check_integrity()
        if any(handoff.state is HandoffState.ENDED for handoff in self._live.values()):
            raise InternalError("a handoff is kept after its end")
        if not self._live.keys() >= set(self._by_grant.values()):
            raise InternalError("a grant leads to a handoff that ended")

    # ------------------------------------------------------------------ ends

    def _fail(
        self, handoff: Handoff, code: str, message: str, *, lost_peer: bool = False
    ) -> list[Output]:
        failed = Failed(handoff.key, code, message, lost_peer)
        if handoff.may_be_read:
            handoff.withdraw()
            handoff.retry_at = 0.0  # tick() repeats Release until it is answered
        else:
            self._end(handoff)
        return [*handoff.release_once(), failed]

    def _end(self, handoff: Handoff) -> None:
        handoff.step("end")
        self._live.pop(handoff.key, None)
        if handoff.grant:
            self._by_grant.pop((handoff.endpoint, handoff.grant), None)

    def key_of(self, endpoint: str, grant: GrantRef) -> tuple[bytes, int] | None:
        """Return the key of the handoff into a grant of ``endpoint``, or None."""
        return self._by_grant.get((endpoint, grant))

    def _of(self, endpoint: str, grant: GrantRef) -> Handoff | None:
        key = self._by_grant.get((endpoint, grant))
        return None if key is None else self._live.get(key)
