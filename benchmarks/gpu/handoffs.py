"""KV blocks handed from one process to another on one GPU, over CUDA IPC."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from baton.engine.cache.block_pool import BlockPool
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.kv_transfer.frames import FramePacker, FrameWriter
from baton.kv_transfer.shared_pool import MappedPools
from baton.proto.layout import KVLayout
from baton.proto.wire.messages import DeviceTicket, GrantRef, KVFrame

from .child import named
from .lines import Line, checked
from .stage import Stage, Timing

ROUNDS, BLOCKS, MOST = 1000, 512, 64
LAYOUT = KVLayout(num_layers=8, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16")
SLACK = 16 << 20
"""Allowed difference in bytes of device memory after the last handoff: the driver keeps some."""


class Sender(Protocol):
    """The prefill worker's side."""

    ticket: DeviceTicket

    def named(self, seed: int) -> tuple[KVFrame, bytes, bytes]:
        """New contents: header with their digest, ids of the blocks, and their bytes."""
        ...

    def close(self) -> None:
        """End."""
        ...


class LocalSender:
    """In this process: the code of the other process, which tests run without a GPU."""

    def __init__(self, stage: Stage) -> None:
        self._device, self._backend = stage.device, CudaBackend(stage.device)
        shape = (LAYOUT.num_layers, BLOCKS, *LAYOUT.block_shape)
        self._pool: Any = self._backend.kv_pool(shape, lambda n: np.zeros(n, np.uint8))
        self._packer = FramePacker(self._backend, self._pool)
        self.ticket = self._backend.pool_ticket(self._pool)

    def named(self, seed: int) -> tuple[KVFrame, bytes, bytes]:
        """Write random values into some blocks, and name them."""
        rng = np.random.default_rng(seed)
        count = int(rng.integers(1, MOST + 1))
        blocks = rng.permutation(BLOCKS)[:count].astype(np.int32)
        layer = int(rng.integers(LAYOUT.num_layers))
        for block in blocks:
            target = self._pool[layer, int(block)]
            self._device.write(target, rng.integers(0, 1 << 16, target.shape, np.uint16))
        nbytes = LAYOUT.num_layers * count * LAYOUT.block_bytes
        frame = KVFrame(
            grant=GrantRef(1, 0, 0), index=0, layer_start=0, layer_count=LAYOUT.num_layers,
            block_start=0, block_count=count, nbytes=nbytes, checksum=0,
        )  # fmt: skip
        header, payload = self._packer.name(frame, blocks)
        out = np.empty(nbytes, np.uint8)
        self._packer.pack(frame, blocks, out)
        return header, payload.tobytes(), out.tobytes()

    def close(self) -> None:
        """Let go of the pool."""
        del self._pool, self._packer


class RemoteSender:
    """The other process, which receives its commands as lines of JSON."""

    def __init__(self, stage: Stage) -> None:
        command = [sys.executable, "-P", "-m", __name__, stage.factory]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ticket = msgspec.json.decode(self._answer(), type=DeviceTicket)

    def named(self, seed: int) -> tuple[KVFrame, bytes, bytes]:
        """As :meth:`LocalSender.named`, there."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        frame, payload, content = json.loads(self._answer())
        return msgspec.convert(frame, KVFrame), bytes.fromhex(payload), bytes.fromhex(content)

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the sender ended with code {self._process.wait()}")
        return line


def serve(factory: str) -> None:
    """The sender's process: a ticket, then a frame for each seed until the input ends."""
    make: Callable[[Path], Stage] = named(factory)
    sender = LocalSender(make(Path()))
    print(msgspec.json.encode(sender.ticket).decode(), flush=True)
    for line in sys.stdin:
        frame, payload, content = sender.named(int(line))
        keep = content.hex() if int(line) % 50 == 0 else ""
        print(json.dumps([msgspec.to_builtins(frame), payload.hex(), keep]), flush=True)


def handoffs(stage: Stage) -> Iterator[Line]:
    """Check digests, contents of every 50th, block accounts, and the memory after the last."""
    before = stage.memory_used()
    sender: Sender = LocalSender(stage) if stage.cupy is None else RemoteSender(stage)
    try:
        yield from _received(stage, sender)
    finally:
        sender.close()
    more = stage.memory_used() - before
    result = f"{more / 2**20:+.1f} MiB" if stage.cupy is not None else "not counted here"
    yield checked("memory behind the last", more <= SLACK, result, f"{SLACK >> 20} MiB")


def _fetch(
    writer: FrameWriter,
    frame: KVFrame,
    ids: npt.NDArray[np.int32],
    pools: MappedPools,
    payload: npt.NDArray[np.uint8],
    arrived: list[bool],
) -> None:
    arrived.append(writer.fetch(frame, ids, pools.get(1), payload))


def _received(stage: Stage, sender: Sender) -> Iterator[Line]:
    backend = CudaBackend(stage.device)
    shape = (LAYOUT.num_layers, BLOCKS, *LAYOUT.block_shape)
    pool: Any = backend.kv_pool(shape, lambda n: np.zeros(n, np.uint8))
    books, writer = BlockPool(BLOCKS), FrameWriter(backend, pool)
    pools = MappedPools(LAYOUT, open_device=backend.open_pool)
    why = pools.open(b"sender", 1, sender.ticket)
    yield checked("the sender's pool is mapped", not why, why or "mapped")
    if why:
        return
    rounds, right, same, compared, times = stage.size(ROUNDS, 3), 0, 0, 0, []
    for seed in range(rounds):
        frame, payload, content = sender.named(seed)
        blocks = books.allocate(frame.block_count)
        if blocks is None:
            break
        ids = np.array(blocks, np.int32)
        source = np.frombuffer(payload, np.uint8)
        arrived: list[bool] = []
        work = partial(_fetch, writer, frame, ids, pools, source, arrived)
        times.append(stage.clock.seconds(work))
        right += arrived == [True]
        if content:
            compared += 1
            out = np.empty(frame.nbytes, np.uint8)
            backend.gather_blocks(pool, 0, LAYOUT.num_layers, ids, out)
            same += out.tobytes() == content
        for block in blocks:
            books.unpin(block)
    timing = Timing.of(times)
    yield checked("digests are equal", right == rounds, f"{right} of {rounds}, {timing.text} each")
    yield checked("contents are equal", 0 < compared == same, f"{same} of {compared}")
    left = BLOCKS - books.available
    yield checked("blocks given back", left == 0, f"{left} of {BLOCKS} still held")
    pools.close(b"sender")


if __name__ == "__main__":
    serve(sys.argv[1])
