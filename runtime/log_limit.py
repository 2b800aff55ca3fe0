"""Log lines of what a peer can cause at will: a few, with the number of the others. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

INTERVAL_S = 10.0
"""The time between two lines of the same event."""


@dataclass(slots=True)
class _Event:
    until: float
    count: int = 0
    keys: dict[str, object] = field(default_factory=dict)


class LogLimit:
    """Lets the first line of an event pass and sums up those of the next seconds.

    ``now``: seconds of one clock, in all calls. Every occurrence is counted in exactly one line
    once :meth:`due` was called after its interval.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._events: dict[str, _Event] = {}

    def passes(self, event: str, now: float, **keys: object) -> bool:
        """Whether to log this occurrence now; otherwise it is part of a line of :meth:`due`."""
        known = self._events.get(event)
        if known is None:
            self._events[event] = _Event(now + self._interval_s)
            return True
        known.count += 1
        known.keys = keys
        return False

    @property
    def quiet(self) -> bool:
        """Whether :meth:`due` has nothing to do until the next event."""
        return not self._events

    def due(self, now: float) -> list[tuple[str, dict[str, object]]]:
        """Lines to log now: the event, how often it occurred meanwhile, and its latest keys."""
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
