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
    """The restart delays of one process, which double with each end.

    ``ends``: number of ends in a row, without a stable run in between.
    """

    def __init__(self, limits: RestartLimits | None = None) -> None:
        self.limits = limits or RestartLimits()
        self.ends = 0

    def delay(self, served: float | None) -> float:
        """Count an end and return the delay before the next start, in seconds.

        ``served``: seconds for which the ended process served; None if it never served.
        """
        limits = self.limits
        if served is not None and served >= limits.stable:
            self.ends = 0
        self.ends += 1
        longest = limits.max_delay if served is None else limits.max_delay_served
        return min(limits.first_delay * 2.0 ** min(self.ends - 1, _MOST_DOUBLINGS), longest)
