"""Changes of a pool's target: up at once, down after the stabilization window."""

from __future__ import annotations

import math
from collections import deque

MOST_PATIENCE = 8
"""Maximum factor on the stabilization window of a pool that grew again soon after shrinking."""


class Governor:
    """One pool's target, from ``least`` to ``most``. ``calm_s``: stabilization window in seconds.

    Invariants: the target lies within the bounds. The target falls only to a number that was
    enough during the whole last window, and at the earliest one window after it last rose. If the
    target rises within ``calm_s`` of a fall, the fall was a mistake, and the window doubles for
    the next fall. So on average the target changes direction at most once per window.
    """

    def __init__(self, least: int, most: int, calm_s: float, target: int) -> None:
        self._least, self._most = least, most
        self._calm = self._patience = calm_s
        # Times and wanted numbers, in falling order: each is the maximum of all later numbers.
        self._wanted: deque[tuple[float, int]] = deque()
        self._since: float | None = None  # start of the record without gaps
        self._rose_at = self._fell_at = -math.inf
        self.target = self._bounded(target)

    def adopt(self, target: int, now: float) -> None:
        """Set an operator's target. It falls no further within the stabilization window."""
        self.target = self._bounded(target)
        self._rose_at = now
        self.hold()

    def hold(self) -> None:
        """Restart the stabilization window, because there is no usable observation now."""
        self._wanted.clear()
        self._since = None

    def want(self, up: int, down: int, now: float) -> int:
        """Update and return the target.

        ``up``: the pool must have at least this many workers. ``down``: this many workers are
        enough with a safety margin.
        """
        if self._since is None:
            self._since = now
        while self._wanted and self._wanted[-1][1] <= down:
            self._wanted.pop()
        self._wanted.append((now, down))
        while self._wanted[0][0] < now - self._patience:
            self._wanted.popleft()
        if self._bounded(up) > self.target:
            self._rise(self._bounded(up), now)
        elif now - max(self._since, self._rose_at) >= self._patience:
            lower = self._bounded(max(up, self._wanted[0][1]))
            if lower < self.target:
                self.target, self._fell_at = lower, now
        return self.target

    def _rise(self, target: int, now: float) -> None:
        if self._fell_at > self._rose_at:  # else the target has not fallen since it last rose
            early = now - self._fell_at < self._calm
            longer = min(2 * self._patience, MOST_PATIENCE * self._calm)
            self._patience = longer if early else self._calm
        self.target, self._rose_at = target, now

    def _bounded(self, target: int) -> int:
        return min(max(target, self._least), self._most)
