"""Common base of both socket types: options, limits, counters, and a check of the owning thread.

A received message is a list of frames: ``bytes`` up to 64 KiB, above that a ``memoryview`` of
ZeroMQ's buffer. A sent buffer above 64 KiB is not copied and must stay unchanged until ZeroMQ has
sent it (:meth:`Channel._put_tracked` returns a tracker).
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import zmq

from baton.proto.errors import InternalError
from baton.proto.limits import MAX_ARRAY_FRAMES, MAX_CONTROL_BYTES

from ..keys.curve import is_tcp
from ..liveness import CONNECTION_HEARTBEAT_S, DEFAULT_WORKER_TIMEOUT_S, connection_timeout
from ..process.log import get_logger
from .backlog import FRAME_BYTES, KEYED_FRAME_BYTES, Backlog
from .descriptors import received_bytes, shut_down
from .loop import Loop, Periodic

COPY_LIMIT = 64 << 10
"""Frames up to this many bytes are copied; for larger ones, tracking a buffer is cheaper."""
_HANDSHAKE_MS = 2000
_BACKLOG = 4096
NO_WAIT = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LOOK_S = 0.25
"""Seconds between two looks at the backlogs of a socket's connections."""
_log = get_logger()

Frames = list[bytes | memoryview]
Buffers = Sequence[Any]
"""Outgoing frames: bytes, memoryviews, C-contiguous arrays."""


class SendResult(enum.Enum):
    """Whether ZeroMQ accepted a message; true only for SENT. Accepted is not delivered."""

    SENT = "sent"
    UNREACHABLE = "unreachable"
    FULL = "full"

    def __bool__(self) -> bool:
        return self is SendResult.SENT


class ChannelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and timers of a socket. The send queue of a peer is limited by messages.

    ``backlog_bytes``: maximum bytes that one TCP connection may be ahead of this process.
    """

    max_frame_bytes: int = MAX_CONTROL_BYTES
    max_frames: int = MAX_ARRAY_FRAMES + 1
    send_hwm: int = 1000
    backlog_bytes: int = 64 << 20
    heartbeat_s: float = CONNECTION_HEARTBEAT_S
    heartbeat_timeout_s: float = connection_timeout(DEFAULT_WORKER_TIMEOUT_S)


class ChannelStats(msgspec.Struct):
    """Counters since the channel was created."""

    sent: int = 0
    received: int = 0
    unreachable: int = 0  # messages not sent: peer not connected
    full: int = 0  # messages not sent: the peer's queue is at its high-water mark
    malformed: int = 0  # received messages dropped: too many frames, or ZMTP below version 3
    refused: int = 0  # connections whose handshake failed
    crowded: int = 0  # connections closed because too many handshakes were pending
    intruders: int = 0  # received messages dropped: the key does not own the identity
    ahead: int = 0  # connections closed because too much of them was waiting

    def count_into(self, dropped: Counter[str], side: str) -> None:
        """Set the nonzero counts of refused input in ``dropped``, as ``SIDE_refused`` etc."""
        for reason in ("refused", "crowded", "malformed", "intruders", "ahead"):
            count = getattr(self, reason)
            if count:
                dropped[f"{side}_{reason}"] = count


class Channel:
    """Base of RouterChannel and DealerChannel."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        endpoint: str,
        options: ChannelOptions,
        *,
        keyed: bool,
    ) -> None:
        self.stats = ChannelStats()
        self.endpoint = endpoint
        self._max_frames = options.max_frames
        self._owner: int | None = None
        self._socket: zmq.Socket[bytes] = context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            # ZeroMQ's default of 100 fills at once in a flood. The kernel then drops legitimate
            # connections too, and they retry only after seconds. A place needs no descriptor.
            (zmq.BACKLOG, _BACKLOG),
            (zmq.MAXMSGSIZE, options.max_frame_bytes),
            (zmq.SNDHWM, options.send_hwm),
            (zmq.RCVHWM, 0),  # not a limit but an abort of libzmq: see backlog.py
            (zmq.HEARTBEAT_IVL, int(options.heartbeat_s * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, int(options.heartbeat_timeout_s * 1000)),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
        ):
            self._socket.setsockopt(option, value)
        # The socket's default threshold of 64 KiB decides which frames are copied.
        self._socket.copy_threshold = COPY_LIMIT
        # zmq.Socket's own method adds a call and two options that no frame here has.
        self._send_part = super(zmq.Socket, self._socket).send
        # Only this user can connect to an ipc file, and its kernel does not count bytes.
        self._backlog = Backlog(options.backlog_bytes, received_bytes) if is_tcp(endpoint) else None
        self._frame_bytes = KEYED_FRAME_BYTES if keyed else FRAME_BYTES
        self._taken_bytes = 0  # of the last message, as on the wire
        self._look: Periodic | None = None

    def _limit_backlogs(self, loop: Loop) -> None:
        """Begin to close connections that send faster than this process reads."""
        if self._backlog is not None:
            self._look = loop.every(_LOOK_S, self._close_those_ahead)

    def _close_those_ahead(self) -> None:
        if self._backlog is None:
            return
        # The loop seldom receives from an empty socket. This takes a signal from it, but a turn
        # follows each timer.
        if not zmq.zmq_poll([(self._socket, int(zmq.POLLIN))], 0):
            self._backlog.drained = True
        for fd in self._backlog.excessive():
            self.stats.ahead += 1
            _log.warning("socket.ahead", endpoint=self.endpoint, closed=self.stats.ahead)
            shut_down(fd)

    def _forget_backlogs(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _own(self) -> None:
        """Raise InternalError on a second thread, whose use of the socket would corrupt memory."""
        me = threading.get_ident()
        if self._owner is None:
            self._owner = me
        elif self._owner != me:
            raise InternalError("a ZeroMQ socket belongs to one thread")

    def _read_frames(self, flags: int = 0) -> Frames | None:
        """Read the (remaining) frames of a message; None if there are too many.

        Raises zmq.Again only for the first frame: ZeroMQ delivers complete messages.
        """
        frames: Frames = []
        count = size = 0
        while True:
            frame = self._socket.recv(flags, copy=False)
            count += 1
            size += len(frame)
            if count <= self._max_frames:
                frames.append(frame.bytes if len(frame) <= COPY_LIMIT else frame.buffer)
            if not frame.more:
                break
        self._taken_bytes = size + count * self._frame_bytes
        if count > self._max_frames:
            self.stats.malformed += 1
            return None
        self.stats.received += 1
        return frames

    def _put(self, parts: Buffers) -> None:
        send = self._send_part
        left = len(parts)
        for part in parts:
            left -= 1
            # "copy" spares short bytes a memoryview and a look at the threshold.
            copy = type(part) is bytes and len(part) <= COPY_LIMIT
            send(part, _MORE if left else NO_WAIT, copy)
        self.stats.sent += 1

    def _put_tracked(self, parts: Buffers) -> zmq.MessageTracker:
        tracker = self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False, track=True)
        self.stats.sent += 1
        return cast("zmq.MessageTracker", tracker)


OnMessage = Callable[[Frames], object]
"""Handler of a message from the one peer of a DEALER."""
OnPeerMessage = Callable[[bytes, Frames], object]
"""Handler of a message from the peer with this identity."""
OnPeer = Callable[[bytes], object]
"""Handler of an event of the peer with this identity."""
