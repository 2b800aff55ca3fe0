"""A handoff's data path between two processes, beside raw pyzmq moving the same bytes.

Handoff: Reserve, Grant, gather + checksum, KV frames within byte credit, checksum + scatter,
Commit, Committed; the real sender, receiver and packers. Over "shm" the receiver reads the
sender's pool itself, so sums and one copy are left. Raw: a DEALER pushes the same pool's
bytes to a ROUTER, frame by frame and without a copy, and waits for one answer. Blocks that lie
in a row are sent from the pool itself, scattered ones are gathered.

A prefill worker reserves before it computes, so a request waits for what follows its last layer
alone: "waited" is from the blocks being final, the grant in hand, to Committed. "All" adds the
round trip of Reserve and Grant. In between, and before the raw transfer, both sides are idle.

    python -m baton.benchmarks.handoff [--tokens 256 1024 4096] [--frame-kib 1024] [--stages]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from ..engine.cache import PagedCache
from ..engine.kernels import load_backend
from ..engine.pipeline.model import make_pool
from ..kv_transfer.checksums import envelope_digest
from ..kv_transfer.frames import BufferPool, FramePacker, FrameWriter
from ..kv_transfer.receiver import Handover, Receiver, ReceiverConfig, Reply
from ..kv_transfer.sender import Done, Send, Sender, SenderConfig, SendFrame
from ..kv_transfer.shared_pool import PoolOwner, map_pool
from ..proto.codec import (
    EnvelopeDecoder,
    EnvelopeEncoder,
    decode_kv_header,
    encode_kv_header,
)
from ..proto.layout import KVLayout
from ..proto.messages import (
    Commit,
    Committed,
    Credit,
    DecodeToPrefill,
    Grant,
    GrantRef,
    PoolTicket,
    PrefillToDecode,
    Reserve,
)
from ..proto.wire import WireContext
from ..runtime.lifecycle import limit_blas_threads, recycle_large_buffers
from .scratch import scratch_folder

# The 125M-parameter Llama of docs/benchmarks.md.
LAYOUT = KVLayout(num_layers=12, num_kv_heads=4, head_dim=64, block_size=16)
IDLE_S = 0.002
"""Both sides sleep this long before what is measured, as while a prompt is computed."""
Socket = zmq.Socket[bytes]
F32 = npt.NDArray[np.float32]
Stamp = tuple[str, float]
"""What has just been done, and when (``perf_counter``, which all processes share)."""


def receive(folder: str, max_tokens: int) -> None:
    """Decode side: serve handoffs and raw transfers until told to stop."""
    context: zmq.Context[Socket] = zmq.Context()
    control, data, raw = (context.socket(zmq.ROUTER) for _ in range(3))
    for name, socket in (("control", control), ("data", data), ("raw", raw)):
        socket.bind(f"ipc://{folder}/{name}")
    blocks = LAYOUT.blocks_for(max_tokens) + 2
    pool = make_pool(LAYOUT, blocks)
    cache = PagedCache(blocks, LAYOUT.block_size)
    receiver = Receiver(1, LAYOUT, cache, ReceiverConfig())
    writer = FrameWriter(load_backend(), pool)
    theirs: F32 | None = None
    encoder = EnvelopeEncoder(digest=envelope_digest)
    decoder: EnvelopeDecoder[PrefillToDecode] = EnvelopeDecoder(
        PrefillToDecode, digest=envelope_digest
    )
    stamps: list[Stamp] = []

    def stamp(done: str) -> None:
        stamps.append((done, time.perf_counter()))

    poller = zmq.Poller()
    for socket in (control, data, raw):
        poller.register(socket, zmq.POLLIN)

    def perform(outputs: list) -> None:  # type: ignore[type-arg]
        for output in outputs:
            if isinstance(output, Reply):
                control.send_multipart([output.peer, *encoder.encode([output.message])])
            elif isinstance(output, Handover):
                cache.free(output.allocation)
                receiver.close(output.commit.request, output.commit.attempt)

    expected, got = 0, 0
    while True:
        found = poller.poll()
        stamp("receiver woke")
        for socket, _ in found:
            if socket is data:
                _, header, payload = data.recv_multipart(copy=False)
                frame = decode_kv_header(header.bytes)
                where = receiver.locate(frame)
                if where is not None:
                    buffer = np.frombuffer(payload.buffer, np.uint8)
                    if frame.shared:
                        intact = writer.fetch(frame, where, theirs, buffer)
                    else:
                        intact = writer.write(frame, where, buffer)
                    stamp("frame written")
                    perform(receiver.on_frame(frame, intact=intact, now=time.monotonic()))
            elif socket is control:
                peer, *frames = control.recv_multipart()
                for message in decoder.decode(frames):
                    if isinstance(message, Reserve):
                        perform(receiver.on_reserve(peer, message, time.monotonic()))
                    elif isinstance(message, Commit):
                        perform(receiver.on_commit(peer, message, time.monotonic()))
                        stamp("Commit taken")
            else:
                peer, first, *rest = raw.recv_multipart(copy=False)
                if rest:
                    got += len(rest[0].buffer)
                elif first.bytes == b"stop":
                    return
                elif first.bytes == b"stamps":
                    raw.send_multipart([peer.bytes, msgspec.json.encode(stamps)])
                    stamps.clear()
                elif first.bytes[:1] == b"[":
                    theirs = map_pool(msgspec.json.decode(first.bytes, type=PoolTicket), LAYOUT)
                else:
                    expected, got = int(first.bytes), 0
                if expected and got >= expected:
                    raw.send_multipart([peer.bytes, b"done"])
                    expected = 0


class Prefill:
    """Sending side of both transfers."""

    def __init__(self, folder: str, max_tokens: int, frame_bytes: int) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.control, self.data, self.raw = (self.context.socket(zmq.DEALER) for _ in range(3))
        for name, socket in (("control", self.control), ("data", self.data), ("raw", self.raw)):
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
        self.stamps: list[Stamp] = []
        self.frame_bytes = frame_bytes
        self.serial = 0

    def handoff(self, tokens: int) -> tuple[float, float]:
        """Seconds of one handoff of ``tokens`` tokens: all of it, and what a request waits for."""
        self.serial += 1
        request = self.serial.to_bytes(16, "little")
        key = (request, 1)
        sender = Sender(2, LAYOUT, SenderConfig(frame_bytes=self.frame_bytes))
        reserve = Reserve(
            request=request, attempt=1, incarnation=2, hashes=[], num_tokens=tokens, growth=0,
            deadline=60.0,
        )  # fmt: skip
        wire = WireContext(tokens=np.zeros(tokens, np.int32), max_length=1 << 20)

        def make(grant: GrantRef, frames: int, nbytes: int, digest: int) -> Commit:
            return Commit(
                request=request, attempt=1, grant=grant, frames=frames, bytes=nbytes,
                digest=digest, context=wire, emitted=[1], router="r", deadline=60.0,
            )  # fmt: skip

        self.stamps = []
        time.sleep(IDLE_S)
        start = time.perf_counter()
        todo = deque(sender.start("d", 0, reserve, 0.0, shared=self.shared))
        reserving = final = 0.0
        while True:
            while todo:
                output = todo.popleft()
                if isinstance(output, Send):
                    self.control.send_multipart(self.encoder.encode([output.message]))
                    self._stamp(f"{type(output.message).__name__} sent")
                elif isinstance(output, SendFrame):
                    todo.extend(self.send_frame(sender, output))
                    self._stamp("frame sent")
                elif isinstance(output, Done):
                    waited = time.perf_counter() - final
                    self._stamp("Committed heard")
                    return reserving + waited, waited
            for message in self.decoder.decode(self.control.recv_multipart()):
                if isinstance(message, Grant):
                    todo.extend(sender.on_grant("d", message, 0.0))
                    reserving = time.perf_counter() - start
                    time.sleep(IDLE_S)  # the prompt is computed
                    final = time.perf_counter()
                    self._stamp("final")
                    layers = LAYOUT.num_layers
                    todo.extend(
                        sender.ready(key, layer_end=layers, token_end=tokens, last=True, now=0.0)
                    )
                    todo.extend(sender.finish(key, make, 0.0))
                elif isinstance(message, Credit):
                    todo.extend(sender.on_credit(message, 0.0))
                elif isinstance(message, Committed):
                    todo.extend(sender.on_committed(message, 0.0))
                else:
                    raise TypeError(f"unexpected {message}")

    def _stamp(self, done: str) -> None:
        self.stamps.append((done, time.perf_counter()))

    def stages(self) -> list[Stamp]:
        """What both sides did since the last handoff's blocks were final, and when, in order."""
        self.raw.send(b"stamps")
        theirs = msgspec.json.decode(self.raw.recv(), type=list[Stamp])
        final = next(at for done, at in self.stamps if done == "final")
        return sorted(
            ((done, at - final) for done, at in [*self.stamps, *theirs] if at >= final),
            key=lambda stamp: stamp[1],
        )

    def send_frame(self, sender: Sender, output: SendFrame) -> list:  # type: ignore[type-arg]
        """Pack and send, reusing buffers ZeroMQ is done with."""
        while self.in_flight and self.in_flight[0][0].done:
            self.buffers.give(self.in_flight.popleft()[1])
        if self.shared:
            frame, names = self.packer.name(output.frame, self.table)
            self._stamp("frame summed")
            self.data.send_multipart([encode_kv_header(frame), names.data])
            return sender.on_packed(output.key, frame.index, frame.checksum, 0.0)
        ready = self.packer.view(output.frame, self.table)
        if ready is not None:
            frame, payload = ready
            self._stamp("frame summed")
            self.data.send(encode_kv_header(frame), zmq.SNDMORE)
            self.data.send(payload.data, copy=False)
            return sender.on_packed(output.key, frame.index, frame.checksum, 0.0)
        buffer = self.buffers.take(output.frame.nbytes)
        frame = self.packer.pack(output.frame, self.table, buffer)
        self._stamp("frame gathered")
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


def measure(tokens: list[int], frame_bytes: int, runs: int, *, stages: bool) -> None:
    """Start the receiving process and print the table."""
    with scratch_folder() as folder:
        command = [
            sys.executable,
            "-m",
            __spec__.name if __spec__ else "",
            "--receive",
            str(folder),
        ]
        child = subprocess.Popen([*command, "--tokens", str(max(tokens))])
        try:
            while not (folder / "raw").exists():
                time.sleep(0.02)
            side = Prefill(str(folder), max(tokens), frame_bytes)
            print(f"handoff beside ZeroMQ ipc, frames of {frame_bytes >> 10} KiB, {runs} pairs")
            print(
                "over blocks    tokens     MiB   waited µs   GB/s   all µs   GB/s   raw µs   GB/s"
                "   share waited   share all   limit GB/s"
            )
            for over, name, table in (
                ("zmq", "scattered", side.scattered),
                ("zmq", "in a row", np.sort(side.scattered)),
                ("shm", "scattered", side.scattered),
                ("shm", "in a row", np.sort(side.scattered)),
            ):
                side.table, side.shared = table, over == "shm"
                for count in tokens:
                    print(f"{over:4s} {name:9s} {_row(side, child.pid, count, runs)}")
                    if stages:
                        print(_stages([side.stages() for _ in range(runs) if side.handoff(count)]))
            side.raw.send(b"stop")
            child.wait(10)
        finally:
            child.kill()
            child.wait()


def _row(side: Prefill, other: int, tokens: int, runs: int) -> str:
    nbytes = LAYOUT.blocks_for(tokens) * LAYOUT.block_bytes * LAYOUT.num_layers
    rows = []
    for _ in range(runs + 3):
        (whole, waited), copies = side.handoff(tokens), side.copies(tokens)
        cpu = _cpu_seconds(other)
        plain = side.plain(nbytes)
        # Over ZeroMQ nothing moves faster than raw, and all copies together need the cores they
        # have; through shared memory one core copies while the other one sums.
        least = (_cpu_seconds(other) - cpu + copies) / (os.cpu_count() or 1)
        limit = side.crossing(tokens) if side.shared else max(plain, least)
        side.stages()
        rows.append((waited, whole, plain, limit))
    middle = [statistics.median(column) for column in zip(*rows[3:], strict=True)]
    rates = [nbytes / seconds / 1e9 for seconds in middle]
    shares = [statistics.median(row[2] / row[n] for row in rows[3:]) for n in (0, 1)]
    times = "   ".join(
        f"{s * 1e6:8.0f} {r:6.2f}" for s, r in zip(middle[:3], rates[:3], strict=True)
    )
    return (
        f"{tokens:6d} {nbytes / 2**20:8.1f} {times} {shares[0]:12.2f} {shares[1]:11.2f}"
        f" {rates[3]:11.2f}"
    )


def _stages(runs: list[list[Stamp]]) -> str:
    """Medians of when each stage was over, in µs since the blocks were final."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for stamps in runs:
        seen: Counter[str] = Counter()
        for done, at in stamps:
            seen[done] += 1
            times[f"{done} {seen[done]}"].append(at)
    usual = {done: statistics.median(at) for done, at in times.items() if 2 * len(at) > len(runs)}
    lines = [f"{at * 1e6:10.0f} {done}" for done, at in sorted(usual.items(), key=lambda i: i[1])]
    return "\n".join(lines)


def _cpu_seconds(other: int) -> float:
    """CPU time of this process and of another one."""
    clock = ~other << 3 | 2  # the kernel's id of a process's CPU clock
    return time.process_time() + time.clock_gettime(clock)


def main() -> None:
    """Command line."""
    limit_blas_threads(1)
    recycle_large_buffers()
    parser = argparse.ArgumentParser()
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--frame-kib", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--stages", action="store_true", help="when each stage is over")
    options = parser.parse_args()
    if options.receive:
        receive(options.receive, options.tokens[0])
    else:
        measure(options.tokens, options.frame_kib << 10, options.runs, stages=options.stages)


if __name__ == "__main__":
    main()
