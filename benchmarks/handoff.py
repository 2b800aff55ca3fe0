"""A handoff's data path between two processes, beside raw pyzmq moving the same bytes.

Handoff: Reserve, Grant, gather + checksum, KV frames within byte credit, checksum + scatter,
Commit, Committed; the real sender, receiver and packers. Over "shm" the receiver reads the
sender's pool itself, so sums and one copy are left. Raw: a DEALER pushes the same pool's
bytes to a ROUTER, frame by frame and without a copy, and waits for one answer. Blocks that lie
in a row are sent from the pool itself, scattered ones are gathered.

A prefill worker reserves before it computes, so a request waits for what follows its last layer
alone: "waited" is from the blocks being final, the grant in hand, to Committed. "All" adds the
round trip of Reserve and Grant. In between, and before the raw transfer, both sides are idle. "CPU"
is what both processes together compute for one handoff, and for one raw transfer.

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
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from baton.engine.cache.paged_cache import Allocation, PagedCache
from baton.engine.kernels.load import load_backend
from baton.engine.pipeline.model import make_pool
from baton.kv_transfer.checksums import envelope_digest
from baton.kv_transfer.frames import BufferPool, FramePacker, FrameWriter
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.receiver_grants import Handover, ReceiverConfig, Reply
from baton.kv_transfer.receiver_grants import Output as ReceiverOutput
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.sender_handoff import (
    CommitMaker,
    Done,
    Output,
    Send,
    SenderConfig,
    SendFrame,
)
from baton.kv_transfer.shared_pool import PoolOwner, map_pool
from baton.proto.layout import KVLayout
from baton.proto.wire.context_maps import grown_map
from baton.proto.wire.envelope import (
    EnvelopeDecoder,
    EnvelopeEncoder,
    decode_kv_header,
    encode_kv_header,
)
from baton.proto.wire.messages import (
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
from baton.proto.wire.wire_context import WireContext, WireTokens
from baton.runtime.process.os_settings import limit_blas_threads, recycle_large_buffers

from .scratch import scratch_folder

# The 125M-parameter Llama of docs/benchmarks.md.
LAYOUT = KVLayout(num_layers=12, num_kv_heads=4, head_dim=64, block_size=16)
FRAME_KIB = 2048
IDLE_S = 0.002
"""Seconds that both sides sleep before a measurement, as while a prompt is computed."""
Socket = zmq.Socket[bytes]
SOCKETS = ("control", "data", "raw")
"""Envelopes and KV frames of the handoff; the raw transfer and the receiver's commands."""
Stamp = tuple[str, float]
"""The last finished step and its time (``perf_counter``, the same clock in all processes)."""


class Stamps:
    """The steps that one side finished, with their times."""

    def __init__(self) -> None:
        self.taken: list[Stamp] = []

    def __call__(self, done: str) -> None:
        """Record that a step is finished."""
        self.taken.append((done, time.perf_counter()))


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
        """Return the seconds of one handoff: in total, and the part that a request waits for."""
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
        """Perform the sender's outputs. Return True after Committed, which is the last stamp."""
        while todo:
            output = todo.popleft()
            if isinstance(output, Send):
                self.control.send_multipart(self.encoder.encode([output.message]))
                self.stamp(f"{type(output.message).__name__} sent")
            elif isinstance(output, SendFrame):
                todo.extend(self.send_frame(sender, output))
                self.stamp("frame sent")
            elif isinstance(output, Done):
                self.stamp("Committed received")
                return True
        return False

    def stages(self) -> list[Stamp]:
        """Return the stamps of both sides since the last handoff's blocks were final, in order."""
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
            self.buffers.release(self.in_flight.popleft()[1])
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
        self.buffers.release(payload)
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
        handlers = {self.data: self._frame, self.control: self._envelope, self.raw: self._raw}
        while not self.stopped:
            found = self.poller.poll()
            self.stamp("receiver woke")
            for socket, _ in found:
                handlers[socket]()

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

    def _perform(self, outputs: list[ReceiverOutput[Allocation]]) -> None:
        for output in outputs:
            if isinstance(output, Reply):
                self.control.send_multipart([output.peer, *self.encoder.encode([output.message])])
            elif isinstance(output, Handover):
                self.cache.free(output.allocation)
                self.receiver.close(output.commit.request, output.commit.attempt)

    def _raw(self) -> None:
        """Handle a frame of the raw transfer, or stop, stamps, a pool's ticket, a byte count."""
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


# --------------------------------------------------------------------------- measurement


@contextmanager
def both_sides(most_tokens: int, frame_bytes: int) -> Iterator[tuple[Prefill, int]]:
    """Start the receiving process; yields the sending side and the process's pid."""
    with scratch_folder() as folder:
        name = __spec__.name if __spec__ else ""
        command = [sys.executable, "-m", name, "--receive", str(folder)]
        child = subprocess.Popen([*command, "--tokens", str(most_tokens)])
        try:
            while not (folder / "raw").exists():
                time.sleep(0.02)
            side = Prefill(str(folder), most_tokens, frame_bytes)
            yield side, child.pid
            side.raw.send(b"stop")
            child.wait(10)
        finally:
            child.kill()
            child.wait()


def figures(seconds: float) -> dict[str, float]:
    """Return MB/s of whole handoffs of 1,024 tokens in scattered blocks."""
    tokens = 1024
    found: dict[str, float] = {}
    with both_sides(tokens, FRAME_KIB << 10) as (side, _):
        for over in ("zmq", "shm"):
            side.table, side.shared = side.scattered, over == "shm"
            nbytes = LAYOUT.blocks_for(tokens) * LAYOUT.block_bytes * LAYOUT.num_layers
            took: list[float] = []
            end = time.monotonic() + seconds
            while time.monotonic() < end or len(took) < 4:
                took.append(side.handoff(tokens)[0])
                side.stages()
            found[f"MB/s over {over}"] = nbytes / statistics.median(took) / 1e6
    return found


def measure(tokens: list[int], frame_bytes: int, runs: int, *, stages: bool) -> None:
    """Start the receiving process and print the table."""
    with both_sides(max(tokens), frame_bytes) as (side, pid):
        print(f"handoff beside ZeroMQ ipc, frames of {frame_bytes >> 10} KiB, {runs} pairs")
        print(
            "over blocks    tokens     MiB   waited µs   GB/s   all µs   GB/s   raw µs   GB/s"
            "   share waited   share all   limit GB/s   CPU µs   raw's"
        )
        for over, name, table in (
            ("zmq", "scattered", side.scattered),
            ("zmq", "in a row", np.sort(side.scattered)),
            ("shm", "scattered", side.scattered),
            ("shm", "in a row", np.sort(side.scattered)),
        ):
            side.table, side.shared = table, over == "shm"
            for count in tokens:
                print(f"{over:4s} {name:9s} {_row(side, pid, count, runs)}")
                if stages:
                    print(_stages([side.stages() for _ in range(runs) if side.handoff(count)]))


def _row(side: Prefill, other: int, tokens: int, runs: int) -> str:
    nbytes = LAYOUT.blocks_for(tokens) * LAYOUT.block_bytes * LAYOUT.num_layers
    rows = []
    for _ in range(runs + 3):
        cpu = _cpu_seconds(other)
        whole, waited = side.handoff(tokens)
        spent, copies = _cpu_seconds(other) - cpu, side.copies(tokens)
        cpu = _cpu_seconds(other)
        plain = side.plain(nbytes)
        spent_plain = _cpu_seconds(other) - cpu
        # Over ZeroMQ nothing moves faster than raw, and all copies together need the cores they
        # have; through shared memory one core copies while the other one sums.
        least = (spent_plain + copies) / (os.cpu_count() or 1)
        limit = side.crossing(tokens) if side.shared else max(plain, least)
        side.stages()
        rows.append((waited, whole, plain, limit, spent, spent_plain))
    middle = [statistics.median(column) for column in zip(*rows[3:], strict=True)]
    rates = [nbytes / seconds / 1e9 for seconds in middle]
    shares = [statistics.median(row[2] / row[n] for row in rows[3:]) for n in (0, 1)]
    times = "   ".join(
        f"{s * 1e6:8.0f} {r:6.2f}" for s, r in zip(middle[:3], rates[:3], strict=True)
    )
    return (
        f"{tokens:6d} {nbytes / 2**20:8.1f} {times} {shares[0]:12.2f} {shares[1]:11.2f}"
        f" {rates[3]:11.2f} {middle[4] * 1e6:9.0f} {middle[5] * 1e6:7.0f}"
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
    parser.add_argument("--frame-kib", type=int, default=FRAME_KIB)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--stages", action="store_true", help="when each stage is over")
    options = parser.parse_args()
    if options.receive:
        Decode(options.receive, options.tokens[0]).serve()
    else:
        measure(options.tokens, options.frame_kib << 10, options.runs, stages=options.stages)


if __name__ == "__main__":
    main()
