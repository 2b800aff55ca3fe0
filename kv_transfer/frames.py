"""KV frames: pack pool blocks into bytes for the wire and unpack them.

Invariant: a payload is written only within bounds, and its cells count as received only after
the checksum matched. Nothing reads the cells before, so writing and checking share one pass.
The block kernels are passed in, so this module does not depend on a device. A device transport
replaces this module, not the protocol.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.errors import InternalError
from baton.proto.layout import KVLayout
from baton.proto.wire.messages import KVFrame

PERIOD_S = 1.0
"""Seconds of the periods in which :class:`BufferPool` measures the bytes in flight."""
MAP_BYTES = 64 << 10
"""Staging buffers from this size on are mapped, so that freed ones return to the system."""
Int32 = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


class BlockKernels(Protocol):
    """Block copies; implemented by the engine's Backend."""

    on_host: bool
    """True if the pool is in host memory, so that a frame can be a view of the pool."""

    def gather_blocks(
        self,
        pool: npt.NDArray[np.float32],
        layer_start: int,
        layer_count: int,
        block_ids: Int32,
        out: Bytes,
    ) -> int:
        """Copy blocks into ``out`` and return the XXH3-64 of the bytes."""
        ...

    def scatter_blocks(
        self,
        pool: npt.NDArray[np.float32],
        layer_start: int,
        layer_count: int,
        block_ids: Int32,
        payload: Bytes,
    ) -> int:
        """Copy ``payload`` into blocks and return its XXH3-64."""
        ...

    def convert_blocks(
        self,
        source: npt.NDArray[np.float32],
        target: npt.NDArray[np.float32],
        layers: tuple[int, int, int],
        source_ids: Int32,
        target_ids: Int32,
        first: int,
    ) -> None:
        """Copy tokens between pools with other block sizes or types of keys and values."""
        ...

    def checksum(self, payload: Bytes) -> int:
        """XXH3-64 of a payload."""
        ...

    def sum_blocks(
        self,
        pool: npt.NDArray[np.float32],
        layer_start: int,
        layer_count: int,
        block_ids: Int32,
    ) -> int:
        """XXH3-64 of the bytes that ``gather_blocks`` would copy."""
        ...

    def copy_blocks(
        self,
        source: npt.NDArray[np.float32],
        target: npt.NDArray[np.float32],
        layer_start: int,
        layer_count: int,
        source_ids: Int32,
        target_ids: Int32,
    ) -> int:
        """Copy blocks from pool to pool and return the XXH3-64 of the bytes."""
        ...


def class_size(nbytes: int) -> int:
    """Return the size of the staging buffers for ``nbytes``: four classes per power of two."""
    step = 1 << max(0, (nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def _mapped(nbytes: int) -> Bytes:
    """Allocate memory that returns to the system once it is freed, unlike the C library's heap."""
    if nbytes < MAP_BYTES:
        return np.empty(nbytes, np.uint8)
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


class BufferPool:
    """Staging buffers, pooled by size class and reused after ZeroMQ has sent them.

    Fresh megabyte buffers cost a page fault every 4 KiB; reuse keeps them mapped and warm.

    Invariant: ``held``, the bytes of all buffers in flight or pooled, is at most twice the recent
    peak of the bytes in flight: since the last end of a period or in the period before. :meth:`age`
    ends periods, so the pool shrinks with the traffic and is empty after two idle periods.
    """

    def __init__(self) -> None:
        # By class, the class used last at the end. A buffer is at most a quarter larger than
        # asked for, so what is in flight always fits into the limit.
        self._free: OrderedDict[int, list[Bytes]] = OrderedDict()
        self.in_flight = 0
        self.held = 0
        self.allocated = 0
        """Number of buffers allocated so far."""
        self._peak = self._peak_before = 0  # bytes in flight, in this period and the one before
        self._period_ends = 0.0

    def take(self, nbytes: int) -> Bytes:
        """A uint8 buffer of exactly ``nbytes``, content undefined."""
        self.in_flight += nbytes
        self._peak = max(self._peak, self.in_flight)
        size = class_size(nbytes)
        free = self._free.get(size)
        if free:
            whole = free.pop()
            if not free:
                del self._free[size]
            return whole[:nbytes]
        self.allocated += 1
        self.held += size
        self._shrink()
        return _mapped(size)[:nbytes]

    def release(self, buffer: Bytes) -> None:
        """Return a buffer to the pool. No reader may use it any more."""
        whole = buffer.base
        if not isinstance(whole, np.ndarray):
            raise InternalError("a buffer was released that is not of this pool")
        self.in_flight -= buffer.nbytes
        self._free.setdefault(whole.nbytes, []).append(whole)
        self._free.move_to_end(whole.nbytes)
        self._shrink()

    def age(self, now: float) -> None:
        """End the period if it is over, and free what the recent traffic did not need."""
        if now < self._period_ends:
            return
        self._period_ends = now + PERIOD_S
        self._peak_before, self._peak = self._peak, self.in_flight
        self._shrink()

    def _shrink(self) -> None:
        """Free pooled buffers above the limit, of the class that was unused for longest first."""
        limit = 2 * max(self._peak, self._peak_before)
        while self.held > limit and self._free:
            size, free = next(iter(self._free.items()))
            free.pop()
            self.held -= size
            if not free:
                del self._free[size]


class FramePacker:
    """Sender side: gathers the cells of a frame and computes the checksum in one pass.

    Contiguous cells are not gathered: their frame is a view of the pool. This is safe because
    the blocks are held until the handoff ends. After an abort the blocks may be overwritten, but
    then the receiver drops the frame, because its grant has ended.
    """

    def __init__(self, kernels: BlockKernels, pool: npt.NDArray[np.float32]) -> None:
        self._kernels = kernels
        self._pool = pool

    def view(self, frame: KVFrame, block_table: Int32) -> tuple[KVFrame, Bytes] | None:
        """Return header and payload of a frame that needs no copy, else None."""
        first, count = frame.block_start, frame.block_count
        if frame.layer_count != 1 or not self._kernels.on_host:
            return None
        blocks = block_table[first : first + count]
        start = int(blocks[0])
        if int(blocks[-1]) - start != count - 1 or (np.diff(blocks) != 1).any():
            return None
        payload = self._pool[frame.layer_start, start : start + count].reshape(-1).view(np.uint8)
        return msgspec.structs.replace(frame, checksum=self._kernels.checksum(payload)), payload

    def pack(
        self, frame: KVFrame, block_table: Int32, out: Bytes, layout: KVLayout | None = None
    ) -> KVFrame:
        """Fill ``out`` (``frame.nbytes`` bytes) and return the header with its checksum.

        ``layout``: of the frame, if its blocks or its type differ from the pool's.
        """
        if layout is not None:
            return self._converted(frame, block_table, out, layout)
        blocks = block_table[frame.block_start : frame.block_start + frame.block_count]
        checksum = self._kernels.gather_blocks(
            self._pool, frame.layer_start, frame.layer_count, blocks, out
        )
        return msgspec.structs.replace(frame, checksum=checksum)

    def _converted(
        self, frame: KVFrame, block_table: Int32, out: Bytes, layout: KVLayout
    ) -> KVFrame:
        size = self._pool.shape[4]
        first = frame.block_start * layout.block_size
        end = first + frame.block_count * layout.block_size
        blocks = np.array(block_table[first // size : -(-end // size)], np.int32)
        self._kernels.convert_blocks(
            self._pool,
            layout.blocks_of(out, frame.layer_count),
            (frame.layer_start, 0, frame.layer_count),
            blocks,
            np.arange(frame.block_count, dtype=np.int32),
            first % size,
        )
        return msgspec.structs.replace(frame, checksum=self._kernels.checksum(out))

    def name(self, frame: KVFrame, block_table: Int32) -> tuple[KVFrame, Bytes]:
        """Return header and payload for a receiver that maps this pool.

        The payload is the int32 block ids to read; the header carries the checksum of the blocks.
        """
        first = frame.block_start
        blocks = np.array(block_table[first : first + frame.block_count], np.int32)
        checksum = self._kernels.sum_blocks(
            self._pool, frame.layer_start, frame.layer_count, blocks
        )
        return msgspec.structs.replace(frame, checksum=checksum, shared=True), blocks.view(np.uint8)


class FrameWriter:
    """Receiver side: scatters a payload into its blocks and verifies it in the same pass."""

    def __init__(self, kernels: BlockKernels, pool: npt.NDArray[np.float32]) -> None:
        self._kernels = kernels
        self._pool = pool

    def write(
        self, frame: KVFrame, blocks: Int32, payload: Bytes, layout: KVLayout | None = None
    ) -> bool:
        """Write a payload. Return False if it is damaged; its cells then stay missing.

        ``layout``: of the frame, if its type differs from the pool's.
        """
        if payload.nbytes != frame.nbytes:
            return False
        if layout is not None:
            if self._kernels.checksum(payload) != frame.checksum:
                return False
            self._kernels.convert_blocks(
                layout.blocks_of(payload, frame.layer_count),
                self._pool,
                (0, frame.layer_start, frame.layer_count),
                np.arange(frame.block_count, dtype=np.int32),
                blocks,
                0,
            )
            return True
        digest = self._kernels.scatter_blocks(
            self._pool, frame.layer_start, frame.layer_count, blocks, payload
        )
        return digest == frame.checksum

    def fetch(
        self,
        frame: KVFrame,
        blocks: Int32,
        source: npt.NDArray[np.float32] | None,
        payload: Bytes,
    ) -> bool:
        """Copy cells from a sender's pool. Return False if they are damaged or unavailable.

        ``payload``: int32 block ids in ``source``, as bytes.
        """
        if source is None or payload.nbytes != 4 * frame.block_count:
            return False
        try:
            digest = self._kernels.copy_blocks(
                source,
                self._pool,
                frame.layer_start,
                frame.layer_count,
                np.frombuffer(payload.tobytes(), np.int32),
                blocks,
            )
        except ValueError:  # block ids outside the sender's pool
            return False
        return digest == frame.checksum
