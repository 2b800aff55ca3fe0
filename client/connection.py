"""The client's core on a loop: one connection to a router at a time, and who hears of what.

Lives on its loop's thread; the two clients differ only in how they reach that thread. A sink
is called with each NewTokens and at last the Ended of its request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import zmq

from ..proto.codec import EnvelopeDecoder, EnvelopeEncoder
from ..proto.errors import BatonError, ConnectionLost, ProtocolError
from ..proto.limits import MAX_DESCRIBED_BYTES
from ..proto.messages import Message, Ping, RouterToClient
from ..runtime.allowed_keys import ROUTER
from ..runtime.channel import Buffers, ChannelOptions, Frames, SendResult
from ..runtime.keyring import Keys, keys_for
from ..runtime.loop import Loop, Timer
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
    Look,
    Malformed,
    NewTokens,
    Reached,
    Received,
    Reconnect,
    Refused,
    RequestSpec,
    Send,
    Start,
    Stop,
    Tick,
)
from .model import new_identity
from .routers import router_addresses
from .window import Sink, Window, overdue_end

_LOOK_S = 2.0
"""How long a router that is looked for may take to answer."""
# While the user's event loop is busy for long, nobody reads and heartbeats go unheard.
_PATIENT = ChannelOptions(
    max_frame_bytes=MAX_DESCRIBED_BYTES, heartbeat_s=1.0, heartbeat_timeout_s=5.0
)

AnswerSink = Callable[[Message | BatonError], object]


class Connection:
    """One client's connection, to one of the routers at ``addresses``.

    Clients begin at different routers, so that the load spreads over them: which is drawn once,
    and the others follow in their order. Raises ConfigError for an address that is none.
    """

    def __init__(
        self,
        loop: Loop,
        addresses: str | Sequence[str],
        *,
        keys: Keys | None = None,
        connect_timeout: float = 5.0,
        reconnect_timeout: float = 30.0,
    ) -> None:
        self._loop = loop
        self._keys = keys
        routers = router_addresses(addresses)
        first = random.randrange(len(routers))  # noqa: S311 -- spreads load, hides nothing
        self._core = ClientCore(
            *routers[first:],
            *routers[:first],
            connect_timeout=connect_timeout,
            reconnect_timeout=reconnect_timeout,
        )
        self._context: Context = zmq.Context()
        self._decoder: EnvelopeDecoder[Message] = EnvelopeDecoder(
            RouterToClient, max_bytes=MAX_DESCRIBED_BYTES
        )
        self._outbox: Outbox[None] = Outbox(self._send)
        self._sinks: dict[str, Sink] = {}
        self._windows: dict[str, Window] = {}  # of requests that have one, until they end
        self._asked: dict[int, AnswerSink] = {}
        self._tickets = 0
        self._timer: Timer | None = None
        self._timer_s = 0.0
        self._look: DealerChannel | None = None
        self._closed = False
        self.connections = 0
        try:
            self._channel = self._connect(self._core.router)
        except BatonError:
            self._context.destroy(linger=0)
            raise
        loop.on_turn_end(self._outbox.flush)

    # ------------------------------------------------------------------ what users want

    def start(self, spec: RequestSpec, sink: Sink, window: Window | None = None) -> None:
        """Begin a request, once there is room in its ``window``; ``sink`` hears of it."""
        if window is None or self._closed:
            self._start(spec, sink)
            return
        self._windows[spec.request_id] = window
        window.enter(spec, sink, self._loop.now())
        self._admit(window)

    def _admit(self, window: Window) -> None:
        for spec, sink in window.admit(self._loop.now()):
            overdue = overdue_end(spec)
            if overdue is None:
                self._start(spec, sink)
            else:
                self._leave_window(spec.request_id)
                sink(overdue)

    def _leave_window(self, request_id: str) -> None:
        """Another request of its window may start; later, for this may be a sink's call."""
        window = self._windows.pop(request_id, None)
        if window is not None:
            window.leave(request_id)
            self._loop.post(lambda: self._admit(window))

    def _start(self, spec: RequestSpec, sink: Sink) -> None:
        if self._closed:
            sink(_closed_end(spec.request_id))
            return
        if spec.request_id in self._sinks:
            # The core refuses it; the running one's sink must not hear that.
            for action in self._core.handle(Start(spec), self._loop.now()):
                if isinstance(action, Ended):
                    self._leave_window(spec.request_id)
                    sink(action)
            return
        self._sinks[spec.request_id] = sink
        self._handle(Start(spec))

    def stop(self, request_id: str, sink: Sink, *, report: bool = False) -> None:
        """End a request that ``sink`` belongs to; without ``report`` it hears no more."""
        if self._sinks.get(request_id) is not sink:
            window = self._windows.get(request_id)
            if window is not None and window.waits(request_id, sink):
                self._leave_window(request_id)
            return
        if not report:
            del self._sinks[request_id]
            self._leave_window(request_id)
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
        self._stop_looking()
        self._context.destroy(linger=0)
        sinks, self._sinks = self._sinks, {}
        for window in {id(window): window for window in self._windows.values()}.values():
            sinks |= window.close()
        self._windows.clear()
        for request_id, sink in sinks.items():
            sink(_closed_end(request_id))
        asked, self._asked = self._asked, {}
        for answer_sink in asked.values():
            answer_sink(ConnectionLost("the client was closed"))

    # ------------------------------------------------------------------ core and socket

    def _connect(self, address: str) -> DealerChannel:
        """Each time under another identity.

        A router that paused has not noticed yet that the old connection is gone, and would
        never read a second one of the same name.
        """
        identity = new_identity()
        channel = self._dial(address, identity)
        channel.attach(
            self._loop,
            self._hear,
            lambda: self._up(identity),
            lambda: self._handle(Disconnected()),
            lambda error, final: self._handle(Refused(error, final)),
        )
        return channel

    def _dial(self, address: str, identity: bytes) -> DealerChannel:
        keys = keys_for(self._keys, address, ROUTER)
        # Why no handshake succeeds is in the error that the caller gets, and not logged beside it.
        return DealerChannel(
            self._context, address, identity, keys=keys, options=_PATIENT, warns=False
        )

    def _renew(self, address: str) -> None:
        self._outbox.drop(None)
        self._channel.close()
        self._stop_looking()
        self._channel = self._connect(address)

    def _look_for(self, address: str) -> None:
        """Whether a router serves there: an answer counts, not a connection."""
        self._stop_looking()
        channel = self._look = self._dial(address, new_identity())

        def answered(_frames: Frames) -> None:
            if self._look is channel:
                self._stop_looking()
                self._handle(Reached(address))

        ping = EnvelopeEncoder().encode([Ping()])
        channel.attach(self._loop, answered, lambda: channel.send(ping))
        self._loop.call_later(_LOOK_S, lambda: self._stop_looking(channel))

    def _stop_looking(self, channel: DealerChannel | None = None) -> None:
        """End the look, or only the one over ``channel``."""
        look = self._look
        if look is not None and channel in (None, look):
            self._look = None
            look.close()

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
        self._arm()
        self._loop.turn_soon()

    def _arm(self) -> None:
        """Tick as often as the core needs it now; a slow timer gives way to a faster one."""
        every = self._core.tick_s
        if self._closed or every is None:
            return
        if self._timer is not None:
            if self._timer_s <= every:
                return
            self._timer.cancel()
        self._timer_s = every
        self._timer = self._loop.call_later(every, self._tick)

    def _tick(self) -> None:
        self._timer = None
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
                self._leave_window(action.request_id)
                if sink is not None:
                    sink(action)
            case Answered():
                self._asked.pop(action.ticket)(action.answer)
            case Reconnect():
                self._renew(action.address)
            case Look():
                self._look_for(action.address)


def _closed_end(request_id: str) -> Ended:
    error = ConnectionLost("the client was closed")
    return Ended(request_id=request_id, position=0, error=error)
