"""The thread that waits for a device, so that the one with the sockets need not."""

from __future__ import annotations

from ..runtime.compute import ComputeThread
from ..runtime.log import get_logger
from ..runtime.loop import Loop
from .moves import Move, Moves

_log = get_logger()


class MoveThread:
    """:attr:`moves` of a worker: waited for on a thread of their own, finished on the loop's."""

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
        """End; what is under way is not reported any more."""
        self._thread.stop()
