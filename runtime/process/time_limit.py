"""Work on a thread with a time limit: a thread cannot be stopped, but it can be abandoned.

Invariant: unless it is dropped, every submitted item is answered once on the loop's thread: with a
result, an exception or TimeoutError. A thread that overran its limit gets no new items, and its
late result is dropped. Items run one at a time; the limit applies to the running time only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...proto.errors import CapacityError
from ..net.loop import Loop, Timer
from .compute import ComputeThread

Item = TypeVar("Item")
Result = TypeVar("Result")

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
    TimeoutError, or CapacityError if too many threads overrun. The first item starts the thread.
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
        self._refused: deque[Item] = deque()  # to be answered with CapacityError
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
        self._refused = deque(item for item in self._refused if not unwanted(item))
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
                self._refused.append(item)
                self._loop.post(self._refuse)
                return
            self._thread = ComputeThread(
                self._loop, lambda run: self._function(run.item), self._done, name=self._name
            )
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

    def _refuse(self) -> None:
        """Answer one refused item, unless it was dropped, and continue with the queue."""
        error = CapacityError(
            f"{self._name}: earlier items are over their time limit", retry_after=1.0
        )
        item = self._refused.popleft() if self._refused else None
        self._next()
        if item is not None:
            self._on_done(item, error)
