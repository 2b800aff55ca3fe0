"""KV frames: pack pool blocks into bytes for the wire and unpack them.

Invariant: a payload is written only within bounds, and its cells count as received only after
the checksum matched. Nothing reads the cells before, so writing and checking share one pass.
The block kernels are passed in, so this module does not depend on a device. A device transport
replaces this module, not the protocol.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..proto.wire.messages import KVFrame

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


class BufferPool:
    """Staging buffers, pooled by exact size and reused after ZeroMQ has sent them.

    Fresh megabyte buffers cost a page fault every 4 KiB; reuse keeps them mapped and warm.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._free: dict[int, list[Bytes]] = {}
        self._capacity = capacity
        self.allocated = 0

    def take(self, nbytes: int) -> Bytes:
        """A uint8 buffer of exactly ``nbytes``, content undefined."""
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        self.allocated += 1
        return np.empty(nbytes, np.uint8)

    def release(self, buffer: Bytes) -> None:
        """Return a buffer to the pool. No reader may use it any more."""
        free = self._free.setdefault(buffer.nbytes, [])
        if len(free) < self._capacity:
            free.append(buffer)


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

    def pack(self, frame: KVFrame, block_table: Int32, out: Bytes) -> KVFrame:
        """Fill ``out`` (``frame.nbytes`` bytes) and return the header with its checksum."""
        blocks = block_table[frame.block_start : frame.block_start + frame.block_count]
        checksum = self._kernels.gather_blocks(
            self._pool, frame.layer_start, frame.layer_count, blocks, out
        )
        return msgspec.structs.replace(frame, checksum=checksum)

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

    def write(self, frame: KVFrame, blocks: Int32, payload: Bytes) -> bool:
        """Write a payload. Return False if it is damaged; its cells then stay missing."""
        if payload.nbytes != frame.nbytes:
            return False
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
