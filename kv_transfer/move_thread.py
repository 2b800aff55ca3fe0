"""The thread that waits for the device, so that the thread with the sockets never blocks."""

from __future__ import annotations

from ..runtime.net.loop import Loop
from ..runtime.process.compute import ComputeThread
from ..runtime.process.log import get_logger
from .moves import Move, Moves

_log = get_logger()


class MoveThread:
    """Runs :attr:`moves` of a worker: waits on a separate thread, finishes on the loop's thread."""

    def __init__(self, loop: Loop) -> None:
        self._thread: ComputeThread[Move, None] = ComputeThread(
            loop, lambda move: move.wait(), self._finished, name="moves"
        )
        self.moves = Moves(self._thread.submit)

    def _finished(self, move: Move, result: Exception | None) -> None:
        if result is not None:
            _log.error("moves.failed", error=repr(result))
        self.moves.finished(move, result)

    def stop(self) -> None:
        """Stop the thread. Moves still under way are not reported."""
        self._thread.stop()
