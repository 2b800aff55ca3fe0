"""Runs jobs against a target on a schedule, and records when their tokens arrive.

:class:`NativeTarget` uses the native client; :mod:`.http` has the targets over HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from baton.client import AsyncClient
from baton.proto.errors import BatonError, CapacityError, ConnectionLost
from baton.proto.sampling import SamplingParams

from .plan import Job
from .statistics import CANCELLED, FAILED, OK, REFUSED, Record

LIMIT_S = 600.0
"""Default of the seconds for one request, after which it counts as failed."""
LOST_S = 10.0
"""Seconds of failed connections without an answer or a token, before the server counts as lost.

A router that restarts needs less. The client gives up a new request after 5 s.
"""
_CHECK_S = 0.5
"""Seconds between two checks in an open loop that the server is not lost."""
_LOST = "the server was lost"
_ERROR_CHARS = 200
Clock = Callable[[], float]


class Target(Protocol):
    """A server under load."""

    async def send(self, job: Job, record: Record) -> None:
        """Send a job and fill its record until the answer ends; cancelling it aborts the request.

        Raises CapacityError if the server refuses the request for lack of room.
        """

    async def close(self) -> None:
        """Disconnect."""


class NativeTarget:
    """A Baton cluster at the addresses of its routers. ``keeps_answers``: record the tokens."""

    def __init__(
        self,
        client: AsyncClient,
        *,
        ignore_eos: bool,
        temperature: float,
        keeps_answers: bool = False,
    ) -> None:
        self._client = client
        self._ignore_eos = ignore_eos
        self._temperature = temperature
        self._keeps_answers = keeps_answers

    async def send(self, job: Job, record: Record) -> None:
        """Send a job and record its tokens."""
        params = SamplingParams(
            temperature=self._temperature, max_new_tokens=job.output, ignore_eos=self._ignore_eos
        )
        async with self._client.generate(job.prompt, params) as outputs:
            async for output in outputs:
                if output.tokens:
                    record.stamp(time.perf_counter(), len(output.tokens))
                if self._keeps_answers:
                    record.answer += output.tokens
                if output.is_done:
                    record.cached_tokens = output.cached_tokens
                    record.prefill, record.decode = output.prefill, output.decode

    async def close(self) -> None:
        """Disconnect."""
        await self._client.close()


class NativeEmbeddings:
    """A Baton cluster with an embedding model, at the addresses of its routers."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def send(self, job: Job, record: Record) -> None:
        """Send the texts of a job, each as a request, and record when all have their embeddings."""
        await self._client.embed(list(job.prompt.reshape(job.texts, -1)))
        record.stamp(time.perf_counter(), 0)

    async def close(self) -> None:
        """Disconnect."""
        await self._client.close()


class Runner:
    """Runs jobs one run after the other. ``limit``: seconds for each request.

    ``is_lost``: the server was lost. Then the run ended, and the rest of its jobs was not sent.
    """

    def __init__(
        self, target: Target, *, limit: float = LIMIT_S, clock: Clock = time.perf_counter
    ) -> None:
        self._target = target
        self._limit = limit
        self._clock = clock
        self.finished = 0
        self.is_lost = False
        self._running: dict[asyncio.Timeout, Record] = {}
        self._away_since = math.inf  # when the first request of a series of failures failed

    async def open_loop(self, jobs: Sequence[Job]) -> list[Record]:
        """Send each job at its time, whatever has become of the others."""
        start = self._clock()
        tasks: list[asyncio.Task[Record]] = []
        try:
            for job in jobs:
                at = start + (job.at or 0.0)
                while (left := at - self._clock()) > 0 and not self.is_lost:
                    await asyncio.sleep(min(left, _CHECK_S))
                if self.is_lost:
                    break
                tasks.append(asyncio.ensure_future(self._send(job, at)))
            return await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    async def closed_loop(
        self, jobs: Iterable[Job], concurrency: int, duration: float | None = None
    ) -> list[Record]:
        """Keep ``concurrency`` jobs running until all are sent, or ``duration`` seconds passed.

        The records are in the order of the jobs.
        """
        start, waiting = self._clock(), enumerate(jobs)
        records: dict[int, Record] = {}

        async def work() -> None:
            while not self.is_lost and (duration is None or self._clock() - start < duration):
                number, job = next(waiting, (0, None))
                if job is None:
                    return
                records[number] = await self._send(job, self._clock())

        tasks = [asyncio.ensure_future(work()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _end(tasks)
        return [records[number] for number in sorted(records)]

    async def _send(self, job: Job, arrived: float) -> Record:
        record = Record(arrived, sent=self._clock(), prompt_tokens=len(job.prompt), texts=job.texts)
        limit = self._limit if job.cancel_after is None else min(job.cancel_after, self._limit)
        timeout = asyncio.timeout(limit)
        try:
            async with timeout:
                self._running[timeout] = record
                try:
                    await self._target.send(job, record)
                finally:
                    del self._running[timeout]
            record.outcome = OK
            self._answered()
        except CapacityError as error:
            record.outcome, record.error = REFUSED, _shown(error)
            self._answered()
        except (ConnectionLost, OSError, EOFError) as error:
            record.outcome, record.error = FAILED, _shown(error)
            if not timeout.expired():  # the time limit too raises a TimeoutError, an OSError
                self._unreachable()
            elif self.is_lost:
                record.error = _LOST
            elif limit == job.cancel_after:
                record.outcome, record.error = CANCELLED, ""
            else:
                record.error = f"no end within {limit:g} s"
        except BatonError as error:
            record.outcome, record.error = FAILED, _shown(error)
            self._answered()
        record.ended = self._clock()
        self.finished += 1
        return record

    def _answered(self) -> None:
        self._away_since = math.inf

    def _unreachable(self) -> None:
        """Note a request that had no connection. If the server is lost, end all requests.

        The time before the first failure does not count: that request may have waited for long.
        """
        stamps = (one.stamps[-1][0] for one in self._running.values() if one.stamps)
        self._away_since = max([min(self._away_since, self._clock()), *stamps])
        if self._clock() - self._away_since < LOST_S:
            return
        self.is_lost = True
        for timeout in self._running:
            if not timeout.expired():
                timeout.reschedule(0.0)


def _shown(error: Exception) -> str:
    """Return an error's text without the numbers after which equal errors would differ."""
    text = str(error) or type(error).__name__
    return text.partition(";")[0][:_ERROR_CHARS]


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def until(jobs: Iterable[Job], duration: float | None) -> Iterator[Job]:
    """Yield the jobs that arrive before ``duration`` seconds have passed."""
    for job in jobs:
        if duration is not None and job.at is not None and job.at > duration:
            return
        yield job
