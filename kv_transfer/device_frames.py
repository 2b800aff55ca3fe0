"""KV frames of a pool on a GPU, packed and written by asynchronous moves.

The thread with the sockets starts moves and is notified when they finish; it never waits for the
device. Another thread waits (``watch``). If the ring of pinned buffers is full, a move waits here
in arrival order, as a few numbers and without a payload.

Invariants: each frame passed to the packer or the writer is reported exactly once; a payload is
visible only after its move is done; a buffer is reused only after its reader released it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.block_moves import BlockMove, BlockStream
from baton.proto.wire.messages import KVFrame

from .frames import BufferPool, Bytes

Int32 = npt.NDArray[np.int32]
Pool = npt.NDArray[np.float32]
Release = Callable[[], object]
"""Called after a payload was read: its buffer may be overwritten."""


Start = Callable[[], BlockMove | None]
Done = Callable[[BlockMove | None], object]
"""Receives the finished move and releases its buffers; receives None if the move failed."""


class MoveQueue:
    """Running moves, and moves that wait for buffers.

    ``watch(move)`` waits for the move on another thread and then calls :meth:`finished` on this
    thread. Moves finish in the order in which they were started. A move that cannot start is not
    tried again; ``tell`` gets its error.
    """

    def __init__(
        self,
        watch: Callable[[BlockMove], object],
        tell: Callable[[Exception], object] = lambda _error: None,
    ) -> None:
        self._watch, self._tell = watch, tell
        self._waiting: deque[tuple[Start, Done]] = deque()
        self._running: deque[tuple[BlockMove, Done]] = deque()
        self._starting = False
        self.failures = 0

    @property
    def crowded(self) -> bool:
        """True if moves wait for buffers."""
        return bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def submit(self, start: Start, done: Done) -> None:
        """Start a move as soon as buffers are free; ``done`` may be called before this returns."""
        self._waiting.append((start, done))
        self.resume()

    def resume(self) -> None:
        """Start waiting moves, because buffers may be free again."""
        if self._starting:
            return  # a callback submitted this move; the loop below starts it
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
        except Exception as error:  # blocks outside the pool, no memory, a lost device
            self._waiting.popleft()
            self.failures += 1
            self._tell(error)
            done(None)
            return True
        if move is None:
            return False
        self._waiting.popleft()
        self._running.append((move, done))
        self._watch(move)
        return True

    def finished(self, move: BlockMove, failure: Exception | None = None) -> None:
        """Finish the oldest running move; ``failure``: the device's error, if any."""
        _, done = self._running.popleft()
        if failure is None:
            done(move)
        else:
            self.failures += 1
            move.release()
            done(None)
        self.resume()


Sent = Callable[[KVFrame, Bytes, Release | None], object]
"""Receives a frame's header, its payload and the function to call after the payload was read."""
Failed = Callable[[], object]
"""Called if the device could not read a frame's cells."""


class DeviceFramePacker:
    """Sender side: the asynchronous :class:`~.frames.FramePacker`.

    A payload stays in its pinned buffer while ZeroMQ reads it. If other moves wait for a buffer,
    the payload is copied out instead, so that a slow peer never occupies the shared buffers.
    """

    def __init__(self, stream: BlockStream, moves: MoveQueue, buffers: BufferPool) -> None:
        self._stream, self._moves, self._buffers = stream, moves, buffers

    def pack(self, frame: KVFrame, block_table: Int32, sent: Sent, failed: Failed) -> None:
        """Gather the frame's cells and pass them to ``sent``, or call ``failed``."""
        blocks = block_table[frame.block_start : frame.block_start + frame.block_count]
        start, count = frame.layer_start, frame.layer_count

        def done(move: BlockMove | None) -> None:
            if move is None:
                failed()
                return
            header = msgspec.structs.replace(frame, checksum=move.digest)
            if self._moves.crowded:
                copy = self._buffers.take(frame.nbytes)
                copy[:] = move.payload
                move.release()
                sent(header, copy, lambda: self._buffers.release(copy))
            else:
                sent(header, move.payload, lambda: self._release(move))

        self._moves.submit(lambda: self._stream.gather(start, count, blocks), done)

    def name(self, frame: KVFrame, block_table: Int32, sent: Sent, failed: Failed) -> None:
        """Pass ``sent`` the checksum and block ids, for a receiver that maps this pool."""
        first = frame.block_start
        blocks = np.array(block_table[first : first + frame.block_count], np.int32)
        start, count = frame.layer_start, frame.layer_count

        def done(move: BlockMove | None) -> None:
            if move is None:
                failed()
                return
            header = msgspec.structs.replace(frame, checksum=move.digest, shared=True)
            move.release()
            sent(header, blocks.view(np.uint8), None)

        self._moves.submit(lambda: self._stream.sum(start, count, blocks), done)

    def _release(self, move: BlockMove) -> None:
        move.release()
        self._moves.resume()


Stored = Callable[[bool], object]
"""Receives True if the frame arrived intact. Nothing writes to its blocks any more."""


class DeviceFrameWriter:
    """Receiver side: the asynchronous :class:`~.frames.FrameWriter`; ``stored`` gets the result."""

    def __init__(self, stream: BlockStream, moves: MoveQueue) -> None:
        self._stream, self._moves = stream, moves

    def write(self, frame: KVFrame, blocks: Int32, payload: Bytes, stored: Stored) -> None:
        """Scatter a payload and call ``stored``: False if the payload is damaged."""
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
        """Copy cells from a sender's pool; ``payload``: their int32 block ids there, as bytes.

        ``source`` is called when the copy starts, because the pool may be unmapped by then.
        """
        start, count = frame.layer_start, frame.layer_count
        if payload.nbytes != 4 * frame.block_count:
            stored(False)  # noqa: FBT003
            return
        theirs = np.frombuffer(payload.tobytes(), np.int32)

        def begin() -> BlockMove | None:
            pool = source()
            if pool is None:
                raise ValueError("the sender's pool is no longer mapped")
            return self._stream.copy(pool, start, count, theirs, blocks)

        self._moves.submit(begin, lambda move: stored(_intact(move, frame)))


def _intact(move: BlockMove | None, frame: KVFrame) -> bool:
    if move is None:
        return False
    intact = move.digest == frame.checksum
    move.release()
    return intact
