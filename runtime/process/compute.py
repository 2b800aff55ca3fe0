"""A worker's compute thread; the loop's thread submits items and receives their results.

Invariant: every submitted item gets one result or exception, in order, unless
:meth:`ComputeThread.stop` drops it. Handlers run only on the loop's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..net.loop import Loop

Item = TypeVar("Item")
Result = TypeVar("Result")


class ComputeThread(Generic[Item, Result]):
    """Runs ``function(item)`` for every submitted item, one at a time.

    ``on_done(item, result)`` receives the result, or the exception that the function raised.
    ``progress`` counts finished items; heartbeats report it, so routers can detect a hang.
    """

    def __init__(
        self,
        loop: Loop,
        function: Callable[[Item], Result],
        on_done: Callable[[Item, Result | Exception], object],
        *,
        name: str = "compute",
    ) -> None:
        self._loop = loop
        self._function = function
        self._on_done = on_done
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.submitted = 0
        self.progress = 0
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a submitted item is unfinished."""
        return self.submitted > self.progress

    def submit(self, item: Item) -> None:
        """Queue an item; only from the loop's thread."""
        self.submitted += 1
        self._items.put(item)

    def post(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` on the loop's thread; for calls from within ``function``."""
        self._loop.post(callback)

    def stop(self, timeout: float = 5.0) -> bool:
        """Drop queued items and end after the running one.

        Returns False if it still runs after ``timeout`` seconds.
        """
        self._stopping = True
        self._items.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._items.get()) is not None and not self._stopping:
            result: Result | Exception
            try:
                result = self._function(item)
            except Exception as error:
                result = error
            self.progress += 1
            self._report(item, result)

    def _report(self, item: Item, result: Result | Exception) -> None:
        # A separate function: locals of _run would keep the last item's arrays alive.
        self._loop.post(lambda: self._on_done(item, result))
