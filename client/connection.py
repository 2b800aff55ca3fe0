"""The client's core on a loop: one connection to the router, and who hears of what.

Lives on its loop's thread; the two clients differ only in how they reach that thread. A sink
is called with each NewTokens and at last the Ended of its request.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from ..proto.codec import EnvelopeDecoder
from ..proto.errors import BatonError, ConnectionLost, ProtocolError
from ..proto.limits import MAX_DESCRIBED_BYTES
from ..proto.messages import Message, RouterToClient
from ..runtime.allowed_keys import ROUTER
from ..runtime.channel import Buffers, ChannelOptions, Frames, SendResult
from ..runtime.keyring import Keys, keys_to
from ..runtime.loop import Loop
from ..runtime.outbox import Outbox
from ..runtime.sockets import Context, DealerChannel
from .core import ClientCore
from .events import (
    Action,
    Answered,
    Ask,
    Connected,
    Disconnected,
    Ended,
    Event,
    Malformed,
    NewTokens,
    Received,
    Reconnect,
    RequestSpec,
    Send,
    Start,
    Stop,
    Tick,
)
from .model import new_identity

TICK_S = 0.05
# While the user's event loop is busy for long, nobody reads and heartbeats go unheard.
_PATIENT = ChannelOptions(
    max_frame_bytes=MAX_DESCRIBED_BYTES, heartbeat_s=1.0, heartbeat_timeout_s=5.0
)

Sink = Callable[[NewTokens | Ended], object]
AnswerSink = Callable[[Message | BatonError], object]


class Connection:
    """One client's connection. Raises ConfigError for an address that is none."""

    def __init__(
        self,
        loop: Loop,
        address: str,
        *,
        keys: Keys | None = None,
        connect_timeout: float = 5.0,
        reconnect_timeout: float = 30.0,
    ) -> None:
        self._loop = loop
        self._address = address
        self._keys = keys
        self._core = ClientCore(
            address, connect_timeout=connect_timeout, reconnect_timeout=reconnect_timeout
        )
        self._context: Context = zmq.Context()
        self._decoder: EnvelopeDecoder[Message] = EnvelopeDecoder(
            RouterToClient, max_bytes=MAX_DESCRIBED_BYTES
        )
        self._outbox: Outbox[None] = Outbox(self._send)
        self._sinks: dict[str, Sink] = {}
        self._asked: dict[int, AnswerSink] = {}
        self._tickets = 0
        self._ticking = False
        self._closed = False
        self.connections = 0
        try:
            self._channel = self._connect()
        except BatonError:
            self._context.destroy(linger=0)
            raise
        loop.on_turn_end(self._outbox.flush)

    # ------------------------------------------------------------------ what users want

    def start(self, spec: RequestSpec, sink: Sink) -> None:
        """Begin a request; ``sink`` hears of it."""
        if self._closed:
            sink(_closed_end(spec.request_id))
            return
        if spec.request_id in self._sinks:
            # The core refuses it; the running one's sink must not hear that.
            for action in self._core.handle(Start(spec), self._loop.now()):
                if isinstance(action, Ended):
                    sink(action)
            return
        self._sinks[spec.request_id] = sink
        self._handle(Start(spec))

    def stop(self, request_id: str, sink: Sink, *, report: bool = False) -> None:
        """End a request that ``sink`` belongs to; without ``report`` it hears no more."""
        if self._sinks.get(request_id) is not sink:
            return
        if not report:
            del self._sinks[request_id]
        self._handle(Stop(request_id, report))

    def ask(self, message: Message, timeout: float, sink: AnswerSink) -> None:
        """Put a question; ``sink`` hears the answer or the error."""
        if self._closed:
            sink(ConnectionLost("the client is closed"))
            return
        self._tickets += 1
        self._asked[self._tickets] = sink
        self._handle(Ask(self._tickets, message, timeout))

    def close(self) -> None:
        """End everything; the router cancels what still runs."""
        if self._closed:
            return
        self._closed = True
        self._outbox.drop(None)  # a flush is still to come
        self._channel.close()
        self._context.destroy(linger=0)
        sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            sink(_closed_end(request_id))
        asked, self._asked = self._asked, {}
        for answer_sink in asked.values():
            answer_sink(ConnectionLost("the client was closed"))

    # ------------------------------------------------------------------ core and socket

    def _connect(self) -> DealerChannel:
        identity = new_identity()
        keys = keys_to(self._keys, self._address, ROUTER)  # each time: they may be replaced
        channel = DealerChannel(self._context, self._address, identity, keys=keys, options=_PATIENT)
        channel.attach(
            self._loop,
            self._hear,
            lambda: self._up(identity),
            self._down,
        )
        return channel

    def _down(self) -> None:
        """Come back under another identity.

        A router that paused has not noticed yet that the old connection is gone, and would
        never read a second one of the same name.
        """
        self._handle(Disconnected())
        self._renew()

    def _renew(self) -> None:
        self._outbox.drop(None)
        self._channel.close()
        self._channel = self._connect()

    def _up(self, identity: bytes) -> None:
        self.connections += 1
        self._handle(Connected(identity))

    def _hear(self, frames: Frames) -> None:
        try:
            messages = self._decoder.decode(frames)
        except ProtocolError as error:
            self._handle(Malformed(error))
            return
        for message in messages:
            self._handle(Received(message))

    def _send(self, _peer: None, frames: Buffers) -> SendResult:
        return self._channel.send(frames)

    def _handle(self, event: Event) -> None:
        for action in self._core.handle(event, self._loop.now()):
            self._perform(action)
        if self._core.active and not self._ticking:
            self._ticking = True
            self._loop.call_later(TICK_S, self._tick)
        self._loop.turn_soon()

    def _tick(self) -> None:
        self._ticking = False
        if not self._closed:
            self._handle(Tick())

    def _perform(self, action: Action) -> None:
        match action:
            case Send():
                self._outbox.put(None, action.message)
            case NewTokens():
                sink = self._sinks.get(action.request_id)
                if sink is not None:
                    sink(action)
            case Ended():
                sink = self._sinks.pop(action.request_id, None)
                if sink is not None:
                    sink(action)
            case Answered():
                self._asked.pop(action.ticket)(action.answer)
            case Reconnect():
                self._renew()


def _closed_end(request_id: str) -> Ended:
    error = ConnectionLost("the client was closed")
    return Ended(request_id=request_id, position=0, error=error)
