"""Threads for work: the loop's thread submits items and receives their results.

A :class:`ComputeThread` answers every submitted item once, in order, unless
:meth:`ComputeThread.stop` drops it. A thread cannot be stopped, but it can be abandoned:
:class:`TimeLimited` answers an item that overran its limit with TimeoutError. The thread of such an
item gets no new items, and its late result is dropped. Handlers run only on the loop's thread.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from baton.proto.errors import CapacityError

from ..net.loop import Loop, Timer
from ..net.room import MORE_THREADS

Item = TypeVar("Item")
Result = TypeVar("Result")


class ComputeThread(Generic[Item, Result]):
    """Runs ``function(item)`` for every submitted item, one at a time.

    ``on_done(item, result)`` receives the result, or the exception that the function raised.
    ``progress`` counts finished items; heartbeats report it, so routers can detect a hang.
    ``finish``: makes the result out of what ``function`` returned, on a second thread, while
    ``function`` runs with the next item.
    """

    def __init__(
        self,
        loop: Loop,
        function: Callable[[Item], Any],
        on_done: Callable[[Item, Result | Exception], object],
        *,
        name: str = "compute",
        finish: Callable[[Any], Result] | None = None,
    ) -> None:
        self._loop = loop
        self._function = function
        self._finish = finish
        self._on_done = on_done
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[tuple[Item, Any] | None] = queue.SimpleQueue()
        self._stopping = False
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True)]
        if finish is not None:
            second = threading.Thread(target=self._run_second, name=f"{name}-2", daemon=True)
            self._threads.append(second)
        self.submitted = 0
        self.progress = 0
        for thread in self._threads:
            thread.start()

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
        for thread in self._threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (item := self._items.get()) is not None and not self._stopping:
            try:
                result = self._function(item)
            except Exception as error:
                result = error
            if self._finish is None:
                self._report(item, result)
            else:
                self._begun.put((item, result))
        self._begun.put(None)

    def _run_second(self) -> None:
        while (begun := self._begun.get()) is not None:
            item, result = begun
            if self._finish is not None and not isinstance(result, Exception):
                try:
                    result = self._finish(result)
                except Exception as error:
                    result = error
            self._report(item, result)

    def _report(self, item: Item, result: Result | Exception) -> None:
        # A separate function: locals of _run would keep the last item's arrays alive.
        self.progress += 1
        self._loop.post(lambda: self._on_done(item, result))


MAX_OVERRUN = 2
"""Maximum overrunning threads; at this number new items are refused."""


@dataclass(slots=True, eq=False)
class _Run(Generic[Item]):
    item: Item
    timer: Timer
    wanted: bool = True


class TimeLimited(Generic[Item, Result]):
    """Runs ``function(item)`` on a thread and waits at most ``limit()`` seconds for its result.

    ``on_done(item, result)`` receives the result, the exception that the function raised,
    TimeoutError, or CapacityError if too many threads overrun or no thread can be started. The
    first item starts the thread.
    """

    def __init__(
        self,
        loop: Loop,
        function: Callable[[Item], Result],
        on_done: Callable[[Item, Result | Exception], object],
        limit: Callable[[], float],
        *,
        name: str,
    ) -> None:
        self._loop = loop
        self._function = function
        self._on_done = on_done
        self._limit = limit
        self._name = name
        self._queue: deque[Item] = deque()
        self._refused: deque[tuple[Item, CapacityError]] = deque()
        self._running: _Run[Item] | None = None
        self._thread: ComputeThread[_Run[Item], Result] | None = None
        self._overrun: list[ComputeThread[_Run[Item], Result]] = []

    def submit(self, item: Item) -> None:
        """Queue an item; only from the loop's thread. ``on_done`` is never called within this."""
        self._queue.append(item)
        self._next()

    def drop(self, unwanted: Callable[[Item], bool]) -> None:
        """Drop these items: queued ones do not run, and a running one's result is ignored."""
        self._queue = deque(item for item in self._queue if not unwanted(item))
        self._refused = deque(each for each in self._refused if not unwanted(each[0]))
        if self._running is not None and unwanted(self._running.item):
            self._running.wanted = False

    def stop(self) -> None:
        """Drop all items; a running one continues, but its result is ignored."""
        self._queue.clear()
        self._refused.clear()
        if self._running is not None:
            self._running.timer.cancel()
            self._running = None
        for thread in (self._thread, *self._overrun):
            if thread is not None:
                thread.stop(0)
        self._thread, self._overrun = None, []

    def _next(self) -> None:
        if self._running is not None or not self._queue:
            return
        item = self._queue.popleft()
        if self._thread is None:
            self._overrun = [thread for thread in self._overrun if not thread.stop(0)]
            if len(self._overrun) >= MAX_OVERRUN:
                self._refuse(item, "earlier items are over their time limit")
                return
            try:
                self._thread = ComputeThread(
                    self._loop, lambda run: self._function(run.item), self._done, name=self._name
                )
            except RuntimeError as problem:  # a limit on threads, as of a container
                self._refuse(item, f"{problem}; {MORE_THREADS}")
                return
        self._running = _Run(item, self._loop.call_later(self._limit(), self._expire))
        self._thread.submit(self._running)

    def _done(self, run: _Run[Item], result: Result | Exception) -> None:
        if run is not self._running:
            return  # timed out before
        run.timer.cancel()
        self._running = None
        self._next()
        if run.wanted:
            self._on_done(run.item, result)

    def _expire(self) -> None:
        run, thread = self._running, self._thread
        if run is None or thread is None:
            return
        thread.stop(0)  # the thread ends after its item
        self._overrun.append(thread)
        self._running = self._thread = None
        self._next()
        if run.wanted:
            self._on_done(run.item, TimeoutError(f"{self._name}: time limit exceeded"))

    def _refuse(self, item: Item, reason: str) -> None:
        error = CapacityError(f"{self._name}: {reason}", retry_after=1.0)
        self._refused.append((item, error))
        self._loop.post(self._answer_refused)

    def _answer_refused(self) -> None:
        """Answer one refused item, unless it was dropped, and continue with the queue."""
        refused = self._refused.popleft() if self._refused else None
        self._next()
        if refused is not None:
            self._on_done(*refused)
