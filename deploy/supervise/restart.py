"""Delays before a process that ended is restarted.

Pure, without processes or clocks. The number of restarts is not limited. The delays grow, so that
a crash loop costs little. Other modules decide whether an end is final.
"""

from __future__ import annotations

import msgspec

_MOST_DOUBLINGS = 32


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations in seconds."""

    first_delay: float = 0.5
    max_delay: float = 60.0
    """Maximum delay after a run in which the process never served."""
    max_delay_served: float = 5.0
    """Maximum delay after a run in which the process served. The next run probably serves too, so
    a long delay would cost more than a start."""
    stable: float = 60.0
    """After serving for this time, the count of ends in a row restarts."""


class RestartPolicy:
    """The restart delays of one process, which double with each end of the same kind.

    Ends after serving and ends while starting count separately: a worker that is killed twice
    while it loads, after it served and crashed five times, starts again after 1 s and not 32 s.
    ``ends``: number of ends of both kinds in a row, without a stable run in between.
    """

    def __init__(self, limits: RestartLimits | None = None) -> None:
        self.limits = limits or RestartLimits()
        self.ends = 0
        self._starts = 0  # ends in a row before the process served
        self._runs = 0  # ends after serving, without a stable run in between

    def delay(self, served: float | None) -> float:
        """Count an end and return the delay before the next start, in seconds.

        ``served``: seconds for which the ended process served; None if it never served.
        """
        limits = self.limits
        if served is None:
            self._starts += 1
            count, longest = self._starts, limits.max_delay
        else:
            self._starts = 0
            if served >= limits.stable:
                self.ends = self._runs = 0
            self._runs += 1
            count, longest = self._runs, limits.max_delay_served
        self.ends += 1
        return min(limits.first_delay * 2.0 ** min(count - 1, _MOST_DOUBLINGS), longest)
