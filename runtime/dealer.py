"""The connecting end of a connection: one peer that listens, and its keys if it has any."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import zmq

from ..proto.errors import AccessDenied, ConfigError
from .channel import (
    Buffers,
    Channel,
    ChannelOptions,
    Frames,
    OnMessage,
    SendResult,
)
from .log import get_logger
from .loop import Loop
from .monitor import HANDSHAKE_FAILURES, Monitor, describe_refusal
from .security import CurveKeys, apply_client_keys, check_address, is_tcp

RECONNECT_MS = (50, 400)
"""First and longest pause between two tries; the longest is what a restarted router waits for."""
REFUSED_PAUSE_S = 1.0
"""Pause before a key that was not let in is tried again (libzmq itself gives up), and after all
keys a peer may have were tried in vain."""
_CONNECT_TIMEOUT_MS = 1000
"""After a loss of the network a new try reaches the peer sooner than a repetition of the old one:
the kernel repeats a SYN after 1 s, then after 2 s more."""

Context = zmq.Context[zmq.Socket[bytes]]
OnRefused = Callable[[AccessDenied, bool], object]
KeySource = CurveKeys | Callable[[], CurveKeys | None] | None
"""Keys, or what gives them as they are now: a peer may have others when it has started again."""
_log = get_logger()
_DEFAULTS = ChannelOptions()


class DealerChannel(Channel):
    """A connection to one listening peer; reconnects by itself, 50 ms doubling to 0.4 s.

    Nothing is queued while there is no connection, so a peer never hears what was meant for
    an earlier connection. ``identity`` must be new for every process start. ``warns``: failed
    handshakes are logged; without, only ``on_refused`` hears of them.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        identity: bytes,
        *,
        keys: KeySource = None,
        options: ChannelOptions = _DEFAULTS,
        warns: bool = True,
    ) -> None:
        check_address(endpoint)
        source = keys if is_tcp(endpoint) else None
        first = source() if callable(source) else source
        super().__init__(context, zmq.DEALER, options)
        self._source, self._keys = source, first
        self._warns = warns
        self._server = 0  # which of the server's keys is tried
        self._failed = 0  # handshakes in a row
        self._asked = True  # libzmq connects or is connected; False from hanging up to knocking
        self._on_refused: OnRefused | None = None
        self.endpoint = endpoint
        self.identity = identity
        self.connected = False
        self._loop: Loop | None = None
        self._on_connected: Callable[[], object] | None = None
        self._on_disconnected: Callable[[], object] | None = None
        apply_client_keys(self._socket, self._keys)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        self._monitor = Monitor(self._socket)
        try:
            if endpoint.startswith("tcp://["):
                self._socket.setsockopt(zmq.IPV6, 1)
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._monitor.close()
            self._socket.close()
            raise ConfigError(f"cannot connect to {endpoint}: {error.strerror}") from error

    def attach(
        self,
        loop: Loop,
        on_message: OnMessage,
        on_connected: Callable[[], object] | None = None,
        on_disconnected: Callable[[], object] | None = None,
        on_refused: OnRefused | None = None,
    ) -> None:
        """Hand every message to ``on_message(frames)``; tell when the connection comes and goes.

        ``on_refused(error, final)``: a handshake failed; ``final`` where the peer said that it
        does not let us in, not only hung up.
        """
        self._loop = loop
        self._on_refused = on_refused
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected

        def pump() -> bool:
            frames = self.recv()
            if frames is None:
                return False
            on_message(frames)
            return True

        # Messages first: those of a connection that has just ended still count.
        loop.add_socket(self._socket, pump)
        loop.add_socket(self._monitor.socket, self._read_monitor, sends=False)

    def recv(self) -> Frames | None:
        """Take the next message without blocking; None when there is none."""
        self._own()
        while True:
            try:
                frames = self._read_frames(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if frames is not None:
                return frames

    def send(self, frames: Buffers) -> SendResult:
        """Queue a message; never blocks."""
        self._own()
        try:
            self._put(frames)
        except zmq.Again:
            return self._not_sent()
        return SendResult.SENT

    def send_tracked(self, frames: Buffers) -> zmq.MessageTracker | SendResult:
        """As :meth:`send`; the tracker's ``done`` tells when the buffers may change again."""
        self._own()
        try:
            return self._put_tracked(frames)
        except zmq.Again:
            return self._not_sent()

    def close(self) -> None:
        """End the connection; what is queued is dropped."""
        if self._loop is not None:
            self._loop.remove_socket(self._socket)
            self._loop.remove_socket(self._monitor.socket)
            self._loop = None
        self.connected = False
        if not self._socket.closed:
            self._monitor.close()
            self._socket.close()

    def _not_sent(self) -> SendResult:
        if self.connected:
            self.stats.full += 1
            return SendResult.FULL
        self.stats.unreachable += 1
        return SendResult.UNREACHABLE

    def _read_monitor(self) -> bool:
        report = self._monitor.read()
        if report is None:
            return False
        event, value = report
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._asked:  # otherwise of a connection that was hung up before this was read
                self._lost()
                self.connected = True
                self._failed = 0
                if self._on_connected is not None:
                    self._on_connected()
        elif event == zmq.EVENT_DISCONNECTED:
            self._lost()
        elif event & HANDSHAKE_FAILURES:
            self._lost()
            self._handshake_failed(event, value)
        return True

    def _lost(self) -> None:
        """Whatever was connected is no longer; libzmq does not tell of what we hang up."""
        if self.connected:
            self.connected = False
            if self._on_disconnected is not None:
                self._on_disconnected()

    def _handshake_failed(self, event: int, value: int) -> None:
        self.stats.refused += 1
        reason = describe_refusal(event, value)
        say = _log.warning if self._warns else _log.debug
        say("socket.handshake_failed", endpoint=self.endpoint, reason=reason)
        denied = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        if self._loop is not None:
            if denied:
                self._loop.call_later(REFUSED_PAUSE_S, self._knock_again)
            elif self._keys is not None:
                self._try_another_key()
        if self._on_refused is not None:
            self._on_refused(refusal(self.endpoint, denied, keyed=self._keys is not None), denied)

    def _try_another_key(self) -> None:
        """Expect another of the server's keys, by the list as it is now; rest when all failed."""
        before = self._keys
        with contextlib.suppress(ConfigError):  # the list has none any more: keep those we know
            self._keys = (self._source() if callable(self._source) else None) or before
        if self._keys is None or before is None or self._loop is None:
            return
        count = len(self._keys.servers)
        if self._keys.servers != before.servers:
            self._server = self._failed = 0
        elif count == 1:
            return  # libzmq itself tries this one again
        else:
            self._server += 1
            self._failed += 1
        if self._failed and self._failed % count == 0:
            self._hang_up()  # or libzmq would go on by itself
            self._loop.call_later(REFUSED_PAUSE_S, self._knock_again)
        else:
            self._knock_again()

    def _knock_again(self) -> None:
        """Connect anew, expecting the server's key whose turn it is."""
        if self._loop is None or self.connected:
            return
        self._hang_up()
        apply_client_keys(self._socket, self._keys, self._server)
        self._socket.connect(self.endpoint)
        self._asked = True

    def _hang_up(self) -> None:
        self._asked = False
        with contextlib.suppress(zmq.ZMQError):  # where libzmq gave up there is nothing to end
            self._socket.disconnect(self.endpoint)


def refusal(endpoint: str, denied: bool, *, keyed: bool) -> AccessDenied:
    """What a failed handshake means, in words that help."""
    if denied:
        return AccessDenied(
            f"{endpoint} does not let this key in: it is not in allowed.toml there, "
            "or is of a role that has no business at this socket"
        )
    if keyed:
        return AccessDenied(
            f"{endpoint} ended the handshake: it has a key that is not in the allowed.toml here, "
            "or no keys at all"
        )
    return AccessDenied(f"{endpoint} ended the handshake: does it ask for keys? give --keys FOLDER")
