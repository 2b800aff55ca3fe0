"""Rate-limited warnings, for events that a peer can cause at will."""

from __future__ import annotations

from ..net.loop import Loop
from .log import get_logger
from .log_limit import INTERVAL_S, LogLimit

_log = get_logger()


class LimitedLog:
    """Logs the first warning of an event, then one warning with a count per interval.

    Only on the loop's thread. The last count is lost when the process exits.
    """

    def __init__(self, loop: Loop, interval_s: float = INTERVAL_S) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._limit = LogLimit(interval_s)
        self._waits = False  # whether _look is scheduled

    def warning(self, event: str, **keys: object) -> None:
        """Log the event now, or count it for the next line."""
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
