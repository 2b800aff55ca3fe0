"""All requests of a router by key, their timers, and what is remembered of dropped ones.

Invariant: a request is in ``queued`` exactly while its state is QUEUED, and it has one timer from
its admission until it is removed.
"""

from __future__ import annotations

from .recent import Recent
from .requests import Request
from .timer_wheel import TimerWheel
from .tombstones import Tombstones

REMEMBER_ATTEMPTS = 16_384
"""Number of dropped requests whose last attempt number is remembered."""


class RequestTable:
    """The records of all requests.

    ``cancelled``: requests that were cancelled before their Submit arrived.
    """

    def __init__(self) -> None:
        self.requests: dict[bytes, Request] = {}
        self.queued: dict[bytes, Request] = {}
        self.timers: TimerWheel[Request] = TimerWheel()
        self.cancelled = Tombstones()
        self._last_attempts: Recent[bytes, int] = Recent(REMEMBER_ATTEMPTS)

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
        return self._last_attempts.get(key, 0)

    def wake(self, request: Request, when: float, now: float) -> None:
        """Wake the request at ``when``, or at its limit if that is earlier."""
        request.retry_at = when
        self.timers.arm(request, when if when < request.limit else request.limit, now)

    def repeat_later(self, request: Request, now: float, ceiling: float) -> None:
        """Wake the request after its back-off, which doubles up to ``ceiling`` seconds."""
        delay = request.backoff
        if delay < ceiling:
            request.backoff = min(2 * delay, ceiling)
        request.retry_at = when = now + delay
        self.timers.arm(request, when if when < request.limit else request.limit, now)
