"""What text and embedding workers share: requests that routers assign.

Invariants: every Assign is answered; an attempt that ended or was aborted here never runs again; a
higher attempt of a request replaces lower ones. Pure.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

from baton.proto.errors import BatonError
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Assign,
    Busy,
    Message,
    Terminal,
)
from baton.runtime.tables import ExpiringMap
from baton.worker.attempts import Key
from baton.worker.base_core import ATTEMPTS_KEPT, FORGOTTEN, TOMBSTONE_S, WorkerCore
from baton.worker.events import ToRouter
from baton.worker.jobs import Job, Jobs
from baton.worker.membership import Membership, moved_to

BUSY_RETRY_S = 0.2
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


class AssignCore(WorkerCore, Generic[J]):
    """Base of the text and the embedding core of a prefill worker.

    ``max_queue``: number of waiting requests at which an Assign is answered Busy.
    """

    def __init__(self, member: Membership, queue: JobQueue[J], max_queue: int) -> None:
        super().__init__(member, queue)
        self._backlog = queue
        self._max_queue = max_queue
        self._ended = EndedAttempts()

    # ------------------------------------------------------------------ of the kind of model

    @abstractmethod
    def _make_job(self, router: str, message: Assign, now: float) -> J:
        """Return the job. Raises BatonError or ValueError if the context cannot be run."""

    @abstractmethod
    def _begin_job(self, job: J, now: float) -> list[Any]:
        """Queue a new job, or end it at once."""

    @abstractmethod
    def _stop(self, job: J, now: float) -> list[Any]:
        """Remove a job without a message to its router."""

    # ------------------------------------------------------------------ messages of routers

    def _assigned(self, router: str, message: Message, now: float) -> list[Any]:
        return self._assign(router, message, now) if isinstance(message, Assign) else []

    def _assign(self, router: str, message: Assign, now: float) -> list[Any]:
        request, attempt = key = (message.request, message.attempt)
        accepted = ToRouter(router, Accepted(request=request, attempt=attempt))
        job = self._jobs.get(key)
        if job is not None:
            moved = moved_to(router, job.router, request)
            self._jobs.hand_to(router, job)
            return [*moved, accepted]
        if self._member.has_ended(*key):
            return [accepted]
        if self._ended.holds(key, now):
            # A router that lost its state would otherwise wait for this attempt.
            return [ToRouter(router, Aborted(request=request, attempt=attempt))]
        actions = self._drop_lower(router, key, now)
        if self._member.draining or self._backlog.waiting >= self._max_queue:
            reason = "draining" if self._member.draining else "queue full"
            busy = Busy(request=request, attempt=attempt, reason=reason, retry_after=BUSY_RETRY_S)
            return [*actions, ToRouter(router, busy)]
        try:
            job = self._make_job(router, message, now)
        except (BatonError, ValueError) as error:
            refusal = _refusal(message, error)
            expires = now + message.deadline
            ended = self._member.end(router, refusal, now, expires, proof=message.proof)
            return [*actions, accepted, *ended]
        self._jobs.add(job)
        return [*actions, accepted, *self._begin_job(job, now)]

    def _drop_lower(self, router: str, key: Key, now: float) -> list[Any]:
        actions: list[Any] = []
        for job in self._jobs.of(key[0], key[1] - 1):
            actions += [*moved_to(router, job.router, key[0]), *self._stop(job, now)]
        self._member.forget(key[0], key[1] - 1)
        return actions

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


def _refusal(message: Assign, error: BatonError | ValueError) -> Terminal:
    """Return the terminal of a request whose context cannot be run."""
    return Terminal(
        request=message.request,
        attempt=message.attempt,
        code=error.code if isinstance(error, BatonError) else "input",
        message=str(error),
        request_id=message.request_id,
    )
