"""A decode worker's socket for KV frames: each is checked and written into the pool.

Invariant: a frame is written only into blocks that its grant holds, and is reported once, after its
last write.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np

from ..engine.cache.paged_cache import Allocation
from ..engine.loading.loader import Runner
from ..kv_transfer.frames import FrameWriter
from ..kv_transfer.moves import MovingWriter
from ..kv_transfer.receiver import Receiver
from ..kv_transfer.shared_pool import MappedPools, Mapping, unmap
from ..proto.errors import AccessDenied, ProtocolError
from ..proto.wire.envelope import decode_kv_header
from ..proto.wire.messages import KVFrame
from ..runtime.keys.identity_owners import Callers
from ..runtime.net.channel import Frames
from ..runtime.net.loop import Loop
from ..runtime.net.sockets import RouterChannel
from ..runtime.process.limited_log import LimitedLog

Stored = Callable[[KVFrame, bool], object]
"""Receives a frame's header after its last write, and whether the frame arrived intact."""


class DataSocket:
    """The bound socket for KV frames, and the pools of senders that this process has mapped.

    ``device``: writes frames on a GPU's transfer stream; None: frames are written at once.
    ``holds(key, incarnation)``: whether an incarnation opened a link with this key.
    """

    def __init__(
        self,
        channel: RouterChannel,
        loop: Loop,
        runner: Runner,
        device: MovingWriter | None,
        receiver: Receiver[Allocation],
        holds: Callable[[bytes, int], bool],
        dropped: Counter[str],
    ) -> None:
        self._channel = channel
        self._loop = loop
        self._receiver = receiver
        self._holds = holds
        self._dropped = dropped
        self._log = LimitedLog(loop)
        self._writer = FrameWriter(runner.backend, runner.pool)
        self._device = device
        self.pools = MappedPools(runner.card.layout, _unmap_aside, runner.backend.open_pool)

    def attach(self, on_stored: Stored) -> None:
        """Start listening."""
        self._channel.attach(
            self._loop, lambda peer, frames: self._on_frames(peer, frames, on_stored)
        )

    def count_drops(self) -> None:
        """Count what the channel dropped since the last call."""
        self._channel.stats.count_into(self._dropped, "data")

    def _on_frames(self, peer: bytes, frames: Frames, on_stored: Stored) -> None:
        """Check a KV frame and write its payload, or the blocks it names, into the pool."""
        if len(frames) != 2:
            self._dropped["data_frames"] += 1
            self._log.warning("data.malformed", frames=len(frames))
            return
        try:
            header = decode_kv_header(frames[0])
            if self._channel.callers is not None:
                self._check_sender(self._channel.callers, peer, header)
            blocks = self._receiver.data.locate(header)
        except (ProtocolError, AccessDenied) as error:
            self._dropped[f"data_{error.code}"] += 1
            self._log.warning("data.malformed", error=str(error))
            return
        if blocks is None:
            self._dropped["stale_kv_frame"] += 1
            return
        payload = np.frombuffer(frames[1], np.uint8)
        owner = self._receiver.owner(header.grant) or 0
        stored = partial(self._stored, on_stored, header)
        if self._device is not None and header.shared:
            self._device.fetch(header, blocks, lambda: self.pools.get(owner), payload, stored)
        elif self._device is not None:
            self._device.write(header, blocks, payload, stored)
        elif header.shared:
            source = self.pools.get(owner)
            stored(self._writer.fetch(header, blocks, source, payload))
        else:
            stored(self._writer.write(header, blocks, payload))

    def _stored(self, on_stored: Stored, header: KVFrame, intact: bool) -> None:
        if not intact:
            self._dropped["damaged_kv_frame"] += 1
        on_stored(header, intact)

    def _check_sender(self, callers: Callers, peer: bytes, header: KVFrame) -> None:
        """Raise AccessDenied unless the frame came with the key of the grant's owner."""
        owner = self._receiver.owner(header.grant)
        if owner is not None and not self._holds(callers.key_of(peer), owner):
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
