"""What all cores that take requests from routers share: the answers to Assign.

Invariants: every Assign is answered; an attempt that ended or was aborted here never runs again; a
higher attempt of a request replaces lower ones. Pure.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

from baton.proto.errors import BatonError, InternalError
from baton.proto.wire.messages import Aborted, Accepted, Assign, Busy, Message, Terminal

from .attempts import Key
from .base_core import WorkerCore
from .events import ToRouter
from .jobs import Job, Jobs
from .membership import Membership, moved_to

BUSY_RETRY_S = 0.2
J = TypeVar("J", bound=Job)


class AssignCore(WorkerCore, Generic[J]):
    """Base of the cores that take requests from routers.

    ``max_queue``: number of waiting requests at which an Assign is answered Busy.
    """

    def __init__(self, member: Membership, jobs: Jobs[J], max_queue: int) -> None:
        super().__init__(member, jobs)
        self._max_queue = max_queue

    # ------------------------------------------------------------------ of the role

    @property
    @abstractmethod
    def _waiting(self) -> int:
        """Number of requests whose computation has not begun."""

    @abstractmethod
    def _is_over(self, key: Key, now: float) -> bool:
        """Whether the attempt ended or was aborted here."""

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
        if self._is_over(key, now):
            # A router that lost its state would otherwise wait for this attempt.
            return [ToRouter(router, Aborted(request=request, attempt=attempt))]
        actions = self._drop_lower(router, key, now)
        if self._member.draining or self._waiting >= self._max_queue:
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

    def _checked(self, key: Key, result: object) -> tuple[list[Any], BatonError | None]:
        """Return the report of an own error and the error that ends the request, if any.

        ``result``: of compiling the request's grammar, or of checking its images.
        """
        if not isinstance(result, Exception) or isinstance(result, BatonError):
            return [], result if isinstance(result, BatonError) else None
        text = "the images could not be checked; the worker's log has the cause"
        return [self.errors.of(key, result, "checking images")], InternalError(text)


def _refusal(message: Assign, error: BatonError | ValueError) -> Terminal:
    """Return the terminal of a request whose context cannot be run."""
    return Terminal(
        request=message.request,
        attempt=message.attempt,
        code=error.code if isinstance(error, BatonError) else "input",
        message=str(error),
        request_id=message.request_id,
    )
