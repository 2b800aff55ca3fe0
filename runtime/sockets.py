"""The two ends of every connection: a listening RouterChannel, a connecting DealerChannel.

Invariant: a peer that was heard and then died is reported once, by the socket event of its
connection (kill: about 2 ms) or by ZMTP heartbeats (stop, partition: about 400 ms). A hung
process answers those; only heartbeats of the application find it.
"""

from __future__ import annotations

import errno
import os
import socket as posix
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import zmq

from ..proto.errors import ConfigError
from ..proto.limits import PROTOCOL_VERSION
from ..proto.messages import Ping
from .channel import (
    Buffers,
    Channel,
    ChannelOptions,
    Frames,
    OnMessage,
    OnPeer,
    OnPeerMessage,
    SendResult,
)
from .log import get_logger
from .loop import Loop
from .monitor import HANDSHAKE_FAILURES, Monitor, describe_refusal
from .peers import PeerTable
from .security import CurveKeys, apply_client_keys, apply_server_keys, check_address, check_bind

VERIFY_DELAYS = (0.0, 0.002, 0.010, 0.050)
"""Seconds after a closed connection at which the peer is tried: a send in the first
milliseconds after a death can still be accepted."""
RECONNECT_MS = (50, 400)
"""First and longest pause between two tries; the longest is what a restarted router waits for."""
_CONNECT_TIMEOUT_MS = 2000

Context = zmq.Context[zmq.Socket[bytes]]
_PROBE = b"BT" + bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode([Ping()])
_log = get_logger()
_DEFAULTS = ChannelOptions()


class RouterChannel(Channel):
    """A listening socket: many peers, each known by its identity.

    Raises ConfigError when it cannot listen: address in use, bad address, or reachable by
    strangers without ``keys``.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        keys: CurveKeys | None = None,
        options: ChannelOptions = _DEFAULTS,
    ) -> None:
        check_bind(endpoint, keys)
        super().__init__(context, zmq.ROUTER, options)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        apply_server_keys(self._socket, keys)
        try:
            self.endpoint = _bind(self._socket, endpoint)
        except BaseException:
            self._socket.close()
            raise
        self._monitor = Monitor(self._socket)
        self._peers = PeerTable()
        self._loop: Loop | None = None
        self._on_disconnect: OnPeer | None = None

    def attach(
        self, loop: Loop, on_message: OnPeerMessage, on_disconnect: OnPeer | None = None
    ) -> None:
        """Hand every message to ``on_message(identity, frames)`` on ``loop``.

        ``on_disconnect(identity)`` is called once when a peer that was heard is gone.
        """
        self._loop = loop
        self._on_disconnect = on_disconnect

        def pump() -> bool:
            message = self.recv()
            if message is None:
                return False
            on_message(*message)
            return True

        loop.add_socket(self._socket, pump)
        loop.add_socket(self._monitor.socket, self._read_monitor, sends=False)

    def recv(self) -> tuple[bytes, Frames] | None:
        """Take the next ``(identity, frames)`` without blocking; None when there is none."""
        self._own()
        while True:
            try:
                head = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            fd = _descriptor(head)
            if fd is None:
                self._read_frames()
                self.stats.malformed += 1
                continue
            identity = head.bytes
            self._heard(identity, fd)
            frames = self._read_frames()
            if frames is not None:
                return identity, frames

    def send(self, identity: bytes, frames: Buffers) -> SendResult:
        """Queue a message for a peer; never blocks."""
        self._own()
        try:
            self._put([identity, *frames])
        except zmq.ZMQError as error:
            return self._not_sent(error)
        return SendResult.SENT

    @property
    def peers(self) -> int:
        """Peers heard and not known to be gone."""
        return len(self._peers)

    def close(self) -> None:
        """Stop listening; an ipc path is removed."""
        if self._loop is not None:
            self._loop.remove_socket(self._socket)
            self._loop.remove_socket(self._monitor.socket)
            self._loop = None
        if not self._socket.closed:
            self._monitor.close()
            self._socket.close()
            path = _ipc_path(self.endpoint)
            if path is not None:
                path.unlink(missing_ok=True)

    def _not_sent(self, error: zmq.ZMQError) -> SendResult:
        if error.errno == errno.EHOSTUNREACH:
            self.stats.unreachable += 1
            return SendResult.UNREACHABLE
        if error.errno == errno.EAGAIN:
            self.stats.full += 1
            return SendResult.FULL
        raise error

    # ------------------------------------------------------------------ disconnects

    def _heard(self, identity: bytes, fd: int) -> None:
        if self._peers.heard(identity, fd, Loop.now()):
            self._verify(identity)

    def _read_monitor(self) -> bool:
        report = self._monitor.read()
        if report is None:
            return False
        event, value = report
        if event == zmq.EVENT_DISCONNECTED:
            for identity in self._peers.closed(value, Loop.now()):
                self._verify(identity)
        elif event & HANDSHAKE_FAILURES:
            self.stats.refused += 1
            reason = describe_refusal(event, value)
            _log.warning("socket.handshake_failed", endpoint=self.endpoint, reason=reason)
        return True

    def _verify(self, identity: bytes, attempt: int = 0) -> None:
        """Find out whether the peer behind a closed connection is gone or came back."""
        if self._loop is None or identity not in self._peers:
            return
        if self.send(identity, [_PROBE]) is SendResult.UNREACHABLE:
            self._peers.forget(identity)
            if self._on_disconnect is not None:
                self._on_disconnect(identity)
        elif attempt + 1 < len(VERIFY_DELAYS):
            pause = VERIFY_DELAYS[attempt + 1] - VERIFY_DELAYS[attempt]
            self._loop.call_later(pause, lambda: self._verify(identity, attempt + 1))


class DealerChannel(Channel):
    """A connection to one listening peer; reconnects by itself, 50 ms doubling to 0.4 s.

    Nothing is queued while there is no connection, so a peer never hears what was meant for
    an earlier connection. ``identity`` must be new for every process start.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        identity: bytes,
        *,
        keys: CurveKeys | None = None,
        options: ChannelOptions = _DEFAULTS,
    ) -> None:
        check_address(endpoint)
        super().__init__(context, zmq.DEALER, options)
        self.endpoint = endpoint
        self.identity = identity
        self.connected = False
        self._loop: Loop | None = None
        self._on_connected: Callable[[], object] | None = None
        self._on_disconnected: Callable[[], object] | None = None
        apply_client_keys(self._socket, keys)
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
    ) -> None:
        """Hand every message to ``on_message(frames)``; tell when the connection comes and goes."""
        self._loop = loop
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
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self.connected:
            self.connected = True
            if self._on_connected is not None:
                self._on_connected()
        elif event == zmq.EVENT_DISCONNECTED and self.connected:
            self.connected = False
            if self._on_disconnected is not None:
                self._on_disconnected()
        elif event & HANDSHAKE_FAILURES:
            self.stats.refused += 1
            reason = describe_refusal(event, value)
            _log.warning("socket.handshake_failed", endpoint=self.endpoint, reason=reason)
        return True


def _descriptor(head: zmq.Frame) -> int | None:
    """The connection a message came by; None for one of ZMTP 1 or 2, which names none.

    ZMTP 1 has no greeting, so almost any bytes of a stranger are messages of it.
    """
    try:
        return int(head.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


# ---------------------------------------------------------------------------------- binding


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Listen; return the address others connect to (with the port chosen for ``:0``)."""
    path = _ipc_path(endpoint)
    if path is not None:
        _check_ipc_path(endpoint, path)
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    mask = os.umask(0o177)  # an ipc file is this user's alone from the first moment
    try:
        socket.bind(endpoint.replace("tcp://localhost:", "tcp://127.0.0.1:"))
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"address in use: {endpoint}") from error
        raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}") from error
    finally:
        os.umask(mask)
    if path is not None:
        return endpoint
    return cast("bytes", socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def _ipc_path(endpoint: str) -> Path | None:
    """File of an ipc endpoint; None for tcp and for abstract names."""
    name = endpoint.removeprefix("ipc://")
    return None if name == endpoint or name.startswith("@") else Path(name)


def _check_ipc_path(endpoint: str, path: Path) -> None:
    """Look before binding: libzmq silently takes over a path that another process serves."""
    if not path.parent.is_dir():
        raise ConfigError(f"cannot listen on {endpoint}: no folder {path.parent}")
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"cannot listen on {endpoint}: {path} is a file of another kind")
    with posix.socket(posix.AF_UNIX, posix.SOCK_STREAM) as trial:
        try:
            trial.connect(str(path))
        except OSError:
            return  # left behind by a process that died
    raise ConfigError(f"address in use: {endpoint}")
