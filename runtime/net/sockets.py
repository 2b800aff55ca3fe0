"""The two sides of every connection: a listening RouterChannel, a connecting DealerChannel.

Invariant: a peer that sent a message and then disconnected is reported once: about 2 ms after
its process ended, or :attr:`ChannelOptions.heartbeat_timeout_s` after it was paused or its network
failed. A hung process still answers ZeroMQ's heartbeats; only Baton's own heartbeats detect it.
"""

from __future__ import annotations

import errno
import os
import socket as posix
from pathlib import Path
from typing import cast

import msgspec
import zmq

from baton.proto.errors import ConfigError
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.messages import Ping

from ..keys.curve import apply_server_keys, check_bind, is_tcp
from ..keys.identity_owners import Callers
from ..keys.zap import ServerKeys
from ..process.log import get_logger
from .admissions import MAX_PENDING, Admissions
from .channel import (
    NO_WAIT,
    Buffers,
    Channel,
    ChannelOptions,
    Frames,
    OnPeer,
    OnPeerMessage,
    SendResult,
)
from .dealer import Context, DealerChannel
from .descriptors import handshake_stage, open_files, remote_address, shut_down
from .loop import Loop
from .monitor import HANDSHAKE_FAILURES, MAX_WAITING, Monitor, describe_refusal

VERIFY_DELAYS = (0.0, 0.002, 0.010, 0.050)
"""Seconds after a disconnect at which a probe is sent to the peer. ZeroMQ may still accept a
message to a dead peer in the first milliseconds."""
COMPLAINT_S = 1.0
"""Minimum seconds between two log lines about refused connections or messages; all are counted."""

__all__ = ["Context", "DealerChannel", "RouterChannel"]

_PROBE = b"BT" + bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode([Ping()])
DROPPED: tuple[bytes, Frames] = (b"", [])
"""Stands for a message that was taken and refused; compare by identity."""
_log = get_logger()
_DEFAULTS = ChannelOptions()


class RouterChannel(Channel):
    """A listening socket with many peers, each with its own routing identity.

    Raises ConfigError if the address is in use or invalid, or if other machines could connect to
    it without ``keys``.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        keys: ServerKeys | None = None,
        options: ChannelOptions = _DEFAULTS,
    ) -> None:
        guard = keys if is_tcp(endpoint) else None  # only this user can connect to an ipc file
        check_bind(endpoint, keyed=guard is not None)
        super().__init__(context, zmq.ROUTER, endpoint, options, keyed=guard is not None)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if guard is not None:
            apply_server_keys(self._socket, guard.pair, guard.domain)
        try:
            self.endpoint = bind(self._socket, endpoint)
            check_bind(self.endpoint, keyed=guard is not None)  # now with the name resolved
        except BaseException:
            self._socket.close()
            raise
        self._monitor = Monitor(self._socket)
        self._peers = PeerTable()
        self._admissions = Admissions(min(MAX_PENDING, open_files() // 2), handshake_stage)
        self.callers = None if guard is None else guard.callers
        """Keys by peer identity; None for a socket without keys."""
        self._complain_at = 0.0
        self._ended: set[bytes] = set()  # identities disconnected but not reported yet
        self._loop: Loop | None = None
        self._on_disconnect: OnPeer | None = None
        if guard is not None:
            guard.watch(self._keys_changed)

    def attach(
        self, loop: Loop, on_message: OnPeerMessage, on_disconnect: OnPeer | None = None
    ) -> None:
        """Pass every message to ``on_message(identity, frames)`` on ``loop``.

        ``on_disconnect(identity)`` is called once after a peer that sent a message disconnected.
        """
        self._loop = loop
        self._on_disconnect = on_disconnect

        def pump() -> bool:
            message = self._take()
            if message is None:
                return False
            if message is not DROPPED:
                on_message(*message)
            return True  # also for a dropped message, so a flood of them ends the loop's visit

        loop.add_socket(self._socket, pump)
        loop.add_socket(self._monitor.socket, self._read_monitor, sends=False)
        self._limit_backlogs(loop)

    def recv(self) -> tuple[bytes, Frames] | None:
        """Return the next ``(identity, frames)``, or None; never blocks."""
        while True:
            message = self._take()
            if message is not DROPPED:
                return message

    def _take(self) -> tuple[bytes, Frames] | None:
        """Take one message from the socket; :data:`DROPPED` if it is refused."""
        self._own()
        try:
            head = self._socket.recv(NO_WAIT, copy=False)
        except zmq.Again:
            if self._backlog is not None:
                self._backlog.drained = True
            return None
        fd = _descriptor(head)
        if fd is None:
            self._read_frames()
            self.stats.malformed += 1
            return DROPPED
        identity = head.bytes
        admitted = self.callers is None or self._admit(self.callers, identity, fd, head)
        if admitted:
            self._heard(identity, fd)
        frames = self._read_frames()
        if self._backlog is not None:
            self._backlog.taken(fd, self._taken_bytes)
        return (identity, frames) if admitted and frames is not None else DROPPED

    def send(self, identity: bytes, frames: Buffers) -> SendResult:
        """Send a message to a peer; never blocks."""
        self._own()
        if self.callers is not None and not self._is_owner_there(identity):
            self.stats.unreachable += 1
            return SendResult.UNREACHABLE
        try:
            self._put([identity, *frames])
        except zmq.ZMQError as error:
            return self._not_sent(error)
        return SendResult.SENT

    @property
    def peers(self) -> int:
        """Number of peers that sent a message and are not known to be disconnected."""
        return len(self._peers)

    def close(self) -> None:
        """Stop listening; an ipc path is removed."""
        self._forget_backlogs()
        if self._loop is not None:
            self._loop.remove_socket(self._socket)
            self._loop.remove_socket(self._monitor.socket)
            self._loop = None
        if not self._socket.closed:
            self._monitor.close()
            self._socket.close()
            path = ipc_path(self.endpoint)
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
        self._admissions.settled(fd)
        if self._peers.heard(identity, fd, Loop.now()):
            self._verify(identity)

    def _read_monitor(self) -> bool:
        report = self._monitor.read()
        if report is None:
            return False
        event, value = report
        if event == zmq.EVENT_ACCEPTED:
            self._accepted(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._admissions.settled(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._admissions.settled(value)
            if self._backlog is not None:
                self._backlog.closed(value)
            for identity in self._peers.closed(value, Loop.now()):
                if self.callers is None:
                    self._verify(identity)
                else:
                    self._end(identity)
        elif event & HANDSHAKE_FAILURES:
            self.stats.refused += 1
            reason = describe_refusal(event, value)
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and not is_tcp(self.endpoint):
                # A command of this user that probed the address or ended early: no warning.
                _log.info("socket.handshake_failed", endpoint=self.endpoint, reason=reason)
            else:
                self._complain("socket.handshake_failed", reason)
        return True

    def _accepted(self, fd: int) -> None:
        """Track a connection until its handshake ends; close one if too many are pending."""
        if not is_tcp(self.endpoint):
            return  # only this user can connect to an ipc file
        if self._backlog is not None:
            self._backlog.opened(fd)
        crowded = self._admissions.accepted(fd, remote_address(fd), Loop.now())
        if crowded is not None:
            self.stats.crowded += 1
            self._complain("socket.crowded", "too many connections without a handshake")
            shut_down(crowded)

    def _verify(self, identity: bytes, attempt: int = 0) -> None:
        """Probe whether the peer of a closed connection is gone or has reconnected."""
        if self._loop is None or identity not in self._peers:
            return
        if self.send(identity, [_PROBE]) is SendResult.UNREACHABLE:
            self._lose(identity)
        elif attempt + 1 < len(VERIFY_DELAYS):
            pause = VERIFY_DELAYS[attempt + 1] - VERIFY_DELAYS[attempt]
            self._loop.call_later(pause, lambda: self._verify(identity, attempt + 1))

    def _lose(self, identity: bytes) -> None:
        """Remove a disconnected peer and report it once."""
        if identity not in self._peers:
            return
        self._peers.forget(identity)
        self._ended.discard(identity)
        if self.callers is not None:
            self.callers.gone(identity)
        if self._on_disconnect is not None:
            self._on_disconnect(identity)

    def _complain(self, event: str, reason: str) -> None:
        """Log at most once per :data:`COMPLAINT_S`, so that strangers cannot fill the log."""
        now = Loop.now()
        if now >= self._complain_at:
            self._complain_at = now + COMPLAINT_S
            refused, intruders = self.stats.refused, self.stats.intruders
            _log.warning(
                event, endpoint=self.endpoint, reason=reason, refused=refused, intruders=intruders
            )

    # ------------------------------------------------------------------ with keys

    def _admit(self, callers: Callers, identity: bytes, fd: int, head: zmq.Frame) -> bool:
        """Whether the message's key owns its identity and is still allowed."""
        refusal = callers.heard(identity, _user(head))
        if not refusal:
            if self._peers.descriptor(identity) != fd:
                # This descriptor number may have been reused: first read the report about the
                # end of its earlier connection.
                self._read_reports()
                self._ended.discard(identity)  # the peer has reconnected
            return True
        self.stats.intruders += 1
        self._complain("socket.intruder", refusal)
        # Messages to this identity would reach the intruder from now on.
        self._lose(identity)
        return False

    def _is_owner_there(self, identity: bytes) -> bool:
        """Whether the key that owns ``identity`` is still connected.

        When a connection ends, another peer may take its identity at once, but libzmq reports the
        end first. So a socket with keys reads the reports before each send, and never probes an
        identity with a message, which another peer might receive.
        """
        self._read_reports()
        return identity in self._peers and identity not in self._ended

    def _read_reports(self) -> None:
        """Handle the monitor's reports that are waiting now."""
        # Bounded: during a flood of connections new reports arrive as fast as they are read, so
        # reading until none is pending would last as long as the flood.
        for _ in range(MAX_WAITING):
            if not self._monitor.pending:
                break
            self._read_monitor()

    def _end(self, identity: bytes) -> None:
        """Block sends to a disconnected peer at once, and report it in the loop's next iteration.

        The report is deferred because this may run within the caller's :meth:`send`.
        """
        if identity not in self._ended and self._loop is not None:
            self._ended.add(identity)
            self._loop.call_later(0.0, lambda: self._lose_ended(identity))

    def _lose_ended(self, identity: bytes) -> None:
        if identity in self._ended:
            self._lose(identity)

    def _keys_changed(self) -> None:
        """Report peers as gone whose keys were removed from the list."""
        if self.callers is not None:
            for identity in self.callers.withdrawn():
                self._lose(identity)


def _user(head: zmq.Frame) -> bytes:
    """Return the z85 key of the connection, as set by ZAP; empty without one."""
    try:
        return str(head.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""


def _descriptor(head: zmq.Frame) -> int | None:
    """Return the descriptor of a message's connection; None for ZMTP 1 and 2, which have none.

    ZMTP 1 has no greeting, so almost any bytes from a stranger parse as ZMTP 1 messages.
    """
    try:
        return int(head.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


REMEMBER_CLOSED_S = 5.0
"""Maximum seconds for which a message is read later than its connection's close event."""


class PeerTable:
    """A two-way map of peer identities and descriptors."""

    def __init__(self) -> None:
        self._fd_of: dict[bytes, int] = {}
        self._by_fd: dict[int, set[bytes]] = {}
        self._closed_at: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._fd_of)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._fd_of

    def heard(self, identity: bytes, fd: int, now: float) -> bool:
        """Note a message's connection; return whether it may be closed already."""
        if self._fd_of.get(identity) == fd:
            return False
        self._drop(identity)
        self._fd_of[identity] = fd
        self._by_fd.setdefault(fd, set()).add(identity)
        # Not certain, since descriptor numbers are reused.
        return now - self._closed_at.get(fd, -REMEMBER_CLOSED_S) < REMEMBER_CLOSED_S

    def closed(self, fd: int, now: float) -> list[bytes]:
        """Note a closed descriptor; return the peers whose last message used it."""
        if len(self._closed_at) > 256:
            old = [f for f, at in self._closed_at.items() if now - at >= REMEMBER_CLOSED_S]
            for f in old:
                del self._closed_at[f]
        self._closed_at[fd] = now
        return list(self._by_fd.get(fd, ()))

    def descriptor(self, identity: bytes) -> int | None:
        """Return the descriptor of a peer's last message, or None."""
        return self._fd_of.get(identity)

    def forget(self, identity: bytes) -> None:
        """Remove a disconnected peer."""
        self._drop(identity)

    def _drop(self, identity: bytes) -> None:
        fd = self._fd_of.pop(identity, None)
        if fd is None:
            return
        others = self._by_fd[fd]
        others.discard(identity)
        if not others:
            del self._by_fd[fd]


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind ``socket``; return the address to connect to, with the chosen port for ``:0``.

    Raises ConfigError if the address is in use or cannot be bound.
    """
    path = ipc_path(endpoint)
    if path is not None:
        _check_ipc_path(endpoint, path)
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    mask = os.umask(0o177)  # create an ipc file with access for this user only
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


def ipc_path(endpoint: str) -> Path | None:
    """Return the file of an ipc endpoint; None for tcp and for abstract names."""
    name = endpoint.removeprefix("ipc://")
    return None if name == endpoint or name.startswith("@") else Path(name)


def _check_ipc_path(endpoint: str, path: Path) -> None:
    """Raise ConfigError if ``path`` is in use: libzmq would silently take it over."""
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
            return  # stale socket file of a dead process
    raise ConfigError(f"address in use: {endpoint}")
