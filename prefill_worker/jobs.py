"""The jobs of a prefill worker: found by name, in the order they begin, by deadline.

Invariants: a queued job is in exactly one place: ready, waiting for a time, or parked for news
(of a link or its grammar); a job in any other state holds one execution slot; sums and indexes
fit the jobs. The cost of an event does not grow with the jobs that have nothing to do with it.
Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from ..kv_transfer.sender import Key
from ..proto.errors import InternalError
from ..runtime.agenda import Agenda
from ..runtime.attempts import Attempts
from ..runtime.shares import Shares
from .job import Job, JobState
from .start_order import StartOrder

RESERVING_S = 0.05
"""How long a job that waits for blocks counts as work to come; then others go on."""


class Jobs:
    """All jobs of one worker.

    ``start_by``: the last moment at which a job can begin and be in time (:mod:`.start_order`);
    None: jobs begin in the order of their coming.
    """

    def __init__(self, start_by: Callable[[Job], float] | None = None) -> None:
        self._jobs: Attempts[Job] = Attempts()
        self._by_sequence: dict[bytes, Job] = {}
        self._deadlines: Agenda[Key] = Agenda()
        self._ready: StartOrder[Key] = StartOrder(
            None if start_by is None else lambda key: start_by(self._jobs[key])
        )
        self._later: Agenda[Key] = Agenda()  # by the time they may try again
        self._parked: dict[str, dict[Key, None]] = {}  # by the news they wait for
        self._wanted: Counter[str] = Counter()  # jobs per decode endpoint
        self._arrivals = 0
        self._holding: dict[Key, Job] = {}  # execution slots
        self.waiting = 0
        self.waiting_tokens = 0
        self.shares = Shares()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    # ------------------------------------------------------------------ finding

    def get(self, key: Key) -> Job | None:
        """The job of this attempt."""
        return self._jobs.get(key)

    def of(self, request: bytes, last: int) -> list[Job]:
        """A request's attempts up to ``last``."""
        return self._jobs.of(request, last)

    def newest(self, request: bytes) -> Job | None:
        """A request's highest attempt."""
        return self._jobs.newest(request)

    def of_sequence(self, sequence: bytes) -> Job | None:
        """The job the engine runs by this name."""
        return self._by_sequence.get(sequence)

    def wants(self, endpoint: str) -> bool:
        """Whether a job is to be handed over to ``endpoint``."""
        return self._wanted[endpoint] > 0

    def overdue(self, now: float) -> list[Job]:
        """Jobs whose deadline has passed; each is named once."""
        return [job for key in self._deadlines.due(now) if (job := self._jobs.get(key))]

    # ------------------------------------------------------------------ coming and going

    def add(self, job: Job) -> None:
        """A new job, not in the queue yet."""
        self._arrivals += 1
        job.arrival = self._arrivals
        self._jobs[job.key] = job
        self._by_sequence[job.sequence.request] = job
        self._deadlines.put(job.key, job.deadline)
        self._wanted[job.assign.decode] += 1
        self.shares.add(job.router, job.given_tokens)

    def remove(self, job: Job) -> None:
        """The job is over; harmless when it was removed before."""
        if self._jobs.pop(job.key, None) is None:
            return
        self._by_sequence.pop(job.sequence.request, None)
        self._deadlines.drop(job.key)
        self.shares.drop(job.router, job.given_tokens)
        endpoint = job.assign.decode
        self._wanted[endpoint] -= 1
        if not self._wanted[endpoint]:
            del self._wanted[endpoint]
        if job.state is JobState.QUEUED:
            self._leave_queue(job)
        else:
            self._holding.pop(job.key, None)

    def hand_to(self, router: str, job: Job) -> None:
        """The job is this router's from now on."""
        self.shares.drop(job.router, job.given_tokens)
        job.router = router
        self.shares.add(router, job.given_tokens)

    # ------------------------------------------------------------------ queue and slots

    def queue(self, job: Job, not_before: float = 0.0) -> None:
        """Wait for a slot; a job that held one gives it back and keeps its place."""
        if job.state is not JobState.QUEUED:
            del self._holding[job.key]
            job.state = JobState.QUEUED
        self.waiting += 1
        self.waiting_tokens += job.sequence.num_tokens
        job.waits = True
        self._wait(job, not_before)

    def _wait(self, job: Job, not_before: float) -> None:
        if not_before > 0.0:
            self._later.put(job.key, not_before)
        else:
            self._ready.put(job.key, job.arrival)

    def next(self, now: float) -> Job | None:
        """Take the queued job whose turn it is; :meth:`start`, :meth:`park` or end it."""
        for key in self._later.due(now):
            self._ready.put(key, self._jobs[key].arrival)
        key_ = self._ready.pop(now)
        return None if key_ is None else self._jobs[key_]

    def park(self, job: Job, place: str) -> None:
        """Wait for news: of the link to an endpoint, or of what else ``place`` names."""
        job.place = place
        self._parked.setdefault(place, {})[job.key] = None

    def wake(self, place: str) -> None:
        """There is news of this."""
        for key in self._parked.pop(place, ()):
            self._ready.put(key, self._jobs[key].arrival)

    def start(self, job: Job, now: float) -> None:
        """Give a slot to a job that was next."""
        self._leave_queue(job)
        job.state = JobState.RESERVING
        job.started = now
        self._holding[job.key] = job

    @property
    def active(self) -> int:
        """Execution slots taken."""
        return len(self._holding)

    def tokens_ahead(self, now: float) -> int:
        """Prompt tokens that jobs with a slot leave to compute, now or soon."""
        tokens = 0
        for job in self._holding.values():
            computing = job.state is JobState.COMPUTING
            if computing or (job.state is JobState.RESERVING and now - job.started < RESERVING_S):
                tokens += job.sequence.num_tokens - job.sequence.num_computed_tokens
        return tokens

    def _leave_queue(self, job: Job) -> None:
        if not job.waits:
            return
        job.waits = False
        self.waiting -= 1
        self.waiting_tokens -= job.sequence.num_tokens
        self._ready.drop(job.key)
        self._later.drop(job.key)
        parked = self._parked.get(job.place)
        if parked is not None:
            parked.pop(job.key, None)
            if not parked:
                del self._parked[job.place]

    # ------------------------------------------------------------------ integrity

    def check_integrity(self) -> None:
        """Raise InternalError unless sums and indexes fit the jobs."""
        jobs = list(self)
        active = {job.key for job in jobs if job.state is not JobState.QUEUED}
        if active != self._holding.keys():
            raise InternalError(f"{self.active} slots are taken, {len(active)} jobs hold one")
        shares = Shares()
        for job in jobs:
            shares.add(job.router, job.given_tokens)
        if shares.report() != self.shares.report():
            raise InternalError("what each router has here is miscounted")
        if {job.sequence.request for job in jobs} != set(self._by_sequence):
            raise InternalError("a sequence has no job or a job no sequence")
        if Counter(job.assign.decode for job in jobs) != self._wanted:
            raise InternalError("the jobs per decode worker are miscounted")
        queued = [job for job in jobs if job.waits]
        sums = len(queued), sum(job.sequence.num_tokens for job in queued)
        if sums != (self.waiting, self.waiting_tokens):
            raise InternalError(f"{sums} wait, not {(self.waiting, self.waiting_tokens)}")
        places = sum(len(parked) for parked in self._parked.values())
        if len(self._ready) + len(self._later) + places != len(queued):
            raise InternalError("a queued job is in no place or in two")

    @property
    def sequences(self) -> set[bytes]:
        """Engine's names of all jobs."""
        return set(self._by_sequence)
