"""Collects a turn's outgoing messages and sends each peer one envelope.

The cost of a hop is paid per envelope, so everything a turn has to say to a peer travels
together, in order. What is more than an envelope takes is split. A message that cannot be sent is
reported and forgotten: every exchange of the protocol repeats itself. One that is too large for
any envelope fails alone, and nothing for this peer or another is lost with it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from itertools import chain
from typing import Generic, TypeVar

from ..proto.codec import Digest, EnvelopeEncoder
from ..proto.limits import MAX_CONTROL_BYTES
from ..proto.messages import Message
from .channel import Buffers, SendResult
from .log import get_logger

MESSAGES_PER_ENVELOPE = 4096
CONTEXTS_PER_ENVELOPE = 8
"""A context with its emitted tokens can take megabytes; an envelope has a size limit."""

_LARGE = frozenset(
    kind for kind in Message.__subclasses__() if {"context", "files"} & {*kind.__struct_fields__}
)
"""Types of messages that can be large."""

Peer = TypeVar("Peer")
_log = get_logger()


class Outbox(Generic[Peer]):
    """Messages by peer until :meth:`flush`, which belongs at the end of a loop's turn.

    ``send(peer, frames)`` is a channel's send; ``on_unsent(peer, messages, result)`` hears
    of what ZeroMQ did not take, all of it at once and in order. ``max_bytes``: largest
    first frame the peers accept. ``digest``: seals the envelopes. ``on_refused(peer, message,
    reason)`` hears of a message that no envelope can carry; it may put another one.
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
        self._latest: dict[tuple[Peer, type], int] = {}  # where in what waits
        self.pressing = False  # whether any of it should go at the next flush
        self.envelopes = 0
        self.unsent = 0

    @property
    def waiting(self) -> bool:
        """Whether anything is queued, pressing or not."""
        return bool(self._waiting)

    def put(self, peer: Peer, message: Message) -> None:
        """Queue ``message`` behind what is queued for ``peer``."""
        self._waiting[peer].append(message)
        self.pressing = True

    def put_patient(self, peer: Peer, message: Message) -> None:
        """The same for a message nobody waits for: it may be left until something else goes."""
        self._waiting[peer].append(message)

    def put_latest(
        self, peer: Peer, message: Message, merge: Callable[[Message, Message], Message]
    ) -> None:
        """Queue an answer that makes an earlier one of its type, still queued here, needless.

        ``merge(earlier, later)`` says what takes the earlier one's place.
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
        """Forget what is queued for a peer that is gone."""
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
        """Send until something is not taken: what follows it would overtake it."""
        batches = deque(_batches(messages))
        while batches:
            batch = batches.popleft()
            frames = self._encode(peer, batch)
            if frames is None:
                if len(batch) > 1:  # one message must not take its neighbours with it
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
        """Frames of an envelope, or None when they are over a limit or one is no message."""
        try:
            return self._encoder.encode(batch)
        except Exception as error:  # whatever one message holds, the others must go
            if len(batch) == 1:
                self.unsent += 1
                name = type(batch[0]).__name__
                _log.error("outbox.not_encodable", message=name, reason=str(error))
                if self._on_refused is not None:
                    self._on_refused(peer, batch[0], f"{name} cannot be sent: {error}")
            return None


def _batches(messages: list[Message]) -> list[list[Message]]:
    """Split so that no envelope holds too many messages or contexts; order is kept."""
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
