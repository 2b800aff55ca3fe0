"""The jobs of a prefill worker: by name, by deadline, and in the order in which they start.

Invariants: a queued job is in exactly one place: ready, waiting for a time, or parked until an
event (its link opens, its grammar is compiled); a job in any other state holds one execution
slot; sums and indexes match the jobs. The cost of an event does not depend on the number of
unrelated jobs. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from baton.engine.cache.paged_cache import PagedCache
from baton.kv_transfer.sender_handoff import Key
from baton.proto.errors import InternalError
from baton.runtime.tables import KeyedHeap
from baton.worker.load_by_router import Shares
from baton.worker.start_order import Pace, RankedOrder, StartOrder, latest_start

from .assign_core import JobQueue
from .job import Job, JobState

RESERVING_S = 0.05
"""Seconds for which a reserving job counts as coming work; after that, other jobs may start."""
AHEAD = 0.05
"""A prompt gets a slot when the engine has less work left than this part of the TTFT target.

Once a prompt has a slot, no other prompt can overtake it, so slots are assigned late."""
AHEAD_S = 0.1
"""Upper limit of the same in seconds; long compared with the round trip of a reservation."""


class Urgency:
    """Start times for the TTFT target ``slo_ttft`` (seconds, above 0), given this cache."""

    def __init__(self, slo_ttft: float, cache: PagedCache) -> None:
        self.slo_ttft = slo_ttft
        self._ahead = min(AHEAD_S, AHEAD * slo_ttft)
        self._cache = cache
        self.pace = Pace()

    def start_by(self, job: Job) -> float:
        """Return the latest time, by this worker's clock, at which ``job`` can start in time."""
        if job.assign.emitted:
            return math.inf  # the client already has the first token: TTFT no longer applies
        own = self.seconds(job) + self._ahead
        return latest_start(job.asked, self.limit(job), own)

    def seconds(self, job: Job) -> float:
        """Return how long the prompt of a job takes, of which some tokens may be cached."""
        return (job.sequence.num_tokens - self.cached(job)) * self.pace.seconds_per_token

    def limit(self, job: Job) -> float:
        """Return the TTFT target of a job in seconds, which may be its own."""
        return job.assign.slo_ttft or self.slo_ttft

    def cached(self, job: Job) -> int:
        """Return how many leading tokens of the job are cached now."""
        sequence, size = job.sequence, self._cache.block_size
        most = (sequence.num_tokens - 1) // size
        return len(self._cache.match(sequence.extend_hashes(), most)) * size

    def is_met(self, tokens_ahead: int) -> bool:
        """True if the engine has enough work, so that prompts should stay in the queue."""
        return tokens_ahead * self.pace.seconds_per_token >= self._ahead


class Queue(JobQueue[Job]):
    """All jobs of one worker; at most ``slots`` of them have started and not ended.

    ``urgency``: start times for a TTFT target. None: jobs start in arrival order. ``order``: rank
    of a job at a time, in place of both; None: it has none, so that its arrival counts.
    """

    def __init__(
        self,
        slots: int,
        urgency: Urgency | None = None,
        order: Callable[[Job, float], float | None] | None = None,
    ) -> None:
        self._slots = slots
        self._urgency = urgency
        super().__init__()
        self._ready: StartOrder[Key] | RankedOrder[Key]
        if order is not None:
            self._ready = RankedOrder(lambda key, now: order(self._jobs[key], now))
        elif urgency is not None:
            self._ready = StartOrder(
                lambda key: urgency.start_by(self._jobs[key]),
                lambda key: urgency.seconds(self._jobs[key]),
            )
        else:
            self._ready = StartOrder()
        self._later: KeyedHeap[Key] = KeyedHeap()  # by the time of the next try
        self._parked: dict[str, dict[Key, None]] = {}  # by the event they wait for
        self._wanted: Counter[str] = Counter()  # jobs per link to a decode worker
        self._arrivals = 0
        self._holding: dict[Key, Job] = {}  # jobs with an execution slot
        self.shares = Shares()

    # ------------------------------------------------------------------ adding and removing

    def wants(self, endpoint: str) -> bool:
        """True if a job will be handed over to ``endpoint``."""
        return self._wanted[endpoint] > 0

    def add(self, job: Job) -> None:
        """Add a new job. The job is not queued yet."""
        super().add(job)
        self._arrivals += 1
        job.arrival = self._arrivals
        self._wanted[job.link] += 1
        self.shares.add(job.router, job.given_tokens)

    def remove(self, job: Job) -> None:
        """Remove a job that ended, and free its slot; a second call does nothing."""
        if self.get(job.key) is None:
            return
        super().remove(job)
        self.shares.drop(job.router, job.given_tokens)
        endpoint = job.link
        self._wanted[endpoint] -= 1
        if not self._wanted[endpoint]:
            del self._wanted[endpoint]
        if job.state is JobState.QUEUED:
            self._leave_queue(job)
        else:
            self._holding.pop(job.key, None)

    def hand_to(self, router: str, job: Job) -> None:
        """Make ``router`` the owner of the job."""
        self.shares.drop(job.router, job.given_tokens)
        super().hand_to(router, job)
        self.shares.add(router, job.given_tokens)

    # ------------------------------------------------------------------ queue and slots

    def queue(self, job: Job, not_before: float = 0.0) -> None:
        """Queue a job for a slot. A job that held a slot returns it and keeps its place."""
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
        """Return the next job for a free slot or None; the caller must start, park or end the job.

        With a TTFT target, jobs stay in the queue while the engine has enough work: only there
        can their order still change.
        """
        if not self.waiting or self.active >= self._slots:
            return None
        if self._urgency is not None and self._urgency.is_met(self._tokens_ahead(now)):
            return None
        for key in self._later.due(now):
            self._ready.put(key, self._jobs[key].arrival)
        key_ = self._ready.pop(now)
        return None if key_ is None else self._jobs[key_]

    def park(self, job: Job, place: str) -> None:
        """Let a job wait until :meth:`wake` is called for ``place``."""
        job.place = place
        self._parked.setdefault(place, {})[job.key] = None

    def wake(self, place: str) -> None:
        """Make the jobs parked at ``place`` ready."""
        for key in self._parked.pop(place, ()):
            self._ready.put(key, self._jobs[key].arrival)

    def start(self, job: Job, now: float) -> None:
        """Give an execution slot to the job that :meth:`next` returned."""
        self._leave_queue(job)
        job.state = JobState.RESERVING
        job.started = now
        self._holding[job.key] = job

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn the prefill speed from a step of ``tokens`` prompt tokens."""
        if self._urgency is not None:
            self._urgency.pace.learn(tokens, seconds)

    @property
    def active(self) -> int:
        """Number of execution slots in use."""
        return len(self._holding)

    def _tokens_ahead(self, now: float) -> int:
        """Return the prompt tokens that jobs with a slot still have to compute, now or soon."""
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
        """Raise InternalError if sums and indexes do not match the jobs."""
        super().check_integrity()
        jobs = list(self)
        active = {job.key for job in jobs if job.state is not JobState.QUEUED}
        if active != self._holding.keys():
            raise InternalError(f"{self.active} slots taken, but {len(active)} jobs hold a slot")
        shares = Shares()
        for job in jobs:
            shares.add(job.router, job.given_tokens)
        if shares.report() != self.shares.report():
            raise InternalError("the shares of the routers are miscounted")
        if Counter(job.link for job in jobs) != self._wanted:
            raise InternalError("the jobs per decode worker are miscounted")
        queued = [job for job in jobs if job.waits]
        sums = len(queued), sum(job.sequence.num_tokens for job in queued)
        if sums != (self.waiting, self.waiting_tokens):
            raise InternalError(f"{sums} queued, counted {(self.waiting, self.waiting_tokens)}")
        places = sum(len(parked) for parked in self._parked.values())
        if len(self._ready) + len(self._later) + places != len(queued):
            raise InternalError("a queued job is in no place or in two places")
