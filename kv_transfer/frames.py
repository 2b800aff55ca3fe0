"""Writing and reading KV frames: pool blocks to bytes on the wire and back.

Invariant: a payload is written only within bounds, and its cells count as arrived only if its
checksum is right; until then nobody reads them. So one pass over the bytes checks and writes
them. The block kernels are handed in, so this module knows no device; a device transport
replaces it, not the protocol.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..proto.messages import KVFrame

Int32 = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


class BlockKernels(Protocol):
    """Copying blocks, as the engine's Backend does it."""

    on_host: bool
    """Whether the pool is the host's memory, so that a frame can be a view of it."""

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
        """XXH3-64 of what ``gather_blocks`` would copy."""
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
    """Staging buffers of one size class each, reused once ZeroMQ has let go of them.

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

    def give(self, buffer: Bytes) -> None:
        """Return a buffer nobody reads any more."""
        free = self._free.setdefault(buffer.nbytes, [])
        if len(free) < self._capacity:
            free.append(buffer)


class FramePacker:
    """Sender side: gathers the cells of a frame and computes its checksum in one pass.

    Cells that lie side by side in the pool are not gathered at all: the frame is a view of
    the pool. That is safe because the blocks are held until the handoff ends, and what is
    overwritten after an abort belongs to a grant that is gone.
    """

    def __init__(self, kernels: BlockKernels, pool: npt.NDArray[np.float32]) -> None:
        self._kernels = kernels
        self._pool = pool

    def view(self, frame: KVFrame, block_table: Int32) -> tuple[KVFrame, Bytes] | None:
        """Header and payload of a frame that needs no copy, else None."""
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
        """Fill ``out`` (``frame.nbytes`` bytes); returns the header with its checksum."""
        blocks = block_table[frame.block_start : frame.block_start + frame.block_count]
        checksum = self._kernels.gather_blocks(
            self._pool, frame.layer_start, frame.layer_count, blocks, out
        )
        return msgspec.structs.replace(frame, checksum=checksum)

    def name(self, frame: KVFrame, block_table: Int32) -> tuple[KVFrame, Bytes]:
        """Header and payload for a receiver that maps this pool: the sum, and where to read."""
        first = frame.block_start
        blocks = np.array(block_table[first : first + frame.block_count], np.int32)
        checksum = self._kernels.sum_blocks(
            self._pool, frame.layer_start, frame.layer_count, blocks
        )
        return msgspec.structs.replace(frame, checksum=checksum, shared=True), blocks.view(np.uint8)


class FrameWriter:
    """Receiver side: scatters a payload into its blocks and checks it in the same pass."""

    def __init__(self, kernels: BlockKernels, pool: npt.NDArray[np.float32]) -> None:
        self._kernels = kernels
        self._pool = pool

    def write(self, frame: KVFrame, blocks: Int32, payload: Bytes) -> bool:
        """Write a payload; False when it is damaged and its cells stay absent."""
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
        """Copy cells out of a sender's pool; False when they are damaged, or not to be had.

        ``payload``: the int32 blocks of ``source`` they are in, as bytes.
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
        except ValueError:  # blocks the sender does not have
            return False
        return digest == frame.checksum
