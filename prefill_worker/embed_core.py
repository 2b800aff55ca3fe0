"""The decisions of a prefill worker that serves an embedding model: queue, batch, answer.

A request needs no other worker. It is computed in one step together with others, and its terminal
carries the embedding. Invariants: every Assign is answered; every job ends by one terminal or an
Abort; if a batch's result lacks a request's embedding, only that request fails.

The core uses no socket, clock or thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import numpy as np
import numpy.typing as npt

from baton.engine.models.contexts import read_context
from baton.engine.scheduling.step_time import StepTime
from baton.proto.contexts.status import GenerationStatus
from baton.proto.contexts.text import TextContext
from baton.proto.errors import DeadlineExceeded, InternalError
from baton.proto.ids import RequestID
from baton.proto.requests import check_wire_context
from baton.proto.wire.messages import (
    Assign,
    Buckets,
    PeerDead,
    RequestState,
    Terminal,
    TokenRun,
    WorkerLoad,
    WorkerTimes,
)
from baton.runtime.metrics.families import GAP_S, STEP_SECONDS, STEP_TOKENS, TOKENS, Histogram
from baton.worker.attempts import Key
from baton.worker.base_core import Handler, WorkerCore
from baton.worker.events import (
    DrainRequested,
    Exit,
    FromRouter,
    Log,
    RouterDown,
    RouterUp,
    Tick,
    ToRouter,
)
from baton.worker.jobs import Ending, engine_name
from baton.worker.membership import EngineState, Membership

from .assign_core import JobQueue, PromptCore

F32 = npt.NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class RunBatch:
    """Run the batch on the compute thread; ``tokens``: total length of its contexts."""

    batch: Mapping[RequestID, TextContext]
    tokens: int


@dataclass(slots=True, frozen=True)
class BatchDone:
    """The result of the batch: float32 ``[dim]`` per request, or the reason for the failure."""

    vectors: Mapping[RequestID, F32]
    seconds: float
    failure: str = ""


Event = FromRouter | RouterUp | RouterDown | BatchDone | Tick | DrainRequested
Action = ToRouter | RunBatch | Log | Exit


@dataclass(slots=True, frozen=True)
class EmbedLimits:
    """``token_budget``: maximum tokens of a batch (0: unlimited); a single text may exceed it.

    ``max_batch``: maximum texts of a batch. ``max_queue``: queue length at which an Assign is
    answered Busy.
    """

    token_budget: int = 512
    max_batch: int = 16
    max_queue: int = 1024


@dataclass(slots=True)
class EmbedJob:
    """One attempt of a request, from Assign to its end on this worker; ``name``: unique."""

    key: Key
    router: str
    request_id: str
    deadline: float
    context: TextContext
    name: bytes
    proof: bytes  # that a router assigned this attempt to this worker
    received: float  # when the Assign arrived
    started: float | None = None  # when its batch started

    @property
    def tokens(self) -> int:
        """Length of the text."""
        return len(self.context.tokens)

    def times(self, now: float) -> WorkerTimes:
        """Return when the job reached its steps; it ends now."""
        started = None if self.started is None else max(0.0, self.started - self.received)
        ended = max(0.0, now - self.received)
        computed = None if started is None else ended
        return WorkerTimes(started=started, computing=started, computed=computed, ended=ended)

    def held(self) -> RequestState:
        """Return the state that Hello reports to routers."""
        return RequestState(
            *self.key, self.tokens, self.tokens, router=self.router, proof=self.proof
        )

    def replay(self, position: int) -> list[TokenRun]:
        """Return an empty run, which confirms ownership; an embedding has no tokens."""
        return [TokenRun(*self.key, self.tokens, [])]


class TextQueue(JobQueue[EmbedJob]):
    """The jobs of one worker; waiting jobs are computed in order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self._in_order: dict[Key, EmbedJob] = {}

    @property
    def in_order(self) -> list[EmbedJob]:
        """The jobs that wait, oldest first."""
        return list(self._in_order.values())

    def add(self, job: EmbedJob) -> None:
        """Add a new job and let it wait."""
        super().add(job)
        self._in_order[job.key] = job
        self.waiting += 1
        self.waiting_tokens += job.tokens

    def remove(self, job: EmbedJob) -> None:
        """Remove a job that ended. Raises KeyError if it was removed before."""
        super().remove(job)
        self.start(job)

    def start(self, job: EmbedJob) -> None:
        """Take a job out of the queue, if it waits."""
        if self._in_order.pop(job.key, None) is not None:
            self.waiting -= 1
            self.waiting_tokens -= job.tokens

    def check_integrity(self) -> None:
        """Raise InternalError if queue and sums do not match the jobs."""
        super().check_integrity()
        if any(self.get(key) is None for key in self._in_order):
            raise InternalError("the queue contains a job that has ended")
        sums = len(self._in_order), sum(job.tokens for job in self.in_order)
        if sums != (self.waiting, self.waiting_tokens):
            raise InternalError(f"{sums} wait, counted {(self.waiting, self.waiting_tokens)}")


class EmbedCore(PromptCore[EmbedJob]):
    """State machine of one embedding worker."""

    def __init__(
        self, member: Membership, limits: EmbedLimits, times: StepTime | None = None
    ) -> None:
        self._queue = TextQueue()
        super().__init__(member, self._queue, limits.max_queue)
        self._limits = limits
        self._card = member.identity.model
        self._times = times or StepTime()
        self._batch: dict[bytes, EmbedJob] | None = None  # the running batch, by name
        self._batch_tokens = 0
        self._steps = 0
        self._step_s = 0.0
        self._computed_tokens = 0
        self._step_seconds, self._step_tokens = Histogram(GAP_S), Histogram(TOKENS)

    def _go_on(self, actions: list[Action], now: float) -> None:
        if self._batch is None and self._queue.waiting:
            self._run(actions, now)

    # ------------------------------------------------------------------ messages of routers

    def _make_job(self, router: str, message: Assign, now: float) -> EmbedJob:
        key = (message.request, message.attempt)
        name = engine_name(key)
        check_wire_context(message.context, self._card)
        request_id = RequestID(name.hex())
        context = read_context(self._card.architecture, message.context, request_id)
        deadline = now + message.deadline
        return EmbedJob(
            key, router, message.request_id, deadline, context, name, message.proof, now
        )

    def _begin_job(self, job: EmbedJob, now: float) -> list[Any]:
        return []  # it waits for the next batch

    def _stop(self, job: EmbedJob, now: float) -> list[Any]:
        self._queue.remove(job)
        return []

    def _is_running(self, name: bytes) -> bool:
        return name in (self._batch or {})

    def _peer_dead(self, message: PeerDead, now: float) -> list[Any]:
        return []  # an embedding needs no other worker

    # ------------------------------------------------------------------ batches

    def _run(self, actions: list[Action], now: float) -> None:
        """Start a batch of the oldest jobs."""
        limits, tokens = self._limits, 0
        batch: list[EmbedJob] = []
        for job in self._queue.in_order:
            if now >= job.deadline:
                late = "the deadline passed in the queue"
                actions += self._end(job, now, code=DeadlineExceeded.code, message=late)
                continue
            over = limits.token_budget and tokens + job.tokens > limits.token_budget
            if batch and (over or len(batch) >= limits.max_batch):
                break
            batch.append(job)
            tokens += job.tokens
        if not batch:
            return
        for job in batch:
            self._queue.start(job)
            job.started = now
        self._batch = {job.name: job for job in batch}
        self._batch_tokens = tokens
        self._step_s = self._times.predict(tokens)
        actions.append(RunBatch({job.context.request_id: job.context for job in batch}, tokens))

    def _on_done(self, event: BatchDone, now: float) -> list[Action]:
        batch, self._batch = self._batch or {}, None
        self._steps += 1
        self._computed_tokens += self._batch_tokens
        if not event.failure:
            self._times.learn(self._batch_tokens, event.seconds)
            self._step_seconds.observe(event.seconds)
            self._step_tokens.observe(self._batch_tokens)
        self._step_s = 0.0
        jobs = [job for job in batch.values() if self._queue.get(job.key) is job]

        def finish(job: EmbedJob) -> list[ToRouter]:
            vector = event.vectors.get(job.context.request_id)
            return self._finish(job, vector, event.failure, now)

        actions = self._each(jobs, finish, "result", now)
        return [*actions, *self._step_over(now), *self._maybe_drained()]

    def _finish(
        self, job: EmbedJob, vector: F32 | None, failure: str, now: float
    ) -> list[ToRouter]:
        if vector is not None and vector.shape == (self._card.embedding_size,):
            status = GenerationStatus.END_OF_SEQUENCE.value
            return self._end(job, now, status=status, embedding=vector)
        message = failure or "the model returned no embedding for this text"
        return self._end(job, now, code=InternalError.code, message=message)

    # ------------------------------------------------------------------ ends

    def _end(self, job: EmbedJob, now: float, **ending: Unpack[Ending]) -> list[ToRouter]:
        """Send the terminal and keep it until it is acknowledged."""
        terminal = Terminal(
            request=job.key[0],
            attempt=job.key[1],
            position=job.tokens,
            **ending,
            request_id=job.request_id,
            prefill=self._member.identity.worker,
            times=job.times(now),
        )
        self._ended.end(job.key, job.deadline)
        self._queue.remove(job)
        return self._member.end(
            job.router, terminal, now, job.deadline, job.tokens, job.tokens, proof=job.proof
        )

    # ------------------------------------------------------------------ time and drain

    def _engine_state(self, layers: int) -> EngineState:
        return EngineState(self._steps + layers, self._batch is not None, self._step_s)

    def _timed_parts(self, now: float, event: Tick) -> dict[str, Callable[[], list[Any]]]:
        return {
            "deadlines": lambda: self._end_overdue(now),
            "ended": lambda: self._expire_ended(now),
        }

    @property
    def is_drained(self) -> bool:
        """True if this worker is draining and nothing is left."""
        return self._member.draining and not len(self._queue) and not self._member.unacknowledged

    @property
    def idle(self) -> bool:
        """True without requests and a running batch."""
        return not len(self._queue) and self._batch is None

    def check_integrity(self) -> None:
        """Raise InternalError if queue and sums do not match the jobs."""
        self._queue.check_integrity()
        waiting = {job.name for job in self._queue.in_order}
        if not self._queue.names <= waiting | (self._batch or {}).keys():
            raise InternalError("a job is neither queued nor running")

    def load(self) -> WorkerLoad:
        """Return the load that heartbeats report."""
        return WorkerLoad(
            requests_running=len(self._batch or ()),
            requests_waiting=self._queue.waiting,
            tokens_waiting=self._queue.waiting_tokens,
            prompt_tokens=self._computed_tokens,
            shares=self._shares((job.router, job.tokens) for job in self._queue),
            histograms={
                name: Buckets(list(found.counts), found.total)
                for name, found in (
                    (STEP_SECONDS, self._step_seconds),
                    (STEP_TOKENS, self._step_tokens),
                )
            },
        )

    HANDLERS: ClassVar[Mapping[type, Handler]] = {
        **WorkerCore.HANDLERS,
        BatchDone: _on_done,
    }
    ENGINE_EVENTS: ClassVar[frozenset[type]] = frozenset({BatchDone})
