"""Collect the outgoing messages of one loop turn and send one envelope per peer.

Sending costs per envelope, so all messages of a turn to one peer share an envelope, in order.
Batches over a limit are split. Messages that ZeroMQ does not accept are reported and dropped: every
sender in the protocol repeats until it is answered. A message too large for any envelope fails
alone; other messages are still sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from itertools import chain
from typing import Generic, TypeVar

from baton.proto.limits import MAX_CONTROL_BYTES
from baton.proto.wire.envelope import Digest, EnvelopeEncoder
from baton.proto.wire.messages import Message

from ..process.log import get_logger
from .channel import Buffers, SendResult

MESSAGES_PER_ENVELOPE = 4096
CONTEXTS_PER_ENVELOPE = 8
"""Messages with a context can take megabytes each, and an envelope has a size limit."""

_LARGE = frozenset(
    kind for kind in Message.__subclasses__() if {"context", "files"} & {*kind.__struct_fields__}
)
"""Types of messages that can be large."""

Peer = TypeVar("Peer")
_log = get_logger()


class Outbox(Generic[Peer]):
    """Messages by peer until :meth:`flush`, to be called at the end of each loop turn.

    ``send(peer, frames)``: a channel's send.
    ``on_unsent(peer, messages, result)``: called once per peer and flush with all messages that
    ZeroMQ did not accept, in order.
    ``on_refused(peer, message, reason)``: called for a message that cannot be encoded; it may
    queue a replacement.
    ``max_bytes``: size limit of an envelope's first frame at the peers.
    ``digest``: seals the envelopes.
    """

    def __init__(
        self,
        send: Callable[[Peer, Buffers], SendResult],
        on_unsent: Callable[[Peer, list[Message], SendResult], object] | None = None,
        max_bytes: int = MAX_CONTROL_BYTES,
        *,
        digest: Digest | None = None,
        on_refused: Callable[[Peer, Message, str], object] | None = None,
    ) -> None:
        self._send = send
        self._on_unsent = on_unsent
        self._on_refused = on_refused
        self._encoder = EnvelopeEncoder(max_bytes, digest)
        self._waiting: defaultdict[Peer, list[Message]] = defaultdict(list)
        self._latest: dict[tuple[Peer, type], int] = {}  # index in the peer's waiting list
        self.pressing = False  # whether a queued message needs the next flush
        self.envelopes = 0
        self.unsent = 0

    @property
    def waiting(self) -> bool:
        """Whether anything is queued, pressing or not."""
        return bool(self._waiting)

    def put(self, peer: Peer, message: Message) -> None:
        """Append ``message`` to the queue of ``peer``."""
        self._waiting[peer].append(message)
        self.pressing = True

    def put_patient(self, peer: Peer, message: Message) -> None:
        """Append a message that is not urgent: it may wait for the next urgent one."""
        self._waiting[peer].append(message)

    def put_latest(
        self, peer: Peer, message: Message, merge: Callable[[Message, Message], Message]
    ) -> None:
        """Queue an answer that supersedes a queued one of the same type.

        The queued message becomes ``merge(earlier, later)`` and keeps its place.
        """
        self.pressing = True
        queued = self._waiting[peer]
        at = self._latest.get((peer, type(message)))
        if at is not None and at < len(queued) and type(queued[at]) is type(message):
            queued[at] = merge(queued[at], message)
            return
        self._latest[peer, type(message)] = len(queued)
        queued.append(message)

    def drop(self, peer: Peer) -> None:
        """Drop the queue of a disconnected peer."""
        self._waiting.pop(peer, None)

    def flush(self) -> None:
        """Encode and send everything queued."""
        while self._waiting:
            self._latest.clear()
            waiting, self._waiting = self._waiting, defaultdict(list)
            for peer, messages in waiting.items():
                self._send_in_order(peer, messages)
        self.pressing = False

    def _send_in_order(self, peer: Peer, messages: list[Message]) -> None:
        """Send batch by batch; stop at the first failure, or later messages would overtake it."""
        batches = deque(_batches(messages))
        while batches:
            batch = batches.popleft()
            frames = self._encode(peer, batch)
            if frames is None:
                if len(batch) > 1:  # bisect, so that only the faulty message is lost
                    half = len(batch) // 2
                    batches.extendleft((batch[half:], batch[:half]))
                continue
            self.envelopes += 1
            result = self._send(peer, frames)
            if not result:
                self._not_taken(peer, [*batch, *chain.from_iterable(batches)], result)
                return

    def _not_taken(self, peer: Peer, messages: list[Message], result: SendResult) -> None:
        self.unsent += len(messages)
        if self._on_unsent is not None:
            self._on_unsent(peer, messages, result)

    def _encode(self, peer: Peer, batch: list[Message]) -> Buffers | None:
        """Return an envelope's frames; None if the batch is over a limit or cannot be encoded."""
        try:
            return self._encoder.encode(batch)
        except Exception as error:  # any fault of one message; the others are still sent
            if len(batch) == 1:
                self.unsent += 1
                name = type(batch[0]).__name__
                _log.error("outbox.not_encodable", message=name, reason=str(error))
                if self._on_refused is not None:
                    self._on_refused(peer, batch[0], f"{name} cannot be sent: {error}")
            return None


def _batches(messages: list[Message]) -> list[list[Message]]:
    """Split into envelopes within the limits on messages and contexts, in order."""
    few = len(messages) <= CONTEXTS_PER_ENVELOPE
    if few or (len(messages) <= MESSAGES_PER_ENVELOPE and _LARGE.isdisjoint(map(type, messages))):
        return [messages]
    batches: list[list[Message]] = [[]]
    contexts = 0
    for message in messages:
        large = type(message) in _LARGE
        contexts += large
        if contexts > CONTEXTS_PER_ENVELOPE or len(batches[-1]) >= MESSAGES_PER_ENVELOPE:
            batches.append([])
            contexts = int(large)
        batches[-1].append(message)
    return batches
