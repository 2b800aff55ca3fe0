"""A prefill worker's sockets to decode workers: control and data, one pair per endpoint.

KV frames are queued here until the data connection is made, so that the first frames of a new link
are not lost. Their staging buffers return to the pool after ZeroMQ has read them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import zmq

from baton.kv_transfer.checksums import envelope_digest
from baton.kv_transfer.device_frames import Release
from baton.kv_transfer.frames import BufferPool, Bytes
from baton.proto.errors import (
    ConfigError,
    EnvelopeDamaged,
    ProtocolError,
    VersionMismatch,
)
from baton.proto.wire.envelope import EnvelopeDecoder, encode_kv_header
from baton.proto.wire.messages import DecodeToPrefill, KVFrame, Message, Rejected
from baton.runtime.keys.allowed import DECODE
from baton.runtime.keys.curve import CurveKeys
from baton.runtime.keys.keyring import keys_to
from baton.runtime.net.channel import Buffers, ChannelOptions, Frames, SendResult
from baton.runtime.net.outbox import Outbox
from baton.runtime.net.sockets import DealerChannel
from baton.runtime.net.wiring import Wiring
from baton.runtime.process.log import get_logger
from baton.runtime.process.log_limit import LimitedLog
from baton.worker.router_links import routing_identity

from .events import DataDown, DataUp, FromPeer, NotSent, PeerDown, PeerUp
from .link_names import endpoint_and_key

_log = get_logger()
_CONTROL_OPTIONS = ChannelOptions()
_DATA_OPTIONS = ChannelOptions(send_hwm=0)  # bounded by byte credit, not by message count


PeerEvent = FromPeer | PeerUp | PeerDown | DataUp | DataDown | NotSent


def _ignore(_frames: Frames) -> None:
    """Ignore input: the receiver never sends on a data connection."""


class DecodeSocketPair:
    """The two sockets of one decode endpoint."""

    def __init__(self, sockets: DecodeSockets, endpoint: str) -> None:
        self._sockets = sockets
        self.endpoint = endpoint
        self.control = self._connect_control()
        self.data: DealerChannel | None = None
        self._waiting: deque[tuple[KVFrame, Bytes, Release | None]] = deque()
        self._in_flight: deque[tuple[zmq.MessageTracker, Release]] = deque()

    def _connect_control(self) -> DealerChannel:
        sockets, endpoint = self._sockets, self.endpoint
        channel = sockets.dial(*endpoint_and_key(endpoint))
        channel.attach(
            sockets.loop, self._hear, lambda: sockets.feed(PeerUp(endpoint)), self._control_lost
        )
        return channel

    def _control_lost(self) -> None:
        """Reconnect under a new identity.

        A decode worker that paused still holds the old connection, and ZeroMQ would ignore a
        second connection with the same identity.
        """
        self.control.close()
        self.control = self._connect_control()
        self._sockets.feed(PeerDown(self.endpoint))

    def open_data(self, address: str) -> None:
        """Connect the data socket; reconnect if the address changed."""
        if self.data is not None and self.data.endpoint == address:
            return
        self._connect_data(address)

    def _connect_data(self, address: str) -> None:
        sockets, endpoint = self._sockets, self.endpoint
        if self.data is not None:
            self.data.close()
            self.data = None
        sockets.feed(DataDown(endpoint))
        try:
            self.data = sockets.dial(address, endpoint_and_key(endpoint)[1], _DATA_OPTIONS)
        except ConfigError as error:
            _log.warning("peer.unreachable", endpoint=address, error=str(error))
            return
        self.data.attach(sockets.loop, _ignore, self._data_up, lambda: self._connect_data(address))

    def _data_up(self) -> None:
        self._sockets.feed(DataUp(self.endpoint))
        self._send_waiting()

    def send_frame(self, frame: KVFrame, payload: Bytes, release: Release | None) -> None:
        """Send a packed frame, or queue it until the data connection is made."""
        self._waiting.append((frame, payload, release))
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and self.data is not None and self.data.connected:
            frame, payload, release = self._waiting.popleft()
            parts = [encode_kv_header(frame), payload]
            if release is None:
                self.data.send(parts)
                continue
            tracker: Any = self.data.send_tracked(parts)
            if isinstance(tracker, SendResult):
                release()  # the frame is lost; the decode worker requests it again
            else:
                self._in_flight.append((tracker, release))
        self.reclaim()

    def reclaim(self) -> None:
        """Return staging buffers that ZeroMQ has finished with."""
        while self._in_flight and self._in_flight[0][0].done:
            self._in_flight.popleft()[1]()

    def _hear(self, frames: Frames) -> None:
        try:
            messages = self._sockets.decoder.decode(frames)
        except EnvelopeDamaged as error:
            self._sockets.dropped[f"peer_{error.code}"] += 1
            count = self._sockets.decoder.damaged
            self._sockets.log.warning("peer.damaged", endpoint=self.endpoint, count=count)
            return  # treated as a lost message: the peer repeats it
        except ProtocolError as error:
            self._sockets.dropped[f"peer_{error.code}"] += 1
            self._sockets.log.warning("peer.malformed", endpoint=self.endpoint, error=str(error))
            if isinstance(error, VersionMismatch):
                rejected = Rejected(code=error.code, message=str(error))
                self._sockets.feed(FromPeer(self.endpoint, rejected))
            return
        for message in messages:
            self._sockets.feed(FromPeer(self.endpoint, message))

    def close(self) -> None:
        """Close both connections."""
        self.control.close()
        if self.data is not None:
            self.data.close()
        for _, _, release in self._waiting:
            if release is not None:
                release()
        self._waiting.clear()
        self._sockets.left.extend(self._in_flight)  # ZeroMQ may still be reading these buffers
        self._in_flight.clear()


class DecodeSockets:
    """The sockets to all decode endpoints.

    ``feed``: gets what happens there. ``dropped``: counts messages that were not understood, and
    those too large to send.
    """

    def __init__(
        self,
        wiring: Wiring,
        worker: str,
        feed: Callable[[PeerEvent], object],
        dropped: Counter[str] | None = None,
    ) -> None:
        self.loop = wiring.loop
        self.log = LimitedLog(wiring.loop)
        self._wiring = wiring
        self._worker = worker
        self.feed = feed
        self.dropped = Counter[str]() if dropped is None else dropped
        self._outbox: Outbox[str] = Outbox(
            self._send_control, digest=envelope_digest, on_refused=self._refused
        )
        self.decoder: EnvelopeDecoder[DecodeToPrefill] = EnvelopeDecoder(
            DecodeToPrefill, digest=envelope_digest
        )
        self.buffers = BufferPool()
        self.left: deque[tuple[zmq.MessageTracker, Release]] = deque()  # buffers of closed pairs
        self._pairs: dict[str, DecodeSocketPair] = {}

    def _refused(self, endpoint: str, message: Message, reason: str) -> None:
        self.dropped["not_encodable"] += 1
        self.feed(NotSent(endpoint, message, reason))

    def dial(
        self, address: str, key: bytes, options: ChannelOptions = _CONTROL_OPTIONS
    ) -> DealerChannel:
        """Connect to a decode worker that has ``key``, or any listed key if that is empty.

        Raises ConfigError for a bad address or an unlisted key.
        """

        def keys() -> CurveKeys | None:
            found = keys_to(self._wiring.keys, address, DECODE)
            return found if found is None or not key else found.expecting(key)

        return DealerChannel(
            self._wiring.context,
            address,
            routing_identity(self._worker),
            keys=keys,
            options=options,
        )

    def connect(self, endpoint: str) -> None:
        """Open the control connection. A bad address times out like a silent peer."""
        pair = self._pairs.get(endpoint)
        if pair is not None:
            if pair.control.connected:  # the connection event will not come again
                self.feed(PeerUp(endpoint))
            return
        try:
            self._pairs[endpoint] = DecodeSocketPair(self, endpoint)
        except ConfigError as error:
            _log.warning("peer.unreachable", endpoint=endpoint, error=str(error))

    def open_data(self, endpoint: str, address: str) -> None:
        """Connect to the peer's address for KV frames."""
        pair = self._pairs.get(endpoint)
        if pair is not None:
            pair.open_data(address)

    def send(self, endpoint: str, message: Message) -> None:
        """Queue a control message until the end of the loop's turn."""
        if endpoint in self._pairs:
            self._outbox.put(endpoint, message)

    def _send_control(self, endpoint: str, frames: Buffers) -> SendResult:
        pair = self._pairs.get(endpoint)
        return SendResult.UNREACHABLE if pair is None else pair.control.send(frames)

    def send_frame(
        self, endpoint: str, frame: KVFrame, payload: Bytes, release: Release | None = None
    ) -> None:
        """Send a packed KV frame; ``release`` is called after ZeroMQ has read the payload."""
        pair = self._pairs.get(endpoint)
        if pair is not None:
            pair.send_frame(frame, payload, release)
        elif release is not None:
            release()

    def disconnect(self, endpoint: str) -> None:
        """Close the sockets of an endpoint."""
        pair = self._pairs.pop(endpoint, None)
        if pair is not None:
            self._outbox.drop(endpoint)
            pair.close()

    def flush(self) -> None:
        """Send everything queued."""
        for endpoint, pair in self._pairs.items():
            if not pair.control.connected:
                self._outbox.drop(endpoint)
            pair.reclaim()
        self._outbox.flush()
        for _ in range(len(self.left)):
            tracker, release = self.left.popleft()
            if tracker.done:
                release()
            else:
                self.left.append((tracker, release))
        self.buffers.age(self.loop.now())

    def close(self) -> None:
        """Close all sockets."""
        for endpoint in list(self._pairs):
            self.disconnect(endpoint)
