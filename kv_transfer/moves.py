"""KV frames of a pool on a GPU: packed and written by moves that nobody waits for.

The thread that owns sockets starts moves and is told of their ends; it never waits for the device.
Another thread does (``watch``). What finds no room in the ring of pinned buffers waits here, as a
few numbers, in the order it came.

Invariants: each frame given to :class:`MovingPacker` or :class:`MovingWriter` is answered exactly
once; a payload is seen only after its move is done; a buffer is used again only after its reader
has let go of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..proto.messages import KVFrame
from .frames import BufferPool, Bytes

Int32 = npt.NDArray[np.int32]
Pool = npt.NDArray[np.float32]
Give = Callable[[], object]
"""Called when a payload may be written over."""


class Move(Protocol):
    """Bytes on their way through a device."""

    def wait(self) -> None:
        """Block until the move is done; any thread."""
        ...

    @property
    def digest(self) -> int:
        """Of the bytes moved, once that is done."""
        ...

    @property
    def payload(self) -> Bytes:
        """What was gathered, once that is done and until :meth:`release`."""
        ...

    def release(self) -> None:
        """Give back the buffers of a move that is done."""
        ...


class BlockStream(Protocol):
    """Starts moves of a pool's blocks, in order.

    None while all buffers are taken; ValueError for what does not fit.
    """

    def gather(self, start: int, count: int, ids: Int32) -> Move | None:
        """Pack blocks ``ids`` of layers ``start..`` into pinned memory."""
        ...

    def scatter(self, start: int, count: int, ids: Int32, payload: Bytes) -> Move | None:
        """Unpack a payload; it may change when this returns."""
        ...

    def copy(
        self, source: Pool, start: int, count: int, source_ids: Int32, ids: Int32
    ) -> Move | None:
        """Copy blocks out of another process's pool."""
        ...

    def sum(self, start: int, count: int, ids: Int32) -> Move | None:
        """The digest alone."""
        ...


Start = Callable[[], Move | None]
Done = Callable[[Move | None], object]
"""Gets the finished move, whose buffers it gives back, or None for one that failed."""


class Moves:
    """Moves under way and those that wait for buffers.

    ``watch(move)``: have a thread wait for the move, and call :meth:`finished` back on this one;
    moves finish in the order they were started.
    """

    def __init__(self, watch: Callable[[Move], object]) -> None:
        self._watch = watch
        self._waiting: deque[tuple[Start, Done]] = deque()
        self._running: deque[tuple[Move, Done]] = deque()
        self._starting = False
        self.failures = 0

    @property
    def crowded(self) -> bool:
        """Whether moves wait for buffers."""
        return bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def submit(self, start: Start, done: Done) -> None:
        """Start a move as soon as there are buffers; ``done`` is called later, or at once."""
        self._waiting.append((start, done))
        self.resume()

    def resume(self) -> None:
        """Buffers may be free again."""
        if self._starting:
            return  # what a callback submits is started by the loop below
        self._starting = True
        try:
            while self._waiting and self._start_first():
                pass
        finally:
            self._starting = False

    def _start_first(self) -> bool:
        start, done = self._waiting[0]
        try:
            move = start()
        except ValueError:  # a frame that names blocks nobody has
            self._waiting.popleft()
            self.failures += 1
            done(None)
            return True
        if move is None:
            return False
        self._waiting.popleft()
        self._running.append((move, done))
        self._watch(move)
        return True

    def finished(self, move: Move, failure: Exception | None = None) -> None:
        """The oldest move under way is done, or its device has failed."""
        _, done = self._running.popleft()
        if failure is None:
            done(move)
        else:
            self.failures += 1
            move.release()
            done(None)
        self.resume()


Sent = Callable[[KVFrame, Bytes, Give | None], object]
"""Gets a frame's header and payload, and what to call when the payload was read."""


class MovingPacker:
    """Sender side: as :class:`~.frames.FramePacker`, but the frame comes later.

    A payload stays in its pinned buffer while ZeroMQ reads it, unless others wait for one: then it
    is copied out, so that a peer that reads slowly never holds what all share.
    """

    def __init__(self, stream: BlockStream, moves: Moves, buffers: BufferPool) -> None:
        self._stream, self._moves, self._buffers = stream, moves, buffers

    def pack(self, frame: KVFrame, block_table: Int32, sent: Sent) -> None:
        """Gather the frame's cells and hand them to ``sent``."""
        blocks = block_table[frame.block_start : frame.block_start + frame.block_count]
        start, count = frame.layer_start, frame.layer_count

        def done(move: Move | None) -> None:
            if move is None:
                return
            header = msgspec.structs.replace(frame, checksum=move.digest)
            if self._moves.crowded:
                copy = self._buffers.take(frame.nbytes)
                copy[:] = move.payload
                move.release()
                sent(header, copy, lambda: self._buffers.give(copy))
            else:
                sent(header, move.payload, lambda: self._give(move))

        self._moves.submit(lambda: self._stream.gather(start, count, blocks), done)

    def name(self, frame: KVFrame, block_table: Int32, sent: Sent) -> None:
        """Sum the frame's cells and tell where they are, for a receiver that maps this pool."""
        first = frame.block_start
        blocks = np.array(block_table[first : first + frame.block_count], np.int32)
        start, count = frame.layer_start, frame.layer_count

        def done(move: Move | None) -> None:
            if move is None:
                return
            header = msgspec.structs.replace(frame, checksum=move.digest, shared=True)
            move.release()
            sent(header, blocks.view(np.uint8), None)

        self._moves.submit(lambda: self._stream.sum(start, count, blocks), done)

    def _give(self, move: Move) -> None:
        move.release()
        self._moves.resume()


Stored = Callable[[bool], object]
"""Told whether a frame arrived intact; its blocks are not written to any more."""


class MovingWriter:
    """Receiver side: as :class:`~.frames.FrameWriter`, but what became of a frame is told later."""

    def __init__(self, stream: BlockStream, moves: Moves) -> None:
        self._stream, self._moves = stream, moves

    def write(self, frame: KVFrame, blocks: Int32, payload: Bytes, stored: Stored) -> None:
        """Scatter a payload; ``stored(False)`` when it is damaged."""
        start, count = frame.layer_start, frame.layer_count
        if payload.nbytes != frame.nbytes:
            stored(False)  # noqa: FBT003
            return
        self._moves.submit(
            lambda: self._stream.scatter(start, count, blocks, payload),
            lambda move: stored(_intact(move, frame)),
        )

    def fetch(
        self,
        frame: KVFrame,
        blocks: Int32,
        source: Callable[[], Pool | None],
        payload: Bytes,
        stored: Stored,
    ) -> None:
        """Copy cells out of a sender's pool; ``payload``: the int32 blocks they are in, as bytes.

        ``source`` is asked when the copy is queued, since the pool may have been given back.
        """
        start, count = frame.layer_start, frame.layer_count
        if payload.nbytes != 4 * frame.block_count:
            stored(False)  # noqa: FBT003
            return
        theirs = np.frombuffer(payload.tobytes(), np.int32)

        def begin() -> Move | None:
            pool = source()
            if pool is None:
                raise ValueError("the sender's pool is not mapped any more")
            return self._stream.copy(pool, start, count, theirs, blocks)

        self._moves.submit(begin, lambda move: stored(_intact(move, frame)))


def _intact(move: Move | None, frame: KVFrame) -> bool:
    if move is None:
        return False
    intact = move.digest == frame.checksum
    move.release()
    return intact
