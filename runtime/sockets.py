"""The two ends of every connection: a listening RouterChannel, a connecting DealerChannel.

Invariant: a peer that was heard and whose connection closed is reported once: after about 2 ms
where its process ended, after :attr:`ChannelOptions.heartbeat_timeout_s` where it was stopped or
cut off. A hung process still answers ZeroMQ's heartbeats; only those of the application find it.
"""

from __future__ import annotations

import errno

import msgspec
import zmq

from ..proto.limits import PROTOCOL_VERSION
from ..proto.messages import Ping
from .admissions import MAX_PENDING, Admissions
from .binding import bind, ipc_path
from .callers import Callers
from .channel import (
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
from .log import get_logger
from .loop import Loop
from .monitor import HANDSHAKE_FAILURES, MAX_WAITING, Monitor, describe_refusal
from .peers import PeerTable
from .security import (
    apply_server_keys,
    check_bind,
    is_tcp,
)
from .zap import ServerKeys

VERIFY_DELAYS = (0.0, 0.002, 0.010, 0.050)
"""Seconds after a closed connection at which the peer is tried: a send in the first
milliseconds after a death can still be accepted."""
COMPLAINT_S = 1.0
"""Of connections and messages that are refused one is logged in this time; all are counted."""

__all__ = ["Context", "DealerChannel", "RouterChannel"]

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
        keys: ServerKeys | None = None,
        options: ChannelOptions = _DEFAULTS,
    ) -> None:
        guard = keys if is_tcp(endpoint) else None  # who reaches an ipc file is this user
        check_bind(endpoint, keyed=guard is not None)
        super().__init__(context, zmq.ROUTER, options)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if guard is not None:
            apply_server_keys(self._socket, guard.pair, guard.domain)
        try:
            self.endpoint = bind(self._socket, endpoint)
            check_bind(self.endpoint, keyed=guard is not None)  # what a name turned out to be
        except BaseException:
            self._socket.close()
            raise
        self._monitor = Monitor(self._socket)
        self._peers = PeerTable()
        self._admissions = Admissions(min(MAX_PENDING, open_files() // 2), handshake_stage)
        self.callers = None if guard is None else guard.callers
        """Whose keys the peers have; None where none are asked for."""
        self._complain_at = 0.0
        self._ended: set[bytes] = set()  # their connections closed, which is not told yet
        self._loop: Loop | None = None
        self._on_disconnect: OnPeer | None = None
        if guard is not None:
            guard.watch(self._keys_changed)

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
            if self.callers is not None and not self._admit(self.callers, identity, fd, head):
                self._read_frames()
                continue
            self._heard(identity, fd)
            frames = self._read_frames()
            if frames is not None:
                return identity, frames

    def send(self, identity: bytes, frames: Buffers) -> SendResult:
        """Queue a message for a peer; never blocks."""
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
            for identity in self._peers.closed(value, Loop.now()):
                if self.callers is None:
                    self._verify(identity)
                else:
                    self._end(identity)
        elif event & HANDSHAKE_FAILURES:
            self.stats.refused += 1
            reason = describe_refusal(event, value)
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and not is_tcp(self.endpoint):
                # A command of this user that only looked whether somebody listens, or was brief.
                _log.info("socket.handshake_failed", endpoint=self.endpoint, reason=reason)
            else:
                self._complain("socket.handshake_failed", reason)
        return True

    def _accepted(self, fd: int) -> None:
        """Count a connection until its handshake is over; close one of too many."""
        if not is_tcp(self.endpoint):
            return  # an ipc file is this user's alone
        crowded = self._admissions.accepted(fd, remote_address(fd), Loop.now())
        if crowded is not None:
            self.stats.crowded += 1
            self._complain("socket.crowded", "too many connections without a handshake")
            shut_down(crowded)

    def _verify(self, identity: bytes, attempt: int = 0) -> None:
        """Find out whether the peer behind a closed connection is gone or came back."""
        if self._loop is None or identity not in self._peers:
            return
        if self.send(identity, [_PROBE]) is SendResult.UNREACHABLE:
            self._lose(identity)
        elif attempt + 1 < len(VERIFY_DELAYS):
            pause = VERIFY_DELAYS[attempt + 1] - VERIFY_DELAYS[attempt]
            self._loop.call_later(pause, lambda: self._verify(identity, attempt + 1))

    def _lose(self, identity: bytes) -> None:
        """The peer is gone: tell, once."""
        if identity not in self._peers:
            return
        self._peers.forget(identity)
        self._ended.discard(identity)
        if self.callers is not None:
            self.callers.gone(identity)
        if self._on_disconnect is not None:
            self._on_disconnect(identity)

    def _complain(self, event: str, reason: str) -> None:
        """Strangers must not fill the log: they are all counted, and seldom told of."""
        now = Loop.now()
        if now >= self._complain_at:
            self._complain_at = now + COMPLAINT_S
            refused, intruders = self.stats.refused, self.stats.intruders
            _log.warning(
                event, endpoint=self.endpoint, reason=reason, refused=refused, intruders=intruders
            )

    # ------------------------------------------------------------------ with keys

    def _admit(self, callers: Callers, identity: bytes, fd: int, head: zmq.Frame) -> bool:
        """Whether the message came with the key its identity belongs to, still let in."""
        refusal = callers.heard(identity, _user(head))
        if not refusal:
            if self._peers.descriptor(identity) != fd:
                # The end of another connection, whose number this one has, was reported before.
                self._read_reports()
                self._ended.discard(identity)  # back on this connection
            return True
        self.stats.intruders += 1
        self._complain("socket.intruder", refusal)
        # Whatever is sent to this identity from now on would reach the intruder.
        self._lose(identity)
        return False

    def _is_owner_there(self, identity: bytes) -> bool:
        """Whether the connection of the key that was heard as ``identity`` still stands.

        A name is free for others the moment its connection ends, and that is reported before.
        So unlike a send without keys this looks at the reports first, and nobody is verified
        by a message, which another might get.
        """
        self._read_reports()
        return identity in self._peers and identity not in self._ended

    def _read_reports(self) -> None:
        """Take in what has ended so far."""
        # No more than can have waited at the start. A flood of connections makes reports as fast
        # as they are read, and until none is pending would be until the flood is over.
        for _ in range(MAX_WAITING):
            if not self._monitor.pending:
                break
            self._read_monitor()

    def _end(self, identity: bytes) -> None:
        """Its connection has ended: nothing is sent to it from here on, and soon that is told.

        Not at once: who sends may be in the midst of what is told about.
        """
        if identity not in self._ended and self._loop is not None:
            self._ended.add(identity)
            self._loop.call_later(0.0, lambda: self._lose_ended(identity))

    def _lose_ended(self, identity: bytes) -> None:
        if identity in self._ended:
            self._lose(identity)

    def _keys_changed(self) -> None:
        """The list changed: peers whose keys are in it no more are gone."""
        if self.callers is not None:
            for identity in self.callers.withdrawn():
                self._lose(identity)


def _user(head: zmq.Frame) -> bytes:
    """The key ZAP let in, in z85; empty for none."""
    try:
        return str(head.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""


def _descriptor(head: zmq.Frame) -> int | None:
    """The connection a message came by; None for one of ZMTP 1 or 2, which names none.

    ZMTP 1 has no greeting, so almost any bytes of a stranger are messages of it.
    """
    try:
        return int(head.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None
