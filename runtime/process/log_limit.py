"""Rate limit for log lines that a peer can cause at will; suppressed lines are counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..net.loop import Loop, Periodic
from .log import get_logger

INTERVAL_S = 10.0
"""Seconds between two lines of the same event."""


@dataclass(slots=True)
class _Event:
    until: float
    passed: int = 1
    count: int = 0
    keys: dict[str, object] = field(default_factory=dict)


class LogLimit:
    """Passes the first lines of an event (``burst``), then one summary per interval. Pure.

    ``now`` is in seconds of the same clock in all calls. Every occurrence is counted in exactly one
    line, provided :meth:`due` is called after its interval.
    """

    def __init__(self, interval_s: float = INTERVAL_S, burst: int = 1) -> None:
        self._interval_s = interval_s
        self._burst = burst
        self._events: dict[tuple[str, str], _Event] = {}

    def passes(self, event: str, now: float, of: str = "", /, **keys: object) -> bool:
        """Whether to log this occurrence now; otherwise a later :meth:`due` line counts it.

        ``of``: what the event is about, if each such thing has lines of its own. Peers must not
        choose it.
        """
        known = self._events.get((event, of))
        if known is None:
            self._events[event, of] = _Event(now + self._interval_s)
            return True
        if known.passed < self._burst:
            known.passed += 1
            return True
        known.count += 1
        known.keys = keys
        return False

    @property
    def quiet(self) -> bool:
        """Whether :meth:`due` need not be called before the next event."""
        return not self._events

    def due(self, now: float) -> list[tuple[str, dict[str, object]]]:
        """Return the summary lines that are due: event, latest keys, and ``count``."""
        lines: list[tuple[str, dict[str, object]]] = []
        for key, event in list(self._events.items()):
            if now < event.until:
                continue
            if not event.count:
                del self._events[key]
                continue
            lines.append((key[0], {**event.keys, "count": event.count}))
            self._events[key] = _Event(now + self._interval_s)
        return lines


_log = get_logger()


class LimitedLog:
    """Logs the first warning of an event, then one warning with a count per interval.

    Only on the loop's thread. The last count is lost when the process exits.
    """

    def __init__(self, loop: Loop, interval_s: float = INTERVAL_S) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._limit = LogLimit(interval_s)
        self._looks: Periodic | None = None  # while an event is counted

    def warning(self, event: str, **keys: object) -> None:
        """Log the event now, or count it for the next line."""
        if self._limit.passes(event, self._loop.now(), **keys):
            _log.warning(event, **keys)
        if self._looks is None:
            self._looks = self._loop.every(self._interval_s, self._look)

    def _look(self) -> None:
        for event, keys in self._limit.due(self._loop.now()):
            _log.warning(event, **keys)
        if self._limit.quiet and self._looks is not None:
            self._looks.cancel()
            self._looks = None
