"""When a child that ended is started again, and when that is pointless.

Pure: exits and the clock come in as arguments. Knows nothing of processes. The invariant:
within any :attr:`RestartLimits.window` seconds no child is started more than
:attr:`RestartLimits.restarts` times again.
"""

from __future__ import annotations

from collections import deque

import msgspec


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How patient the supervisor is; durations in seconds."""

    restarts: int = 5
    window: float = 60.0
    first_delay: float = 0.5
    max_delay: float = 30.0


class RestartPolicy:
    """The restarts of one child: exponential back-off, then giving up."""

    def __init__(self, limits: RestartLimits | None = None) -> None:
        self.limits = limits or RestartLimits()
        self._exits: deque[float] = deque()

    def delay(self, now: float) -> float | None:
        """Record an exit at ``now`` (seconds) and return the wait before the next start.

        ``None`` means: too many exits in the window, do not start it again.
        """
        while self._exits and now - self._exits[0] > self.limits.window:
            self._exits.popleft()
        self._exits.append(now)
        recent = len(self._exits)
        if recent > self.limits.restarts:
            return None
        return min(self.limits.first_delay * 2.0 ** (recent - 1), self.limits.max_delay)
