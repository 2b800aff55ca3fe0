"""What text and embedding workers share: their queue, and the attempts that ended here.

Pure.
"""

from __future__ import annotations

from typing import Any, TypeVar

from baton.proto.wire.messages import Abort, Aborted
from baton.runtime.tables import ExpiringMap
from baton.worker.assign_core import AssignCore
from baton.worker.attempts import Key
from baton.worker.base_core import ATTEMPTS_KEPT, FORGOTTEN, TOMBSTONE_S
from baton.worker.events import ToRouter
from baton.worker.jobs import Job, Jobs
from baton.worker.membership import Membership

J = TypeVar("J", bound=Job)


class EndedAttempts:
    """Attempts that a late Assign must not start again; each entry expires."""

    def __init__(self) -> None:
        self._ended: ExpiringMap[Key, bool] = ExpiringMap(ATTEMPTS_KEPT)
        # Attempts up to this number.
        self._aborted: ExpiringMap[bytes, int] = ExpiringMap(ATTEMPTS_KEPT)

    def __len__(self) -> int:
        return len(self._ended) + len(self._aborted)

    def end(self, key: Key, until: float) -> None:
        """Note an attempt that was handed over or ended here."""
        self._ended.put(key, True, until)  # noqa: FBT003

    def abort(self, request: bytes, attempt: int, now: float) -> None:
        """Note that a request's attempts up to ``attempt`` are aborted."""
        if attempt >= (self._aborted.get(request, now) or 0):
            self._aborted.put(request, attempt, now + TOMBSTONE_S)

    def holds(self, key: Key, now: float) -> bool:
        """Whether the attempt ended or was aborted."""
        return bool(self._ended.get(key, now)) or key[1] <= (self._aborted.get(key[0], now) or 0)

    def expire(self, now: float) -> None:
        """Remove expired entries."""
        self._ended.expire(now)
        self._aborted.expire(now)

    @property
    def evicted(self) -> int:
        """Number of entries that were lost before their time, because too many ended."""
        return self._ended.evicted + self._aborted.evicted


class JobQueue(Jobs[J]):
    """The jobs of one worker, some of which wait; ``waiting_tokens``: length of those."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self.waiting_tokens = 0


class PromptCore(AssignCore[J]):
    """Base of the text and the embedding core of a prefill worker."""

    def __init__(self, member: Membership, queue: JobQueue[J], max_queue: int) -> None:
        super().__init__(member, queue, max_queue)
        self._backlog = queue
        self._ended = EndedAttempts()

    @property
    def _waiting(self) -> int:
        return self._backlog.waiting

    def _is_over(self, key: Key, now: float) -> bool:
        return self._ended.holds(key, now)

    def _abort_jobs(self, jobs: list[J], router: str, message: Abort, now: float) -> list[Any]:
        request, attempt = message.request, message.attempt
        actions: list[Any] = []
        for job in jobs:
            actions += self._stop(job, now)
        self._member.forget(request, attempt, router)
        self._ended.abort(request, attempt, now)
        actions += self._freed((request, attempt), now, self._running(jobs))
        answer = Aborted(request=request, attempt=attempt)
        return [*actions, ToRouter(router, answer), *self._maybe_drained()]

    def _expire_ended(self, now: float) -> list[Any]:
        """Remove expired entries of ended attempts, and report those lost before."""
        self._ended.expire(now)
        if self._ended.evicted:
            self.dropped[FORGOTTEN] = self._ended.evicted
        return []

    @property
    def remembered(self) -> int:
        """Number of entries kept about ended requests; each entry expires."""
        return len(self._ended) + self._member.unacknowledged
