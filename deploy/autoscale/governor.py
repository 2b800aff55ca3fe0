"""When a pool's target follows what is needed: at once upwards, after a calm time downwards."""

from __future__ import annotations

import math
from collections import deque

MOST_PATIENCE = 8
"""Times the calm time that a pool waits which had to grow again soon after it shrank."""


class Governor:
    """One pool's target, from ``least`` to ``most``; ``calm_s`` in seconds.

    Invariants: the target lies within the bounds; it falls only to a number that sufficed at
    every moment of the last calm time, and only so long after it last rose. When growth follows
    within ``calm_s`` of a fall, that fall was a mistake, and the next one waits twice as long.
    So in the long run it changes direction at most once per calm time.
    """

    def __init__(self, least: int, most: int, calm_s: float, target: int) -> None:
        self._least, self._most = least, most
        self._calm = self._patience = calm_s
        self._wanted: deque[tuple[float, int]] = deque()  # falling numbers: maxima of what follows
        self._since: float | None = None  # start of the unbroken record
        self._rose_at = self._fell_at = -math.inf
        self.target = self._bounded(target)

    def adopt(self, target: int, now: float) -> None:
        """An operator chose; it falls no further for the calm time."""
        self.target = self._bounded(target)
        self._rose_at = now
        self.hold()

    def hold(self) -> None:
        """Nothing is known at the moment: the calm time begins anew."""
        self._wanted.clear()
        self._since = None

    def want(self, up: int, down: int, now: float) -> int:
        """The new target; ``up``: too few below this, ``down``: enough with this, for sure."""
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
        if self._fell_at > self._rose_at:  # else it only goes on rising
            early = now - self._fell_at < self._calm
            longer = min(2 * self._patience, MOST_PATIENCE * self._calm)
            self._patience = longer if early else self._calm
        self.target, self._rose_at = target, now

    def _bounded(self, target: int) -> int:
        return min(max(target, self._least), self._most)
