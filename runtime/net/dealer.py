"""The connecting side: a socket to one listening peer, with CURVE keys if configured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import zmq

from baton.proto.errors import AccessDenied, ConfigError

from ..keys.curve import CurveKeys, apply_client_keys, check_address, is_tcp
from ..keys.identity_owners import tagged
from ..process.log import get_logger
from ..process.log_limit import INTERVAL_S
from .channel import (
    NO_WAIT,
    Buffers,
    Channel,
    ChannelOptions,
    Frames,
    OnMessage,
    SendResult,
)
from .loop import Loop
from .monitor import HANDSHAKE_FAILURES, Monitor, describe_refusal

RECONNECT_MS = (50, 400)
"""Initial and maximum reconnect delay; a restarted router waits up to the maximum for its peers."""
REFUSED_PAUSE_S = 1.0
"""Delay before the next connection attempt after the peer refused our key (libzmq itself gives
up), and after a handshake failed with each of the peer's known keys."""
_CONNECT_TIMEOUT_MS = 1000
"""After a network outage a new connection attempt succeeds sooner than a SYN repetition: the
kernel repeats a SYN after 1 s and again after 2 s more."""

Context = zmq.Context[zmq.Socket[bytes]]
OnRefused = Callable[[AccessDenied, bool], object]
KeySource = CurveKeys | Callable[[], CurveKeys | None] | None
"""Keys, or a function that returns the current keys: a restarted peer may have a new key."""
DROPPED: Frames = []
"""Stands for a message that was taken and refused; compare by identity."""
_log = get_logger()
_DEFAULTS = ChannelOptions()


class DealerChannel(Channel):
    """A connection to one listening peer; reconnects automatically, after 50 ms up to 0.4 s.

    Without a connection, sends fail instead of queueing, so a peer never receives a message of
    an earlier connection. ``identity`` must be new and unpredictable for every connection; with
    keys, the attribute begins with the tag of the key. ``warns``: log failed handshakes as
    warnings; otherwise at level debug.
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
        super().__init__(context, zmq.DEALER, endpoint, options, keyed=first is not None)
        self._fd = -1  # of the connection
        self._source, self._keys = source, first
        self._warns = warns
        self._complain_at = 0.0  # time of the next warning
        self._server = 0  # index of the server key in use
        self._failed = 0  # consecutive failed handshakes
        self._asked = True  # libzmq connects or is connected; False between disconnect and connect
        self._on_refused: OnRefused | None = None
        self.identity = tagged(identity, b"" if first is None else first.public)
        self.connected = False
        self._loop: Loop | None = None
        self._on_connected: Callable[[], object] | None = None
        self._on_disconnected: Callable[[], object] | None = None
        apply_client_keys(self._socket, self._keys)
        self._socket.setsockopt(zmq.IDENTITY, self.identity)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        try:
            self._monitor = Monitor(self._socket)
        except zmq.ZMQError:
            self._socket.close()
            raise
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
        """Pass every message to ``on_message(frames)``, and report connects and disconnects.

        ``on_refused(error, final)`` is called after a failed handshake; ``final`` is true if the
        peer refused our key, false if the connection only closed.
        """
        self._loop = loop
        self._on_refused = on_refused
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected

        def pump() -> bool:
            frames = self._take()
            if frames is None:
                return False
            if frames is not DROPPED:
                on_message(frames)
            return True  # also for a dropped message, so a flood of them ends the loop's visit

        # Messages before the monitor: handle the last messages before their connection's end.
        loop.add_socket(self._socket, pump)
        loop.add_socket(self._monitor.socket, self._read_monitor, sends=False)
        self._limit_backlogs(loop)

    def recv(self) -> Frames | None:
        """Return the next message, or None; never blocks."""
        while True:
            frames = self._take()
            if frames is not DROPPED:
                return frames

    def _take(self) -> Frames | None:
        """Take one message from the socket; :data:`DROPPED` if it is refused."""
        self._own()
        try:
            frames = self._read_frames(NO_WAIT)
        except zmq.Again:
            if self._backlog is not None:
                self._backlog.drained = True
            return None
        if self._backlog is not None:
            self._backlog.taken(self._fd, self._taken_bytes)
        return DROPPED if frames is None else frames

    def send(self, frames: Buffers) -> SendResult:
        """Send a message; never blocks."""
        self._own()
        try:
            self._put(frames)
        except zmq.Again:
            return self._not_sent()
        return SendResult.SENT

    def send_tracked(self, frames: Buffers) -> zmq.MessageTracker | SendResult:
        """Like :meth:`send`; once the tracker is ``done``, the buffers may be reused."""
        self._own()
        try:
            return self._put_tracked(frames)
        except zmq.Again:
            return self._not_sent()

    def close(self) -> None:
        """Close the connection and drop unsent messages."""
        self._forget_backlogs()
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
        if event == zmq.EVENT_CONNECTED:
            self._fd = value
            if self._backlog is not None:
                self._backlog.opened(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._asked:  # else the event is of a connection we have closed since
                self._lost()
                self.connected = True
                self._failed = 0
                if self._on_connected is not None:
                    self._on_connected()
        elif event == zmq.EVENT_DISCONNECTED:
            if self._backlog is not None:
                self._backlog.closed(value)
            self._lost()
        elif event & HANDSHAKE_FAILURES:
            self._lost()
            self._handshake_failed(event, value)
        return True

    def _lost(self) -> None:
        """Report a disconnect once; libzmq sends no event for connections that we close."""
        if self.connected:
            self.connected = False
            if self._on_disconnected is not None:
                self._on_disconnected()

    def _handshake_failed(self, event: int, value: int) -> None:
        self.stats.refused += 1
        reason = describe_refusal(event, value)
        # The listener of an ipc file that ends during a handshake stopped early: no warning.
        ended = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and not is_tcp(self.endpoint)
        denied = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        error = refusal(self.endpoint, denied, keyed=self._keys is not None)
        keys = {"endpoint": self.endpoint, "reason": reason, "refused": self.stats.refused}
        if ended or not self._warns:
            _log.debug("socket.handshake_failed", **keys)
        elif Loop.now() >= self._complain_at:  # libzmq tries again 20 times per second
            self._complain_at = Loop.now() + INTERVAL_S
            _log.warning("socket.handshake_failed", **keys, error=str(error))
        if self._loop is not None:
            if denied:
                self._loop.call_later(REFUSED_PAUSE_S, self._knock_again)
            elif self._keys is not None:
                self._try_another_key()
        if self._on_refused is not None:
            self._on_refused(error, denied)

    def _try_another_key(self) -> None:
        """Try the server's next key from the current list; pause after all of them failed."""
        before = self._keys
        with contextlib.suppress(ConfigError):  # no key listed any more: keep the known ones
            self._keys = (self._source() if callable(self._source) else None) or before
        if self._keys is None or before is None or self._loop is None:
            return
        count = len(self._keys.servers)
        if self._keys.servers != before.servers:
            self._server = self._failed = 0
        elif count == 1:
            return  # libzmq itself retries with the same key
        else:
            self._server += 1
            self._failed += 1
        if self._failed and self._failed % count == 0:
            self._hang_up()  # or libzmq would reconnect during the pause
            self._loop.call_later(REFUSED_PAUSE_S, self._knock_again)
        else:
            self._knock_again()

    def _knock_again(self) -> None:
        """Reconnect, with the server key at index ``_server``."""
        if self._loop is None or self.connected:
            return
        self._hang_up()
        apply_client_keys(self._socket, self._keys, self._server)
        self._socket.connect(self.endpoint)
        self._asked = True

    def _hang_up(self) -> None:
        self._asked = False
        with contextlib.suppress(zmq.ZMQError):  # raised if libzmq has given up already
            self._socket.disconnect(self.endpoint)


def refusal(endpoint: str, denied: bool, *, keyed: bool) -> AccessDenied:
    """Return the error for a failed handshake, with its likely cause."""
    if denied:
        return AccessDenied(
            f"{endpoint} refused this key: the key is not in allowed.toml there, "
            "or its role is not allowed on this socket"
        )
    if keyed:
        return AccessDenied(
            f"{endpoint} closed the connection during the handshake: its key is not in "
            "allowed.toml here, or it uses no keys"
        )
    return AccessDenied(
        f"{endpoint} closed the connection during the handshake: if it requires keys, "
        "give --keys FOLDER"
    )
