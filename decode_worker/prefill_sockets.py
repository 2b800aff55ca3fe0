"""A decode worker's sockets for prefill workers: control messages, answers, KV frames.

Invariant on sockets with CURVE: only prefill workers reserve, and each can act only on its own
handoffs. An incarnation is made from its worker's key, and a grant belongs to the key that reserved
it. Routers and operators may send Probe and Ping.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np

from baton.engine.cache.paged_cache import Allocation
from baton.engine.pipeline.runner import StepRunner
from baton.kv_transfer.checksums import envelope_digest
from baton.kv_transfer.custom import CustomTransport
from baton.kv_transfer.device_frames import DeviceFrameWriter
from baton.kv_transfer.frames import FrameWriter, Int32
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.shared_pool import MappedPools, Mapping, unmap
from baton.proto.errors import AccessDenied, EnvelopeDamaged, ProtocolError
from baton.proto.ids import worker_incarnation
from baton.proto.wire.envelope import EnvelopeDecoder, decode_kv_header
from baton.proto.wire.messages import (
    KVFrame,
    Message,
    Open,
    Ping,
    Pong,
    PrefillToDecode,
    Probe,
    Rejected,
)
from baton.runtime.keys.allowed import PREFILL, AllowedKeys, KeyEntry
from baton.runtime.keys.identity_owners import Callers
from baton.runtime.net.channel import Frames
from baton.runtime.net.loop import Loop
from baton.runtime.net.outbox import Outbox
from baton.runtime.net.sockets import RouterChannel
from baton.runtime.process.log import get_logger
from baton.runtime.process.log_limit import LimitedLog

_log = get_logger()
_ANYBODY = (Probe, Ping, Pong)


def refusal(allowed: AllowedKeys, entry: KeyEntry | None, message: Message) -> AccessDenied | None:
    """Return why the key of a connection does not allow this message, or None.

    Nothing is remembered. The core compares the key with the ticket of a Reserve and with the key
    of a grant (:mod:`.handoffs`).
    """
    if isinstance(message, _ANYBODY):
        return None
    if entry is None or entry.role != PREFILL:
        return AccessDenied(f"{type(message).__name__} needs the key of a prefill worker")
    if not isinstance(message, Open):
        return None
    if not allowed.may_be(entry, PREFILL, message.worker):
        return AccessDenied(f"the key of the caller is not valid for {message.worker!r}")
    if message.incarnation != worker_incarnation(entry.public.encode(), message.nonce):
        return AccessDenied(
            f"the incarnation of {message.worker!r} was not made with the key of its connection"
        )
    return None


OnPeerSaid = Callable[[bytes, Message, bytes], object]
"""Receives a peer, its message, and the key of its connection (empty without keys)."""


class ControlSocket:
    """The bound socket for prefill workers; ``dropped`` counts messages that were not accepted."""

    def __init__(self, channel: RouterChannel, loop: Loop, dropped: Counter[str]) -> None:
        self._channel = channel
        self._loop = loop
        self._dropped = dropped
        self._log = LimitedLog(loop)
        self._decoder: EnvelopeDecoder[PrefillToDecode] = EnvelopeDecoder(
            PrefillToDecode, digest=envelope_digest
        )
        self._outbox: Outbox[bytes] = Outbox(channel.send, digest=envelope_digest)

    def attach(self, on_message: OnPeerSaid, on_gone: Callable[[bytes], object]) -> None:
        """Start listening; ``on_message(peer, message, key)`` receives the accepted messages."""
        self._channel.attach(
            self._loop, lambda peer, frames: self._hear(peer, frames, on_message), on_gone
        )

    def send(self, peer: bytes, message: Message) -> None:
        """Queue a message until :meth:`flush`."""
        self._outbox.put(peer, message)

    def flush(self) -> None:
        """Send everything queued."""
        self._outbox.flush()

    def _hear(self, peer: bytes, frames: Frames, on_message: OnPeerSaid) -> None:
        try:
            messages = self._decoder.decode(frames)
        except EnvelopeDamaged as error:
            self._dropped[f"peer_{error.code}"] += 1
            self._log.warning("peer.damaged", count=self._decoder.damaged)
            return  # treated as a lost message: the peer repeats it
        except ProtocolError as error:
            self._reject(peer, "peer.malformed", error)
            return
        key = b""
        if (callers := self._channel.callers) is not None:
            messages, key = self._allowed(callers, peer, messages), callers.key_of(peer)
        for message in messages:
            on_message(peer, message, key)

    def _allowed(
        self, callers: Callers, peer: bytes, messages: list[PrefillToDecode]
    ) -> list[PrefillToDecode]:
        """Return the messages that the peer's key allows; reject the others."""
        entry, allowed = callers.entry_of(peer), callers.allowed()
        passed = []
        for message in messages:
            error = refusal(allowed, entry, message)
            if error is None:
                passed.append(message)
            else:
                self._reject(peer, "peer.denied", error)
        return passed

    def _reject(self, peer: bytes, event: str, error: ProtocolError | AccessDenied) -> None:
        self._dropped[f"peer_{error.code}"] += 1
        self._log.warning(event, error=str(error))
        self._outbox.put(peer, Rejected(code=error.code, message=str(error)))


Stored = Callable[[KVFrame, bool], object]
"""Receives a frame's header after its last write, and whether the frame arrived intact."""


Unstored = Callable[[KVFrame, Exception], object]
"""Receives the header of a frame whose handling raised an exception of our own code."""


class DataSocket:
    """The bound socket for KV frames, and the pools of senders that this process has mapped.

    ``transport``: gets payloads for the tickets that frames carry, if the settings name one.
    ``device``: writes frames on a GPU's transfer stream; None: frames are written at once.
    """

    def __init__(
        self,
        channel: RouterChannel,
        loop: Loop,
        runner: StepRunner,
        device: DeviceFrameWriter | None,
        receiver: Receiver[Allocation],
        dropped: Counter[str],
        transport: CustomTransport | None = None,
    ) -> None:
        self._channel = channel
        self._loop = loop
        self._transport = transport
        self._receiver = receiver
        self._dropped = dropped
        self._log = LimitedLog(loop)
        self._writer = FrameWriter(runner.backend, runner.pool)
        self._device = device
        self.pools = MappedPools(runner.card.layout, _unmap_aside, runner.backend.open_pool)

    def attach(self, on_stored: Stored, on_failed: Unstored) -> None:
        """Start listening."""
        self._channel.attach(
            self._loop, lambda peer, frames: self._on_frames(peer, frames, on_stored, on_failed)
        )

    def count_drops(self) -> None:
        """Count what the channel dropped since the last call."""
        self._channel.stats.count_into(self._dropped, "data")

    def _on_frames(
        self, peer: bytes, frames: Frames, on_stored: Stored, on_failed: Unstored
    ) -> None:
        """Check a KV frame and write its payload, or the blocks it names, into the pool."""
        if len(frames) != 2:
            self._dropped["data_frames"] += 1
            self._log.warning("data.malformed", frames=len(frames))
            return
        try:
            header = decode_kv_header(frames[0])
        except ProtocolError as error:
            self._malformed(error)
            return
        try:
            if self._channel.callers is not None:
                self._check_sender(self._channel.callers, peer, header)
            blocks = self._receiver.data.locate(header)
            if blocks is None:
                self._dropped["stale_kv_frame"] += 1
                return
            stored = partial(self._stored, on_stored, header, time.monotonic())
            self._write(header, blocks, frames[1], stored)
        except (ProtocolError, AccessDenied) as error:
            self._malformed(error)
        except Exception as error:
            on_failed(header, error)

    def _malformed(self, error: ProtocolError | AccessDenied) -> None:
        self._dropped[f"data_{error.code}"] += 1
        self._log.warning("data.malformed", error=str(error))

    def _write(
        self,
        header: KVFrame,
        blocks: Int32,
        content: bytes | memoryview,
        stored: Callable[[bool], object],
    ) -> None:
        """Write the payload of a located frame, or the blocks it names, into the pool."""
        payload = np.frombuffer(content, np.uint8)
        if self._transport is not None and not header.shared and len(payload) != header.nbytes:
            found = self._transport.get(payload.tobytes(), header.nbytes)
            if found is None:
                lost = False
                stored(lost)
                return
            payload = found
        holder = self._receiver.owner(header.grant)
        owner = 0 if holder is None else holder.incarnation
        if self._device is not None and header.shared:
            self._device.fetch(header, blocks, lambda: self.pools.get(owner), payload, stored)
        elif self._device is not None:
            self._device.write(header, blocks, payload, stored)
        elif header.shared:
            source = self.pools.get(owner)
            stored(self._writer.fetch(header, blocks, source, payload))
        else:
            layout = self._receiver.layout_of(header.grant)
            stored(self._writer.write(header, blocks, payload, layout))

    def _stored(self, on_stored: Stored, header: KVFrame, arrived: float, intact: bool) -> None:
        if not intact:
            self._dropped["damaged_kv_frame"] += 1
        took = time.monotonic() - arrived
        _log.debug("frame.stored", frame=header.index, layers=header.layer_count, seconds=took)
        on_stored(header, intact)

    def _check_sender(self, callers: Callers, peer: bytes, header: KVFrame) -> None:
        """Raise AccessDenied unless the frame came with the key of the grant's owner."""
        owner = self._receiver.owner(header.grant)
        if owner is not None and owner.key != callers.key_of(peer):
            raise AccessDenied("the KV frame is for a grant of a worker with another key")

    def close(self) -> None:
        """Close the socket and unmap all pools; the next incarnation maps them again."""
        self._channel.close()
        self.pools.close_all()


def _unmap_aside(memory: Mapping) -> None:
    """Unmap on another thread: the last mapping of a dead worker's pool may free gigabytes."""
    thread = threading.Thread(target=unmap, args=(memory,), name="unmap", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started
        unmap(memory)
