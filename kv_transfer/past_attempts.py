"""What a decode worker remembers of attempts, to answer late and repeated messages."""

from __future__ import annotations

from baton.proto.wire.messages import Committed
from baton.runtime.tables import ExpiringMap


class PastAttempts:
    """Aborted, superseded and committed attempts; every entry expires.

    ``committed``: the answer to Commit and the key that sent it, by request and attempt.
    ``capacity``: of each table.
    """

    def __init__(self, capacity: int) -> None:
        self._highest: ExpiringMap[bytes, int] = ExpiringMap(capacity)  # highest attempt
        self._aborted: ExpiringMap[bytes, int] = ExpiringMap(capacity)  # aborted up to this attempt
        self.committed: ExpiringMap[tuple[bytes, int], tuple[Committed, bytes]] = ExpiringMap(
            capacity
        )

    def reserved(self, request: bytes, attempt: int, until: float) -> None:
        """Note a grant: lower attempts of the request are over."""
        if attempt > 1:  # else there are none
            self._highest.put(request, attempt, until)

    @property
    def evicted(self) -> int:
        """Number of entries that were lost before their time, because too many came."""
        return self._aborted.evicted + self.committed.evicted + self._highest.evicted

    def abort(self, request: bytes, attempt: int, now: float, keep: float) -> None:
        """Refuse attempts up to ``attempt`` for ``keep`` seconds."""
        if attempt >= (self._aborted.get(request, now) or 0):
            self._aborted.put(request, attempt, now + keep)

    def is_past(self, request: bytes, attempt: int, now: float) -> bool:
        """True if the attempt is aborted or superseded."""
        aborted = self._aborted.get(request, now) or 0
        return attempt <= aborted or attempt < (self._highest.get(request, now) or 0)

    def expire(self, now: float) -> None:
        """Remove expired entries."""
        for table in (self._aborted, self.committed, self._highest):
            table.expire(now)

    def __len__(self) -> int:
        return len(self._aborted) + len(self.committed) + len(self._highest)
