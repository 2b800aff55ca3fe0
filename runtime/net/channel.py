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

from ...proto.errors import InternalError
from ...proto.limits import MAX_ARRAY_FRAMES, MAX_CONTROL_BYTES
from ..liveness import CONNECTION_HEARTBEAT_S, DEFAULT_WORKER_TIMEOUT_S, connection_timeout

COPY_LIMIT = 64 << 10
"""Frames up to this many bytes are copied; for larger ones, tracking a buffer is cheaper."""
_HANDSHAKE_MS = 2000
_BACKLOG = 4096
_MORE = zmq.NOBLOCK | zmq.SNDMORE

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
    """Limits and timers of a socket; high-water marks count messages per peer."""

    max_frame_bytes: int = MAX_CONTROL_BYTES
    max_frames: int = MAX_ARRAY_FRAMES + 1
    send_hwm: int = 1000
    receive_hwm: int = 1000
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

    def count_into(self, dropped: Counter[str], side: str) -> None:
        """Set the nonzero counts of refused input in ``dropped``, as ``SIDE_refused`` etc."""
        for reason in ("refused", "crowded", "malformed", "intruders"):
            count = getattr(self, reason)
            if count:
                dropped[f"{side}_{reason}"] = count


class Channel:
    """Base of RouterChannel and DealerChannel."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, options: ChannelOptions
    ) -> None:
        self.stats = ChannelStats()
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
            (zmq.RCVHWM, options.receive_hwm),
            (zmq.HEARTBEAT_IVL, int(options.heartbeat_s * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, int(options.heartbeat_timeout_s * 1000)),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
        ):
            self._socket.setsockopt(option, value)
        # The socket's default threshold of 64 KiB decides which frames are copied.
        self._socket.copy_threshold = COPY_LIMIT

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
        count = 0
        while True:
            frame = self._socket.recv(flags, copy=False)
            count += 1
            if count <= self._max_frames:
                frames.append(frame.bytes if len(frame) <= COPY_LIMIT else frame.buffer)
            if not frame.more:
                break
        if count > self._max_frames:
            self.stats.malformed += 1
            return None
        self.stats.received += 1
        return frames

    def _put(self, parts: Buffers) -> None:
        send = self._socket.send
        for part in parts[:-1]:
            send(part, _MORE, copy=False)
        send(parts[-1], zmq.NOBLOCK, copy=False)
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
