"""The operator's terminal: lines are printed at once, and nobody waits for a reader.

Invariant: :meth:`Terminal.__call__` never blocks, so a supervisor whose output stands still
(a stopped terminal, a full pipe) goes on to read its children's logs. Lines beyond those that
wait are dropped, and their number is printed when the output moves again.

A line that is drawn, such as a progress bar, has no end: the next one takes its place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections import deque
from typing import NamedTuple

MAX_WAITING = 1000
"""Lines kept for an output that stands still."""


_ERASE = "\r\x1b[K"
"""Back to the beginning of the line, and nothing is in it any more."""


class Line(NamedTuple):
    """What is to be shown. ``drawn``: until the next one takes its place."""

    text: str
    drawn: bool = False


class Terminal:
    """Takes lines from one thread; another one writes them to standard output."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._lines: deque[Line] = deque()
        self._changed = threading.Condition()
        self._dropped = 0
        self._writing = False
        self._thread: threading.Thread | None = None

    def __call__(self, line: str) -> None:
        """Print ``line`` soon, or drop it."""
        self._put(Line(line))

    def draw(self, line: str) -> None:
        """Show ``line`` soon, until the next one, or drop it; only where :meth:`draws` is true."""
        self._put(Line(line, drawn=True))

    def draws(self) -> bool:
        """Whether standard output is a terminal that can draw over a line."""
        try:
            return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        except (AttributeError, ValueError):  # there is none, or it is closed
            return False

    def _put(self, line: Line) -> None:
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
        drawn = False
        while True:
            line = self._next()
            text = line.text[: _columns()] if line.drawn else f"{line.text}\n"
            write_out(_ERASE + text if drawn else text)
            drawn = line.drawn

    def _next(self) -> Line:
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            while not self._lines:
                self._changed.wait()
            self._writing = True
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                self._lines.append(Line(f"({dropped} lines were not printed)"))
            return self._lines.popleft()


def _columns() -> int:
    """Characters that fit in one line of the terminal: a longer one could not be drawn over."""
    return max(1, shutil.get_terminal_size().columns - 1)


def write_out(text: str) -> None:
    """Write to standard output; a closed one must not end the cluster.

    Past the stream's buffer: a thread that stands inside it would keep the process from ending.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        try:
            fd = sys.stdout.fileno()
        except (OSError, ValueError):
            sys.stdout.write(text)
            return
        data = text.encode(sys.stdout.encoding or "utf-8", "replace")
        while data:
            data = data[os.write(fd, data) :]


terminal = Terminal()
"""This process's terminal."""
