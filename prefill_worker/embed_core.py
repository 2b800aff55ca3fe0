"""The decisions of a prefill worker that serves an embedding model: queue, batch, answer.

A request needs no other worker. It is computed in one step together with others, and its terminal
carries the embedding. Invariants: every Assign is answered; every job ends by one terminal or an
Abort; if a batch's result lacks a request's embedding, only that request fails.

The core uses no socket, clock or thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..engine.models.registry import read_context
from ..engine.scheduling.step_time import StepTime
from ..proto.contexts.status import GenerationStatus
from ..proto.contexts.text import TextContext
from ..proto.errors import BatonError, DeadlineExceeded, InternalError
from ..proto.ids import RequestID
from ..proto.requests import check_wire_context
from ..proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Assign,
    Busy,
    Message,
    RequestState,
    Terminal,
    TokenRun,
    Tokens,
    WorkerLoad,
)
from ..runtime.tables import ExpiringMap, KeyedHeap
from ..worker.attempts import Attempts, Key
from ..worker.base_core import Handler, WorkerCore
from ..worker.events import (
    DrainRequested,
    Exit,
    FromRouter,
    Note,
    RouterDown,
    RouterUp,
    Tick,
    ToRouter,
)
from ..worker.membership import EngineState, Membership, left_alone, moved_to, other_owner
from .job import sequence_key

F32 = npt.NDArray[np.float32]
TOMBSTONE_S = 600.0
"""Seconds for which an Abort also rejects a late Assign of the same attempt."""
BUSY_RETRY_S = 0.2


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
Action = ToRouter | RunBatch | Note | Exit


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
    """One attempt of a request, from Assign to its end on this worker; ``name`` is unique."""

    key: Key
    router: str
    request_id: str
    deadline: float
    context: TextContext
    name: RequestID

    @property
    def tokens(self) -> int:
        """Length of the text."""
        return len(self.context.tokens)


class EmbedCore(WorkerCore):
    """State machine of one embedding worker."""

    def __init__(
        self, member: Membership, limits: EmbedLimits, times: StepTime | None = None
    ) -> None:
        super().__init__(member)
        self._limits = limits
        self._card = member.identity.model
        self._times = times or StepTime()
        self._jobs: Attempts[EmbedJob] = Attempts()
        self._queue: dict[Key, EmbedJob] = {}  # in order of arrival
        self._running: dict[RequestID, Key] | None = None
        self._running_tokens = 0
        self._deadlines: KeyedHeap[Key] = KeyedHeap()
        self._answered: ExpiringMap[Key, bool] = ExpiringMap()  # attempts that ended here
        self._aborted: ExpiringMap[bytes, int] = ExpiringMap()  # aborted up to this attempt
        self._steps = 0
        self._step_s = 0.0
        self._waiting_tokens = 0
        self._computed_tokens = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event and return the actions to perform, in order."""
        actions: list[Action] = self.HANDLERS[type(event)](self, event, now)
        if self._running is None and self._queue:
            self._run(actions, now)
        return actions

    # ------------------------------------------------------------------ messages of routers

    def _assigned(self, router: str, message: Message, now: float) -> list[Any]:
        return self._assign(router, message, now) if isinstance(message, Assign) else []

    def _assign(self, router: str, message: Assign, now: float) -> list[Action]:
        request, attempt = key = (message.request, message.attempt)
        accepted = ToRouter(router, Accepted(request=request, attempt=attempt))
        job = self._jobs.get(key)
        if job is not None:
            moved = moved_to(router, job.router, request)
            job.router = router
            return [*moved, accepted]
        if self._member.has_ended(*key):
            return [accepted]
        if self._answered.get(key, now) or attempt <= (self._aborted.get(request, now) or 0):
            # Otherwise a router that lost its state would wait for this attempt.
            return [ToRouter(router, Aborted(request=request, attempt=attempt))]
        moved = [
            said
            for job in self._drop(request, attempt - 1)
            for said in moved_to(router, job.router, request)
        ]
        if self._member.draining or len(self._queue) >= self._limits.max_queue:
            reason = "draining" if self._member.draining else "queue full"
            busy = Busy(request=request, attempt=attempt, reason=reason, retry_after=BUSY_RETRY_S)
            return [*moved, ToRouter(router, busy)]
        return [*moved, accepted, *self._take(router, message, now)]

    def _take(self, router: str, message: Assign, now: float) -> list[ToRouter]:
        key = (message.request, message.attempt)
        deadline = now + message.deadline
        name = RequestID(sequence_key(key).hex())
        try:
            check_wire_context(message.context, self._card)
            context = read_context(self._card.architecture, message.context, name)
        except (BatonError, ValueError) as error:
            code = error.code if isinstance(error, BatonError) else "input"
            terminal = Terminal(
                request=key[0],
                attempt=key[1],
                code=code,
                message=str(error),
                request_id=message.request_id,
            )
            return self._member.end(router, terminal, now, deadline)
        job = EmbedJob(key, router, message.request_id, deadline, context, name)
        self._jobs[key] = self._queue[key] = job
        self._waiting_tokens += job.tokens
        self._deadlines.put(key, deadline)
        return []

    def _drop(self, request: bytes, last: int, router: str | None = None) -> list[EmbedJob]:
        """Remove a request's attempts up to ``last`` without answers; return the removed jobs."""
        dropped = self._jobs.of(request, last)
        for job in dropped:
            self._remove(job)
        self._member.forget(request, last, router)
        return dropped

    def _remove(self, job: EmbedJob) -> None:
        del self._jobs[job.key]
        self._deadlines.drop(job.key)
        if self._queue.pop(job.key, None) is not None:
            self._waiting_tokens -= job.tokens

    def _abort(self, router: str, message: Abort, now: float) -> list[Any]:
        request, attempt = message.request, message.attempt
        held = self._jobs.of(request, attempt)
        owner = other_owner(held, router)
        if owner is not None:
            return list(left_alone(owner, router, message))
        dropped = self._drop(request, attempt, router)
        if attempt >= (self._aborted.get(request, now) or 0):
            self._aborted.put(request, attempt, now + TOMBSTONE_S)
        running = [job.name for job in dropped if job.name in (self._running or {})]
        answer = ToRouter(router, Aborted(request=request, attempt=attempt))
        freed = self._freed((request, attempt), now, running)
        return [*freed, answer, *self._maybe_drained()]

    def _adopt(self, router: str, request: bytes, position: int) -> list[Any]:
        """Reroute the embedding to this router. An empty token run confirms ownership."""
        job = self._jobs.newest(request)
        if job is None:
            return list(self._member.adopt(router, request, position))
        moved = moved_to(router, job.router, request)
        job.router = router
        run = TokenRun(request, job.key[1], job.tokens, [])
        return [*moved, ToRouter(router, Tokens(runs=[run]))]

    def _peer_dead(self, endpoint: str, incarnation: int, now: float) -> list[Any]:
        return []  # an embedding needs no other worker

    def _held(self) -> list[RequestState]:
        return [
            RequestState(*job.key, job.tokens, job.tokens, router=job.router)
            for job in self._jobs.values()
        ]

    # ------------------------------------------------------------------ batches

    def _run(self, actions: list[Action], now: float) -> None:
        """Start a batch of the oldest jobs."""
        limits, tokens = self._limits, 0
        batch: list[EmbedJob] = []
        for job in list(self._queue.values()):
            if now >= job.deadline:
                actions += self._late(job, "the deadline passed in the queue", now)
                continue
            over = limits.token_budget and tokens + job.tokens > limits.token_budget
            if batch and (over or len(batch) >= limits.max_batch):
                break
            batch.append(job)
            tokens += job.tokens
        if not batch:
            return
        for job in batch:
            del self._queue[job.key]
        self._waiting_tokens -= tokens
        self._running = {job.name: job.key for job in batch}
        self._running_tokens = tokens
        self._step_s = self._times.predict(tokens)
        actions.append(RunBatch({job.name: job.context for job in batch}, tokens))

    def _on_done(self, event: BatchDone, now: float) -> list[Action]:
        running, self._running = self._running or {}, None
        self._steps += 1
        self._computed_tokens += self._running_tokens
        if not event.failure:
            self._times.learn(self._running_tokens, event.seconds)
        self._step_s = 0.0
        actions: list[Action] = []
        for name, key in running.items():
            job = self._jobs.get(key)
            if job is not None:
                actions += self._finish(job, event.vectors.get(name), event.failure, now)
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

    def _late(self, job: EmbedJob, message: str, now: float) -> list[ToRouter]:
        return self._end(job, now, code=DeadlineExceeded.code, message=message)

    def _end(
        self,
        job: EmbedJob,
        now: float,
        *,
        status: str | None = None,
        code: str | None = None,
        message: str = "",
        embedding: F32 | None = None,
    ) -> list[ToRouter]:
        """Send the terminal and keep it until it is acknowledged."""
        terminal = Terminal(
            request=job.key[0],
            attempt=job.key[1],
            position=job.tokens,
            status=status,
            code=code,
            message=message,
            request_id=job.request_id,
            prefill=self._member.identity.worker,
            embedding=embedding,
        )
        self._answered.put(job.key, True, job.deadline)  # noqa: FBT003
        self._remove(job)
        return self._member.end(job.router, terminal, now, job.deadline, job.tokens, job.tokens)

    # ------------------------------------------------------------------ time and drain

    def _on_tick(self, event: Tick, now: float) -> list[Any]:
        engine = EngineState(self._steps + event.layers, self._running is not None, self._step_s)
        actions: list[Any] = list(self._member.tick(now, engine, self.load))
        actions += self._introduce_again(now)
        actions += self._deserted(now)
        for key in self._deadlines.due(now):
            job = self._jobs.get(key)
            if job is not None:
                actions += self._late(job, "the deadline passed", now)
        self._answered.expire(now)
        self._aborted.expire(now)
        return [*actions, *self._maybe_drained()]

    @property
    def _requests(self) -> int:
        return len(self._jobs)

    @property
    def is_drained(self) -> bool:
        """True if this worker is draining and nothing is left."""
        return self._member.draining and not self._jobs and not self._member.unacknowledged

    @property
    def idle(self) -> bool:
        """True if there is no request and no running batch."""
        return not self._jobs and self._running is None

    @property
    def remembered(self) -> int:
        """Number of entries kept about ended requests; each entry expires."""
        return len(self._answered) + len(self._aborted) + self._member.unacknowledged

    def check_integrity(self) -> None:
        """Raise InternalError if queue and sums do not match the jobs."""
        if not self._queue.keys() <= self._jobs.keys():
            raise InternalError("the queue contains a job that has ended")
        waiting = sum(job.tokens for job in self._queue.values())
        if waiting != self._waiting_tokens:
            raise InternalError(f"{waiting} tokens wait, counted {self._waiting_tokens}")
        if len(self._deadlines) != len(self._jobs):
            raise InternalError("deadlines and jobs differ in number")
        running = set((self._running or {}).values())
        if any(key not in running and key not in self._queue for key in self._jobs):
            raise InternalError("a job is neither queued nor running")

    def load(self) -> WorkerLoad:
        """Return the load that heartbeats report."""
        return WorkerLoad(
            requests_running=len(self._running or ()),
            requests_waiting=len(self._queue),
            tokens_waiting=self._waiting_tokens,
            prompt_tokens=self._computed_tokens,
            shares=self._shares((job.router, job.tokens) for job in self._jobs.values()),
        )

    HANDLERS: ClassVar[Mapping[type, Handler]] = {
        **WorkerCore.HANDLERS,
        BatchDone: _on_done,
        Tick: _on_tick,
    }
