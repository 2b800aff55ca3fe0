"""The operator's terminal: lines are printed at once, and nobody waits for a reader.

Invariant: :meth:`Terminal.__call__` never blocks, so a supervisor whose output stands still
(a stopped terminal, a full pipe) goes on to read its children's logs. Lines beyond those that
wait are dropped, and their number is printed when the output moves again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque

MAX_WAITING = 1000
"""Lines kept for an output that stands still."""


class Terminal:
    """Takes lines from one thread; another one writes them to standard output."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._dropped = 0
        self._writing = False
        self._thread: threading.Thread | None = None

    def __call__(self, line: str) -> None:
        """Print ``line`` soon, or drop it."""
        with self._changed:
            if len(self._lines) >= self._max_waiting:
                self._dropped += 1
                return
            self._lines.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout: float = 1.0) -> None:
        """Wait until everything is printed, at most ``timeout`` seconds."""
        end = time.monotonic() + timeout
        with self._changed:
            while self._lines or self._writing:
                if not self._changed.wait(end - time.monotonic()) and time.monotonic() >= end:
                    return

    def _run(self) -> None:
        while True:
            write_out(self._next())

    def _next(self) -> str:
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            while not self._lines:
                self._changed.wait()
            self._writing = True
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                self._lines.append(f"({dropped} lines were not printed)")
            return self._lines.popleft()


def write_out(line: str) -> None:
    """Write a line to standard output; a closed one must not end the cluster.

    Past the stream's buffer: a thread that stands inside it would keep the process from ending.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        try:
            fd = sys.stdout.fileno()
        except (OSError, ValueError):
            sys.stdout.write(line + "\n")
            return
        data = line.encode(sys.stdout.encoding or "utf-8", "replace") + b"\n"
        while data:
            data = data[os.write(fd, data) :]


terminal = Terminal()
"""This process's terminal."""
