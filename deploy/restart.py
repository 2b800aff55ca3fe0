"""How long to wait before a process that ended is started again.

Pure: knows nothing of processes or clocks. A process is started again however often it ends; the
waits grow, so that a crash loop costs little. Whether an end is final is decided elsewhere.
"""

from __future__ import annotations

import msgspec

_MOST_DOUBLINGS = 32


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations in seconds."""

    first_delay: float = 0.5
    max_delay: float = 60.0
    """Longest wait after a life in which the process never served."""
    max_delay_served: float = 5.0
    """Longest wait after a life in which it served: the next start probably serves as well, so a
    long wait would cost more than the start."""
    stable: float = 60.0
    """A life that served for so long ends the series of ends before it."""


class RestartPolicy:
    """The waits of one process: they double from end to end.

    ``ends``: how often it ended in a row, with no stable life in between.
    """

    def __init__(self, limits: RestartLimits | None = None) -> None:
        self.limits = limits or RestartLimits()
        self.ends = 0

    def delay(self, served: float | None) -> float:
        """Count an end and return the wait before the next start, in seconds.

        ``served``: for how long the life that ended was serving; None if it never was.
        """
        limits = self.limits
        if served is not None and served >= limits.stable:
            self.ends = 0
        self.ends += 1
        longest = limits.max_delay if served is None else limits.max_delay_served
        return min(limits.first_delay * 2.0 ** min(self.ends - 1, _MOST_DOUBLINGS), longest)
