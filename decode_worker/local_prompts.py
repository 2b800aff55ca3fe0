"""Local prompts that wait for their turn at a decode worker, before the engine has them.

Invariant: a job is contained from :meth:`LocalPrompts.put` to its turn or its end; the sum of
tokens matches the jobs. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.engine.cache.paged_cache import PagedCache
from baton.proto.errors import InternalError
from baton.worker.attempts import Key
from baton.worker.start_order import Pace, StartOrder, latest_start

from .job import Job


class LocalPrompts:
    """Waiting jobs. ``slo_ttft``: TTFT target in seconds that decides their order; 0: by arrival.

    ``cache``: of this worker.
    """

    def __init__(self, slo_ttft: float, cache: PagedCache) -> None:
        self._slo_ttft = slo_ttft
        self._cache = cache
        self._jobs: dict[Key, Job] = {}
        start_by = self._start_by if slo_ttft else None
        self._order: StartOrder[Key] = StartOrder(start_by, self._seconds)
        self._pace = Pace()
        self._puts = 0
        self.tokens = 0
        """Tokens of all of them."""

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Job) -> None:
        """Add a job."""
        self._puts += 1
        self._jobs[job.key] = job
        self.tokens += job.sequence.num_tokens
        self._order.put(job.key, self._puts)

    def drop(self, job: Job) -> None:
        """Remove a job if it is contained."""
        if self._jobs.pop(job.key, None) is not None:
            self.tokens -= job.sequence.num_tokens
            self._order.drop(job.key)

    def pop(self, now: float) -> Job | None:
        """Remove and return the job that starts now; None if none waits."""
        key = self._order.pop(now)
        if key is None:
            return None
        job = self._jobs.pop(key)
        self.tokens -= job.sequence.num_tokens
        return job

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn how fast prompts are computed from a step with ``tokens`` prompt tokens."""
        self._pace.learn(tokens, seconds)

    def _start_by(self, key: Key) -> float:
        local = self._jobs[key].local
        if local is None or local.again:
            return math.inf  # TTFT no longer applies
        return latest_start(local.asked, local.limit or self._slo_ttft, self._seconds(key))

    def _seconds(self, key: Key) -> float:
        sequence, size = self._jobs[key].sequence, self._cache.block_size
        most = (sequence.num_tokens - 1) // size
        cached = len(self._cache.match(sequence.extend_hashes(), most)) * size
        return (sequence.num_tokens - cached) * self._pace.seconds_per_token

    def check_integrity(self, jobs: Iterable[Job]) -> None:
        """Raise InternalError unless they are the prepared ones of ``jobs`` that wait here."""
        waiting = {
            job.key: job
            for job in jobs
            if job.local is not None and job.grammar is None and job.unchecked is None
        }
        if waiting.keys() != self._jobs.keys() or len(self._order) != len(waiting):
            raise InternalError("the local prompts that wait do not match the requests")
        if self.tokens != sum(job.sequence.num_tokens for job in waiting.values()):
            raise InternalError("the tokens of waiting local prompts are miscounted")
