"""All requests of a router by key, their timers, and the last attempts of dropped requests.

Invariant: a request is in ``queued`` exactly while its state is QUEUED, and it has one timer from
its admission until it is removed.
"""

from __future__ import annotations

from baton.runtime.tables import ExpiringMap, RecentMap, TimerWheel

from .records import Request

REMEMBER_ATTEMPTS = 16_384
"""Minimum number of dropped requests whose last attempt number is remembered."""
CANCELLED_KEEP_S = 30.0
"""Seconds for which a request cancelled before its Submit arrived is remembered.

A late Submit must not start it. Longer than the delay of a message on an open connection."""
MAX_CANCELLED = 4096
"""Above this, the oldest is dropped and counted: a late Submit then wastes work that no client
reads."""


class RequestTable:
    """The records of all requests.

    ``cancelled``: requests that were cancelled before their Submit arrived.
    """

    def __init__(self) -> None:
        self.requests: dict[bytes, Request] = {}
        self.queued: dict[bytes, Request] = {}
        self.timers: TimerWheel[Request] = TimerWheel()
        self.cancelled: ExpiringMap[bytes, None] = ExpiringMap(MAX_CANCELLED)
        self._last_attempts: RecentMap[bytes, int] = RecentMap(REMEMBER_ATTEMPTS)

    def add(self, request: Request) -> None:
        """Add a new request."""
        self.requests[request.key] = request

    def remove(self, request: Request) -> None:
        """Remove an ended request, and remember its last attempt number."""
        self.timers.cancel(request)
        del self.requests[request.key]
        self._last_attempts.put(request.key, request.attempt.number)  # the highest attempt

    def remember_attempt(self, key: bytes, attempt: int) -> None:
        """Note that all attempts up to ``attempt`` of a request without a record are over."""
        self._last_attempts.put(key, max(attempt, self.last_attempt(key)))

    def last_attempt(self, key: bytes) -> int:
        """Return the last attempt number of a request dropped recently, else 0."""
        return self._last_attempts.get(key) or 0

    def remember_cancelled(self, key: bytes, now: float) -> None:
        """Note that a request was cancelled before its Submit arrived."""
        self.cancelled.expire(now)
        self.cancelled.put(key, None, now + CANCELLED_KEEP_S)

    def wake(self, request: Request, when: float, now: float) -> None:
        """Wake the request at ``when``, or at its limit if that is earlier."""
        request.retry_at = when
        self.timers.arm(request, when if when < request.limit else request.limit, now)

    def repeat_later(self, request: Request, now: float, ceiling: float) -> None:
        """Wake the request after its back-off, which doubles up to ``ceiling`` seconds."""
        delay = request.backoff
        if delay < ceiling:  # comparisons, since a call of min takes as long as all of this
            request.backoff = 2 * delay if 2 * delay < ceiling else ceiling
        request.retry_at = when = now + delay
        self.timers.arm(request, when if when < request.limit else request.limit, now)
