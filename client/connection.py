"""The client's core on an event loop, with one connection to a router at a time.

All methods run on the loop's thread. The two clients differ only in how they call into that
thread. A request's sink is called with each NewTokens and finally with the request's Ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq

from baton.proto.errors import BatonError, ConnectionLost, InternalError, ProtocolError
from baton.proto.limits import MAX_DESCRIBED_BYTES
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import FinalAck, Message, Ping, RouterToClient, StatusReport
from baton.runtime.keys.allowed import ROUTER
from baton.runtime.keys.keyring import Keys, keys_for
from baton.runtime.net.channel import Buffers, ChannelOptions, Frames, SendResult
from baton.runtime.net.loop import Loop, Timer
from baton.runtime.net.outbox import Outbox
from baton.runtime.net.sockets import Context, DealerChannel
from baton.runtime.process.log import get_logger

from .core import TICK_S, ClientCore
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
    Raised,
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
from .options import status_query
from .requests import TEXT
from .routers import router_addresses
from .window import Sink, Window, overdue_end, size_for

FILES = 20
"""Files that a client may open: 14 at its start, the rest for looks at other routers."""
THREADS = 2
"""Threads of a ZeroMQ context."""
_SIZE_S = 5.0
"""Seconds to wait for the cluster's size, while a call's requests already run."""
_LOOK_S = 2.0
"""Seconds for a router to answer a :class:`Look`."""
_ENDS_S = 0.005
"""Longest delay in seconds of a FinalAck, which is batched with the next message."""
_MANY_ENDS = 256
"""Ends of requests that are acknowledged without a delay: the router keeps their records."""
# Long heartbeat timeout: while the user's event loop is busy, no heartbeat is read.
_PATIENT = ChannelOptions(
    max_frame_bytes=MAX_DESCRIBED_BYTES, heartbeat_s=1.0, heartbeat_timeout_s=5.0
)

_log = get_logger()
AnswerSink = Callable[[Message | BatonError], object]


class Batch(Protocol):
    """Observer of the router's messages. Neither method may raise."""

    def begin(self) -> None:
        """Sinks are going to be called for a message."""

    def end(self) -> None:
        """Sinks have been called for the messages of this turn of the loop."""


class Connection:
    """One client's connection to one of the routers at ``addresses``.

    The first router is drawn at random, to spread the clients over the routers; the others follow
    in their order. ``batch``: its methods are called for each message. Raises
    ConfigError for an invalid address.
    """

    def __init__(
        self,
        loop: Loop,
        addresses: str | Sequence[str],
        *,
        keys: Keys | None = None,
        connect_timeout: float = 5.0,
        reconnect_timeout: float = 30.0,
        batch: Batch | None = None,
    ) -> None:
        self._loop = loop
        self._batch = batch
        self._keys = keys
        routers = router_addresses(addresses)
        first = random.randrange(len(routers))  # noqa: S311 -- for load balancing, not for security
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
        self._ends: FinalAck | None = None  # in the outbox, for further ends
        self._patience: Timer | None = None  # runs while it waits there
        self._sinks: dict[str, Sink] = {}
        self._windows: dict[str, Window] = {}  # by request id, until the request ends
        self._asked: dict[int, AnswerSink] = {}
        self._tickets = 0
        self._timer: Timer | None = None
        self._timer_s = 0.0
        self._look: DealerChannel | None = None
        self._closed = False
        self.connections = 0
        try:
            self._channel = self._connect(self._core.router)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        loop.on_turn_end(self._flush)
        if batch is not None:
            loop.on_turn_end(batch.end)

    # ------------------------------------------------------------------ calls of the user

    def start(self, spec: RequestSpec, sink: Sink, window: Window | None = None) -> None:
        """Start a request as soon as its ``window`` has room. ``sink`` receives its events."""
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

        if window.wants_size():
            self.ask(status_query(0), _SIZE_S, lambda answer: self._resize(window, answer))

    def _resize(self, window: Window, answer: Message | BatonError) -> None:
        """Resize a window by the cluster's status. Without an answer, it keeps its size."""
        if isinstance(answer, StatusReport):
            window.resize(size_for(msgspec.json.decode(answer.report)))
            if not self._closed:
                self._admit(window)

    def _leave_window(self, request_id: str) -> None:
        """Remove a request from its window, and let another request of the window start.

        The other request starts in a later turn of the loop, because a sink may be running now.
        """
        window = self._windows.pop(request_id, None)
        if window is not None:
            window.leave(request_id)
            self._loop.post(lambda: self._admit(window))

    def _start(self, spec: RequestSpec, sink: Sink) -> None:
        if self._closed:
            sink(_closed_end(spec.request_id))
            return
        if spec.request_id in self._sinks:
            # The core rejects the duplicate id. Report that to the new sink only: the running
            # request with the same id continues.
            for action in self._core.handle(Start(spec), self._loop.now()):
                if isinstance(action, Ended):
                    self._leave_window(spec.request_id)
                    sink(action)
            return
        self._sinks[spec.request_id] = sink
        self._handle(Start(spec))

    def stop(self, request_id: str, sink: Sink, *, report: bool = False) -> None:
        """Cancel the request of ``sink``. Without ``report``, ``sink`` is not called again."""
        if self._sinks.get(request_id) is not sink:
            window = self._windows.get(request_id)
            if window is not None and window.waits(request_id, sink):
                self._leave_window(request_id)
            return
        if not report:
            del self._sinks[request_id]
            self._leave_window(request_id)
        self._handle(Stop(request_id, report))

    def replace(self, request_id: str, sink: Sink, other: Sink) -> bool:
        """Call ``other`` from now on in place of ``sink``; False if the request does not run."""
        if self._sinks.get(request_id) is not sink:
            return False
        self._sinks[request_id] = other
        return True

    def ask(self, message: Message, timeout: float, sink: AnswerSink) -> None:
        """Send a query to the router. ``sink`` receives the answer or the error."""
        if self._closed:
            sink(ConnectionLost("the client is closed"))
            return
        self._tickets += 1
        self._asked[self._tickets] = sink
        self._handle(Ask(self._tickets, message, timeout))

    def close(self) -> None:
        """Disconnect. The router cancels the running requests; their sinks receive an error."""
        if self._closed:
            return
        self._closed = True
        self._outbox.drop(None)  # the loop will still call flush
        self._ends = None
        self._channel.close()
        self._stop_looking()
        self._context.destroy(linger=0)
        sinks = self._sinks.copy()
        self._sinks.clear()  # not replaced: a sink may close the connection within :meth:`_hear`
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
        """Open a connection with a new identity.

        With the old identity, a router that was paused would ignore the new connection: to that
        router the old connection is still open, and ZeroMQ accepts an identity only once.
        """
        channel = self._dial(address, new_identity())
        channel.attach(
            self._loop,
            self._hear,
            lambda: self._up(channel.identity),
            lambda: self._handle(Disconnected()),
            lambda error, final: self._handle(Refused(error, final)),
        )
        return channel

    def _dial(self, address: str, identity: bytes) -> DealerChannel:
        keys = keys_for(self._keys, address, ROUTER)
        # warns=False: the caller's error contains the reason of a failed handshake.
        return DealerChannel(
            self._context, address, identity, keys=keys, options=_PATIENT, warns=False
        )

    def _renew(self, address: str) -> None:
        self._outbox.drop(None)
        self._ends = None
        self._channel.close()
        self._stop_looking()
        self._channel = self._connect(address)

    def _look_for(self, address: str) -> None:
        """Ping a router on a second connection. Only an answer counts, not the connection."""
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
        """Stop the current look, or stop it only if it uses ``channel``."""
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
        if self._batch is not None:
            self._batch.begin()
        core, sinks, now = self._core, self._sinks, self._loop.now()
        for message in messages:
            for action in core.handle(Received(message), now):
                try:
                    if type(action) is NewTokens:  # nearly all actions
                        sink = sinks.get(action.request_id)
                        if sink is not None:
                            sink(action)
                    else:
                        self._perform(action)
                except Exception as error:
                    self._not_performed(action, error)
        self._arm()
        self._loop.turn_soon()

    def _acknowledge(self, end: FinalAck) -> None:
        """Send a FinalAck with the next message: it is not urgent, and would wake the router.

        Only with a ``batch``: a client that ends soon after its last request could not send it.
        """
        if self._ends is None:
            self._ends = FinalAck(requests=list(end.requests))
            self._outbox.put_patient(None, self._ends)
        else:
            self._ends.requests.extend(end.requests)

    def _flush(self) -> None:
        if self._outbox.pressing or len(self._ends.requests if self._ends else ()) >= _MANY_ENDS:
            self._ends = None
            self._outbox.flush()
        elif self._ends is not None and self._patience is None:
            self._patience = self._loop.call_later(_ENDS_S, self._out_of_patience)

    def _out_of_patience(self) -> None:
        self._patience = None
        if not self._closed:
            self._outbox.pressing = True

    def _send(self, _peer: None, frames: Buffers) -> SendResult:
        return self._channel.send(frames)

    def _handle(self, event: Event) -> None:
        for action in self._core.handle(event, self._loop.now()):
            try:
                self._perform(action)
            except Exception as error:
                self._not_performed(action, error)
        self._arm()
        self._loop.turn_soon()

    def _arm(self) -> None:
        """Schedule the next tick. Replace a pending timer if the core now needs faster ticks."""
        if self._timer is not None and self._timer_s <= TICK_S:
            return  # the core never needs a faster tick
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

    def _not_performed(self, action: Action, error: Exception) -> None:
        """Log an action that raised. Tokens that were lost end their request alone."""
        name = type(action).__name__
        _log.error("client.action_failed", exc_info=error, action=name, error=repr(error))
        if isinstance(action, NewTokens):
            own = InternalError(TEXT)
            own.__cause__ = error
            request_id = action.request_id
            sink = self._sinks.pop(request_id, None)
            self._leave_window(request_id)
            self._handle(Stop(request_id, report=False))
            if sink is not None:
                sink(Ended(request_id=request_id, position=action.position, error=own))

    def _perform(self, action: Action) -> None:
        match action:
            case NewTokens():
                sink = self._sinks.get(action.request_id)
                if sink is not None:
                    sink(action)
            case Send():
                if type(action.message) is FinalAck and self._batch is not None:
                    self._acknowledge(action.message)
                else:
                    self._outbox.put(None, action.message)
            case Ended():
                sink = self._sinks.pop(action.request_id, None)
                try:
                    self._leave_window(action.request_id)
                finally:
                    if sink is not None:
                        sink(action)
            case Answered():
                self._asked.pop(action.ticket)(action.answer)
            case Reconnect():
                self._renew(action.address)
            case Raised(error=error):
                _log.error("client.internal_error", exc_info=error, error=repr(error))
            case Look():
                self._look_for(action.address)


def _closed_end(request_id: str) -> Ended:
    error = ConnectionLost("the client was closed")
    return Ended(request_id=request_id, position=0, error=error)
