"""The operator's terminal, written by a background thread, so that printing never blocks.

Invariant: :meth:`Terminal.__call__` never blocks. If the output is blocked (a stopped terminal, a
full pipe), the supervisor still reads its children's logs. At most ``max_waiting`` lines wait;
further lines are dropped, and their number is printed after the output continues.

A drawn line, such as a progress bar, has no line end: the next line replaces it.
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
"""Maximum lines waiting for a blocked output."""


_ERASE = "\r\x1b[K"
"""Return to the beginning of the line and erase it."""


class Line(NamedTuple):
    """A line to print. ``drawn``: the next line replaces it."""

    text: str
    drawn: bool = False


class Terminal:
    """Takes lines from one thread and writes them to standard output from another."""

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
        """Show ``line`` soon until the next line, or drop it. Only if :meth:`draws` is true."""
        self._put(Line(line, drawn=True))

    def draws(self) -> bool:
        """Whether standard output is a terminal that can erase a line."""
        try:
            return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        except (AttributeError, ValueError):  # standard output is missing or closed
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
        """Wait until all lines are printed, at most ``timeout`` seconds."""
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
    """Return the width of the terminal. A longer line would wrap and could not be erased."""
    return max(1, shutil.get_terminal_size().columns - 1)


def write_out(text: str) -> None:
    """Write to standard output. Ignore errors: a closed output must not end the cluster.

    Bypass the stream's buffer, because a thread blocked in it would prevent the process's exit.
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
