"""The attempts that run on a worker: by key, by the engine's name, by deadline.

Invariant: each job has one name and one deadline; a job that was removed is in no index. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from baton.proto.errors import InternalError
from baton.proto.wire.messages import RequestState, TokenRun
from baton.runtime.tables import KeyedHeap

from .attempts import Attempts, Key


def engine_name(key: Key) -> bytes:
    """Name one attempt for the engine, so that two attempts never share writable blocks."""
    return key[0] + key[1].to_bytes(8, "little")


class Ending(TypedDict, total=False):
    """How a request ends: its final ``status``, or an error ``code`` with the error's message.

    ``media``, ``embedding``: the result of a request that did not ask for text.
    """

    status: str | None
    code: str | None
    message: str
    retry_after: float | None
    media: bytes | None
    embedding: npt.NDArray[np.float32] | None


class Job(Protocol):
    """One attempt of a request on this worker. ``router``: the owner of the request."""

    key: Key
    router: str
    deadline: float

    @property
    def name(self) -> bytes:
        """The engine's name for this attempt."""
        ...

    @property
    def proof(self) -> bytes:
        """Proof that a router assigned this attempt to this worker."""
        ...

    def held(self) -> RequestState:
        """Return the state that Hello reports to routers."""
        ...

    def replay(self, position: int) -> list[TokenRun]:
        """Return the tokens from ``position`` on; an empty run confirms ownership."""
        ...


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """All jobs of one worker."""

    def __init__(self) -> None:
        self._jobs: Attempts[J] = Attempts()
        self._by_name: dict[bytes, J] = {}
        self._deadlines: KeyedHeap[Key] = KeyedHeap()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[J]:
        return iter(self._jobs.values())

    def get(self, key: Key) -> J | None:
        """Return the job of this attempt, or None."""
        return self._jobs.get(key)

    def of(self, request: bytes, last: int) -> list[J]:
        """Return a request's attempts up to ``last``."""
        return self._jobs.of(request, last)

    def newest(self, request: bytes) -> J | None:
        """Return a request's highest attempt, or None."""
        return self._jobs.newest(request)

    def named(self, name: bytes) -> J | None:
        """Return the job that the engine runs under this name, or None."""
        return self._by_name.get(name)

    @property
    def names(self) -> set[bytes]:
        """The engine's names of all jobs."""
        return set(self._by_name)

    def overdue(self, now: float) -> list[J]:
        """Return jobs whose deadline has passed, each of them once."""
        return [job for key in self._deadlines.due(now) if (job := self._jobs.get(key))]

    def add(self, job: J) -> None:
        """Add a new job."""
        self._jobs[job.key] = job
        self._by_name[job.name] = job
        self._deadlines.put(job.key, job.deadline)

    def remove(self, job: J) -> None:
        """Remove a job that ended. Raises KeyError if it was removed before."""
        del self._jobs[job.key]
        del self._by_name[job.name]
        self._deadlines.drop(job.key)

    def hand_to(self, router: str, job: J) -> None:
        """Make ``router`` the owner of the job."""
        job.router = router

    def check_integrity(self) -> None:
        """Raise InternalError if the indexes do not match the jobs."""
        if {job.name for job in self} != self.names:
            raise InternalError("names and jobs do not match")
        if len(self._deadlines) != len(self._jobs):
            raise InternalError("deadlines and jobs differ in number")
