"""Streams of the device that executes on the CPU: queued work runs late, in any legal order.

Nothing runs before it must, or it runs by chance: after each call some streams go on by some steps,
drawn from a seed. So a copy that nobody waited for has not happened when its target is read, or has
happened when its source is still to be read; a test that tries some seeds sees both.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]


class StreamFamily:
    """All streams of one memory. ``seed`` None: everything runs when it is queued."""

    def __init__(self, seed: int | None = None) -> None:
        self.lock = threading.RLock()
        self.streams: list[HostStream] = []
        self._draws = None if seed is None else random.Random(seed)

    @property
    def eager(self) -> bool:
        """Whether nothing is ever late."""
        return self._draws is None

    def stir(self) -> None:
        """Let some streams go on a little; all of them to the end without a seed."""
        if self._draws is None:
            for stream in self.streams:
                stream.run_to(stream.queued)
        elif self._draws.random() < 0.5:
            stream = self._draws.choice(self.streams)
            stream.run_to(min(stream.queued, stream.finished + self._draws.randint(1, 3)))


class HostStream:
    """A queue of work, carried out in order; work may run other streams up to an event."""

    def __init__(self, family: StreamFamily) -> None:
        self.family = family
        self.queued = self.finished = 0
        self._work: deque[Work] = deque()
        family.streams.append(self)

    def add(self, work: Work) -> None:
        """Queue work, which runs now, later, or when another stream waits for it."""
        with self.family.lock:
            self._work.append(work)
            self.queued += 1
            self.family.stir()

    def run_to(self, position: int) -> None:
        """Run the work queued up to ``position``."""
        with self.family.lock:
            while self.finished < position:
                work = self._work.popleft()
                self.finished += 1  # what fails is over as well
                work()


class HostEvent:
    """A place in a stream; see :class:`~baton.engine.kernels.cuda.device.Event`."""

    def __init__(self, stream: HostStream) -> None:
        self.stream, self.position = stream, stream.queued

    @property
    def done(self) -> bool:
        """Whether the stream has come to it; time passes with the question."""
        with self.stream.family.lock:
            self.stream.family.stir()
            return self.stream.finished >= self.position

    def wait(self) -> None:
        """Run the stream up to it."""
        self.stream.run_to(self.position)
