"""The measuring process's side: the real sender and packers, and the raw transfer beside them."""

from __future__ import annotations

import time
from collections import deque

import msgspec
import numpy as np
import zmq

from ...engine.kernels import load_backend
from ...engine.pipeline.model import make_pool
from ...kv_transfer.checksums import envelope_digest
from ...kv_transfer.frames import BufferPool, FramePacker
from ...kv_transfer.sender import Sender
from ...kv_transfer.sender_handoff import CommitMaker, Done, Output, Send, SenderConfig, SendFrame
from ...kv_transfer.shared_pool import PoolOwner
from ...proto.wire.context_maps import grown_map
from ...proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder, encode_kv_header
from ...proto.wire.messages import (
    Commit,
    Committed,
    Credit,
    DecodeToPrefill,
    Grant,
    GrantRef,
    Reserve,
)
from ...proto.wire.wire_context import WireContext, WireTokens
from .wiring import IDLE_S, LAYOUT, SOCKETS, Socket, Stamp, Stamps


class Prefill:
    """Sending side of both transfers."""

    def __init__(self, folder: str, max_tokens: int, frame_bytes: int) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.control, self.data, self.raw = (self.context.socket(zmq.DEALER) for _ in SOCKETS)
        for name, socket in zip(SOCKETS, (self.control, self.data, self.raw), strict=True):
            socket.connect(f"ipc://{folder}/{name}")
        blocks = LAYOUT.blocks_for(max_tokens) + 2
        owner = PoolOwner()
        self.pool = make_pool(LAYOUT, blocks, owner.allocate)
        self.raw.send(msgspec.json.encode(owner.ticket))
        self.shared = False
        self.target = make_pool(LAYOUT, blocks)
        np.random.default_rng(0).standard_normal(out=self.pool, dtype=np.float32)
        self.scattered = np.random.default_rng(1).permutation(blocks).astype(np.int32)
        self.table = self.scattered
        self.packer = FramePacker(load_backend(), self.pool)
        self.buffers = BufferPool()
        self.in_flight: deque[tuple[zmq.MessageTracker, np.ndarray]] = deque()
        self.encoder = EnvelopeEncoder(digest=envelope_digest)
        self.decoder: EnvelopeDecoder[DecodeToPrefill] = EnvelopeDecoder(
            DecodeToPrefill, digest=envelope_digest
        )
        self.stamp = Stamps()
        self.frame_bytes = frame_bytes
        self.serial = 0

    def handoff(self, tokens: int) -> tuple[float, float]:
        """Seconds of one handoff of ``tokens`` tokens: all of it, and what a request waits for."""
        self.serial += 1
        request = self.serial.to_bytes(16, "little")
        sender = Sender(2, LAYOUT, SenderConfig(frame_bytes=self.frame_bytes))
        reserve = Reserve(
            request=request, attempt=1, incarnation=2, hashes=[], num_tokens=tokens, growth=0,
            deadline=60.0,
        )  # fmt: skip
        make = _commit(request, tokens)
        self.stamp = Stamps()
        time.sleep(IDLE_S)
        start = time.perf_counter()
        todo = deque(sender.start("d", 0, reserve, 0.0, shared=self.shared))
        reserving = final = 0.0
        while not self._carry_out(sender, todo):
            for message in self.decoder.decode(self.control.recv_multipart()):
                if isinstance(message, Grant):
                    todo.extend(sender.on_grant("d", message, 0.0))
                    reserving = time.perf_counter() - start
                    time.sleep(IDLE_S)  # the prompt is computed
                    final = time.perf_counter()
                    self.stamp("final")
                    todo.extend(_computed(sender, (request, 1), tokens, make))
                elif isinstance(message, Credit):
                    todo.extend(sender.on_credit("d", message, 0.0))
                elif isinstance(message, Committed):
                    todo.extend(sender.on_committed(message, 0.0))
                else:
                    raise TypeError(f"unexpected {message}")
        waited = self.stamp.taken[-1][1] - final
        return reserving + waited, waited

    def _carry_out(self, sender: Sender, todo: deque[Output]) -> bool:
        """Do what the sender wants; whether the handoff is over, its end being the last stamp."""
        while todo:
            output = todo.popleft()
            if isinstance(output, Send):
                self.control.send_multipart(self.encoder.encode([output.message]))
                self.stamp(f"{type(output.message).__name__} sent")
            elif isinstance(output, SendFrame):
                todo.extend(self.send_frame(sender, output))
                self.stamp("frame sent")
            elif isinstance(output, Done):
                self.stamp("Committed heard")
                return True
        return False

    def stages(self) -> list[Stamp]:
        """What both sides did since the last handoff's blocks were final, and when, in order."""
        self.raw.send(b"stamps")
        theirs = msgspec.json.decode(self.raw.recv(), type=list[Stamp])
        final = next(at for done, at in self.stamp.taken if done == "final")
        return sorted(
            ((done, at - final) for done, at in [*self.stamp.taken, *theirs] if at >= final),
            key=lambda stamp: stamp[1],
        )

    def send_frame(self, sender: Sender, output: SendFrame) -> list[Output]:
        """Pack and send, reusing buffers ZeroMQ is done with."""
        while self.in_flight and self.in_flight[0][0].done:
            self.buffers.give(self.in_flight.popleft()[1])
        if self.shared:
            frame, names = self.packer.name(output.frame, self.table)
            self.stamp("frame summed")
            self.data.send_multipart([encode_kv_header(frame), names.data])
            return sender.on_packed(output.key, frame.index, frame.checksum, 0.0)
        ready = self.packer.view(output.frame, self.table)
        if ready is not None:
            frame, payload = ready
            self.stamp("frame summed")
            self.data.send(encode_kv_header(frame), zmq.SNDMORE)
            self.data.send(payload.data, copy=False)
            return sender.on_packed(output.key, frame.index, frame.checksum, 0.0)
        buffer = self.buffers.take(output.frame.nbytes)
        frame = self.packer.pack(output.frame, self.table, buffer)
        self.stamp("frame gathered")
        self.data.send(encode_kv_header(frame), zmq.SNDMORE)
        tracker = self.data.send(buffer.data, copy=False, track=True)
        self.in_flight.append((tracker, buffer))
        return sender.on_packed(output.key, frame.index, frame.checksum, 0.0)

    def copies(self, tokens: int) -> float:
        """Seconds to gather and sum the same blocks, and to scatter and sum them, on one core."""
        count = LAYOUT.blocks_for(tokens)
        kernels, table = load_backend(), self.table[:count]
        payload = self.buffers.take(count * LAYOUT.block_bytes)
        start = time.perf_counter()
        for layer in range(LAYOUT.num_layers):
            kernels.gather_blocks(self.pool, layer, 1, table, payload)
            kernels.scatter_blocks(self.pool, layer, 1, table, payload)
        seconds = time.perf_counter() - start
        self.buffers.give(payload)
        return seconds

    def crossing(self, tokens: int) -> float:
        """Seconds to copy and sum the same blocks from pool to pool, on one core."""
        table = self.table[: LAYOUT.blocks_for(tokens)]
        start = time.perf_counter()
        load_backend().copy_blocks(self.pool, self.target, 0, LAYOUT.num_layers, table, table)
        return time.perf_counter() - start

    def plain(self, nbytes: int) -> float:
        """Seconds to move the same bytes in frames of the same size, answered once."""
        source = self.pool.reshape(-1).view(np.uint8)
        time.sleep(IDLE_S)
        start = time.perf_counter()
        self.raw.send(str(nbytes).encode())
        sent = 0
        while sent < nbytes:
            piece = source[sent : min(sent + self.frame_bytes, nbytes)]
            self.raw.send(b"h" * 40, zmq.SNDMORE)
            self.raw.send(piece.data, copy=False)
            sent += len(piece)
        self.raw.recv()
        return time.perf_counter() - start


def _commit(request: bytes, tokens: int) -> CommitMaker:
    prompt = WireContext(tokens=WireTokens(np.zeros(tokens, np.int32)), max_length=1 << 20)
    wire = grown_map(prompt, [1])

    def make(grant: GrantRef, frames: int, nbytes: int, digest: int) -> Commit:
        return Commit(
            request=request, attempt=1, grant=grant, frames=frames, bytes=nbytes,
            digest=digest, context=wire, router="r", deadline=60.0,
        )  # fmt: skip

    return make


def _computed(
    sender: Sender, key: tuple[bytes, int], tokens: int, make: CommitMaker
) -> list[Output]:
    """All blocks are final at once."""
    layers = LAYOUT.num_layers
    ready = sender.ready(key, layer_end=layers, token_end=tokens, last=True, now=0.0)
    return [*ready, *sender.finish(key, make, 0.0)]
