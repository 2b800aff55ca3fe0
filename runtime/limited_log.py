"""Warnings of what a peer can cause at will, so that it cannot fill the log."""

from __future__ import annotations

from .log import get_logger
from .log_limit import INTERVAL_S, LogLimit
from .loop import Loop

_log = get_logger()


class LimitedLog:
    """The first warning of an event passes; those of the next seconds become one with a count.

    On the loop's thread only. An exit of the process loses the last count.
    """

    def __init__(self, loop: Loop, interval_s: float = INTERVAL_S) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._limit = LogLimit(interval_s)
        self._waits = False  # a look at what is due is arranged

    def warning(self, event: str, **keys: object) -> None:
        """Log it now or count it for later."""
        if self._limit.passes(event, self._loop.now(), **keys):
            _log.warning(event, **keys)
        if not self._waits:
            self._waits = True
            self._loop.call_later(self._interval_s, self._look)

    def _look(self) -> None:
        lines = self._limit.due(self._loop.now())
        for event, keys in lines:
            _log.warning(event, **keys)
        self._waits = not self._limit.quiet
        if self._waits:
            self._loop.call_later(self._interval_s, self._look)
