"""Where a benchmark keeps its files, and that none of them stay."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ENDS = (signal.SIGTERM, signal.SIGINT)


def leave_on_signals() -> None:
    """Let SIGTERM and SIGINT end this process by way of every ``finally``; main thread only."""
    for number in _ENDS:
        signal.signal(number, _leave)


def _leave(number: int, _frame: object) -> None:
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)  # a second one would cut the cleaning short
    sys.exit(128 + number)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, also when SIGTERM or Ctrl-C ends the benchmark."""
    leave_on_signals()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        yield Path(name)
