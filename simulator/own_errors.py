"""An exception of Baton's own code, planted at one line of a core.

A :class:`Planted` is raised when a core reaches the n-th line of its code after some time, wherever
that is: in a handler, in the timer of one request, between two assignments. Only the code that
handles such exceptions is spared, and each is raised once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from baton import decode_worker, kv_transfer, prefill_worker, router, worker

FOLDERS = tuple(
    f"{package.__path__[0]}/"
    for package in (router, worker, prefill_worker, decode_worker, kv_transfer)
)
"""The code of the cores."""
SPARED_FILES = ("own_errors.py", "repair.py", "integrity.py", "events.py", "config.py")
SPARED = frozenset({
    "handle", "_mend", "_failed", "_harm", "_end_jobless", "_each", "_outputs", "_key_of",
    "check_integrity",
})  # fmt: skip
"""Functions that handle exceptions; their callees are not spared."""
Tracer = Callable[[FrameType, str, Any], Any]


class Planted(Exception):
    """Stands for any exception of our own code."""


class Plant:
    """Raises one exception after ``lines`` lines of the cores' code.

    ``names``: only in events, or messages, with these names; empty: in all.
    """

    def __init__(self, lines: int, names: frozenset[str] = frozenset()) -> None:
        self._names = names
        self.where = ""
        self._left = lines

    def concerns(self, event: object) -> bool:
        """Return whether lines count that handle this event."""
        said = getattr(event, "message", event)
        return not self._names or type(said).__name__ in self._names

    def run(self, call: Callable[[], list[Any]]) -> list[Any]:
        """Return what ``call`` returns, and raise within it once the line is reached."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Tracer | None:
        code = frame.f_code
        if self.where or not code.co_filename.startswith(FOLDERS):
            return None
        if code.co_name in SPARED or code.co_filename.endswith(SPARED_FILES):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, arg: object) -> Tracer | None:
        if self.where or event != "line":
            return self._line
        self._left -= 1
        if self._left <= 0:
            code = frame.f_code
            self.where = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
            raise Planted(self.where)
        return self._line
