"""Rate limit for log lines that a peer can cause at will; suppressed lines are counted. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

INTERVAL_S = 10.0
"""Seconds between two lines of the same event."""


@dataclass(slots=True)
class _Event:
    until: float
    count: int = 0
    keys: dict[str, object] = field(default_factory=dict)


class LogLimit:
    """Passes the first line of an event, then one summary per interval.

    ``now`` is in seconds of the same clock in all calls. Every occurrence is counted in exactly one
    line, provided :meth:`due` is called after its interval.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._events: dict[str, _Event] = {}

    def passes(self, event: str, now: float, **keys: object) -> bool:
        """Whether to log this occurrence now; otherwise a later :meth:`due` line counts it."""
        known = self._events.get(event)
        if known is None:
            self._events[event] = _Event(now + self._interval_s)
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
        for name, event in list(self._events.items()):
            if now < event.until:
                continue
            if not event.count:
                del self._events[name]
                continue
            lines.append((name, {**event.keys, "count": event.count}))
            self._events[name] = _Event(now + self._interval_s)
        return lines
