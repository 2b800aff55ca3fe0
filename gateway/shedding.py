"""Refuses requests without asking the router, while the router refuses most of them.

A refused request costs the gateway and the router as much as a short answer: far above the
capacity, refusals would take the processor time that the answers need. The gateway passes on twice
as many requests as were not refused lately, at least :data:`FLOOR` per second, and refuses the rest
itself. So the router always has enough to choose from, and a cluster that has room again gets all
requests again within ten seconds (this is known as adaptive throttling).

Pure: time and random numbers come from outside.
"""

from __future__ import annotations

import math

WINDOW_S = 2.0
"""Older requests count for less than 1/e."""
RATIO = 2.0
"""Requests that are passed on for each one that is not refused."""
FLOOR = 50.0
"""Requests per second that are passed on in any case."""


class Shedding:
    """Counts of a gateway's requests. ``shed``: how many it refused itself."""

    def __init__(self) -> None:
        self.shed = 0
        self.retry_after = 1.0
        self._at = 0.0
        self._asked = self._accepted = 0.0

    def admits(self, now: float, draw: float) -> bool:
        """Whether to pass on a request. ``draw``: a random number from 0 to 1."""
        self._age(now)
        self._asked += 1
        beyond = self._asked - RATIO * self._accepted - FLOOR * WINDOW_S
        if beyond > draw * self._asked:
            self.shed += 1
            return False
        self._accepted += 1  # until it is refused
        return True

    def refused(self, retry_after: float | None) -> None:
        """Note that a request which was passed on was refused."""
        self._accepted = max(0.0, self._accepted - 1)
        self.retry_after = retry_after or 1.0

    def _age(self, now: float) -> None:
        if now > self._at:
            keep = math.exp((self._at - now) / WINDOW_S)
            self._asked *= keep
            self._accepted *= keep
            self._at = now
