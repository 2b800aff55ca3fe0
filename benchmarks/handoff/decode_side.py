"""The receiving process: the real receiver and writer, and a sink for the raw transfer."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from ...engine.cache.paged_cache import Allocation, PagedCache
from ...engine.kernels import load_backend
from ...engine.pipeline.model import make_pool
from ...kv_transfer.checksums import envelope_digest
from ...kv_transfer.frames import FrameWriter
from ...kv_transfer.receiver import Receiver
from ...kv_transfer.receiver_grants import Handover, Output, ReceiverConfig, Reply
from ...kv_transfer.shared_pool import map_pool
from ...proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder, decode_kv_header
from ...proto.wire.messages import Commit, PoolTicket, PrefillToDecode, Reserve
from .wiring import LAYOUT, SOCKETS, Socket, Stamps


class Decode:
    """Serves handoffs and raw transfers until a stop message."""

    def __init__(self, folder: str, max_tokens: int) -> None:
        context: zmq.Context[Socket] = zmq.Context()
        self.control, self.data, self.raw = (context.socket(zmq.ROUTER) for _ in SOCKETS)
        sockets = (self.control, self.data, self.raw)
        for name, socket in zip(SOCKETS, sockets, strict=True):
            socket.bind(f"ipc://{folder}/{name}")
        self.poller = zmq.Poller()
        for socket in sockets:
            self.poller.register(socket, zmq.POLLIN)
        blocks = LAYOUT.blocks_for(max_tokens) + 2
        self.cache = PagedCache(blocks, LAYOUT.block_size)
        self.receiver = Receiver(1, LAYOUT, self.cache, ReceiverConfig())
        self.writer = FrameWriter(load_backend(), make_pool(LAYOUT, blocks))
        self.theirs: npt.NDArray[np.float32] | None = None
        self.encoder = EnvelopeEncoder(digest=envelope_digest)
        self.decoder: EnvelopeDecoder[PrefillToDecode] = EnvelopeDecoder(
            PrefillToDecode, digest=envelope_digest
        )
        self.stamp = Stamps()
        self.expected, self.got = 0, 0
        self.stopped = False

    def serve(self) -> None:
        """Run until the raw socket receives stop."""
        hear = {self.data: self._frame, self.control: self._envelope, self.raw: self._raw}
        while not self.stopped:
            found = self.poller.poll()
            self.stamp("receiver woke")
            for socket, _ in found:
                hear[socket]()

    def _frame(self) -> None:
        _, header, payload = self.data.recv_multipart(copy=False)
        frame = decode_kv_header(header.bytes)
        where = self.receiver.data.locate(frame)
        if where is None:
            return
        buffer = np.frombuffer(payload.buffer, np.uint8)
        if frame.shared:
            intact = self.writer.fetch(frame, where, self.theirs, buffer)
        else:
            intact = self.writer.write(frame, where, buffer)
        self.stamp("frame written")
        self._perform(self.receiver.data.on_frame(frame, intact=intact, now=time.monotonic()))

    def _envelope(self) -> None:
        peer, *frames = self.control.recv_multipart()
        for message in self.decoder.decode(frames):
            if isinstance(message, Reserve):
                self._perform(self.receiver.on_reserve(peer, message, time.monotonic()))
            elif isinstance(message, Commit):
                self._perform(self.receiver.on_commit(peer, message, time.monotonic()))
                self.stamp("Commit taken")

    def _perform(self, outputs: list[Output[Allocation]]) -> None:
        for output in outputs:
            if isinstance(output, Reply):
                self.control.send_multipart([output.peer, *self.encoder.encode([output.message])])
            elif isinstance(output, Handover):
                self.cache.free(output.allocation)
                self.receiver.close(output.commit.request, output.commit.attempt)

    def _raw(self) -> None:
        """A frame of the raw transfer, or a word: stop, stamps, a pool's ticket, bytes to come."""
        peer, first, *rest = self.raw.recv_multipart(copy=False)
        if rest:
            self.got += len(rest[0].buffer)
        elif first.bytes == b"stop":
            self.stopped = True
        elif first.bytes == b"stamps":
            self.raw.send_multipart([peer.bytes, msgspec.json.encode(self.stamp.taken)])
            self.stamp.taken.clear()
        elif first.bytes[:1] == b"[":
            self.theirs = map_pool(msgspec.json.decode(first.bytes, type=PoolTicket), LAYOUT)
        else:
            self.expected, self.got = int(first.bytes), 0
        if self.expected and self.got >= self.expected:
            self.raw.send_multipart([peer.bytes, b"done"])
            self.expected = 0
