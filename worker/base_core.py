"""Behaviour shared by prefill and decode cores: router connections, aborts, draining.

Invariant: every Abort is answered, and a line is logged once the attempt's blocks are free; a
worker sends Drained once, when it has no requests left.

Pure. The core of each role derives from WorkerCore and adds its own handlers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

from baton.engine.scheduling.events import Event as EngineEvent
from baton.proto.errors import DeadlineExceeded, InternalError
from baton.proto.wire.messages import (
    Abort,
    Accepted,
    Adopt,
    Assign,
    Drain,
    Drained,
    Message,
    PeerDead,
    Ping,
    Pong,
    Rejected,
    RequestState,
    Share,
    Terminal,
    TerminalAck,
    Tokens,
    Welcome,
    WorkerLoad,
)

from .attempts import Key
from .events import (
    DrainRequested,
    FromRouter,
    Log,
    RouterDown,
    RouterUp,
    Tick,
    ToRouter,
    blocks_freed,
)
from .jobs import Ending, Job, Jobs
from .load_by_router import Shares
from .membership import EngineState, Membership, left_alone, moved_to, other_owner
from .own_errors import OwnErrors, failure_text, key_of

ATTEMPTS_KEPT = 1 << 19
"""Attempts that a table of ended attempts holds: of 600 s, at 870 attempts per second."""
FORGOTTEN = "attempt_forgotten"
"""Name of the count of entries that such a table lost before their time, among the drops that
heartbeats report: a late Assign, Reserve or Commit of those attempts is taken for a new one."""
TOMBSTONE_S = 600.0
"""Seconds for which an Abort also rejects a late Assign or Commit of the same attempt."""
Handler = Callable[..., list[Any]]
"""``handler(core, event, now) -> actions``; actions may be common or specific to a role."""


class WorkerCore(ABC):
    """Base of the prefill and decode cores."""

    HANDLERS: ClassVar[Mapping[type, Handler]]
    ENGINE_EVENTS: ClassVar[frozenset[type]]
    """Results of the engine: if one cannot be applied, the engine's state is undefined."""

    def __init__(self, member: Membership, jobs: Jobs[Any]) -> None:
        self._member = member
        self._jobs = jobs
        self._drained_said = False
        self._freed_later: list[tuple[Key, float, Sequence[Any]]] = []  # key, abort time, names
        self.errors = OwnErrors(member.dropped)
        self.dropped = member.dropped
        """Messages that this worker could not use, by reason; heartbeats report them."""
        self.extensions = member.extensions
        """Users' classes in this worker."""

    # ------------------------------------------------------------------ of the role

    @abstractmethod
    def _go_on(self, actions: list[Any], now: float) -> None:
        """Add what follows any event, such as the next step."""

    @abstractmethod
    def _end(self, job: Any, now: float, **ending: Unpack[Ending]) -> list[Any]:
        """Send the terminal of a job."""

    @abstractmethod
    def _engine_state(self, layers: int) -> EngineState:
        """Return the progress that heartbeats report; ``layers``: computed since the start."""

    @abstractmethod
    def _timed_parts(self, now: float, event: Tick) -> dict[str, Callable[[], list[Any]]]:
        """Return the role's parts of a timer's work, in order, with those that end late jobs."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise InternalError if the worker's books do not agree."""

    def _abandon(self, key: Key, now: float) -> list[Any]:
        """Free what is held for an attempt without a job."""
        return []

    @abstractmethod
    def load(self) -> WorkerLoad:
        """Return the load that heartbeats report."""

    @property
    @abstractmethod
    def is_drained(self) -> bool:
        """Whether the worker is draining and has no requests left."""

    @abstractmethod
    def _abort_jobs(self, jobs: list[Any], router: str, message: Abort, now: float) -> list[Any]:
        """Abort jobs; blocks in use by a running step are freed later (:meth:`_freed`)."""

    @abstractmethod
    def _is_running(self, name: bytes) -> bool:
        """Whether a running step computes the job of this engine's name."""

    @abstractmethod
    def _peer_dead(self, message: PeerDead, now: float) -> list[Any]:
        """Handle that a worker of the other role was declared dead."""

    def _assigned(self, router: str, message: Message, now: float) -> list[Any]:
        """Handle a router's message that is specific to this role."""
        return []

    def _shares(self, held: Iterable[tuple[str, int]]) -> dict[str, Share]:
        """Sum requests and tokens per router; empty if there is only one router."""
        if len(self._member.routers) < 2:
            return {}
        shares = Shares()
        for router, tokens in held:
            shares.add(router, tokens)
        return shares.report()

    # ------------------------------------------------------------------ entry

    def handle(self, event: Any, now: float) -> list[Any]:
        """Handle one event and return the actions to perform, in order.

        Never raises. An exception ends only the attempt that caused it; see :mod:`.own_errors`.
        """
        actions: list[Any] = []
        try:
            actions += self.HANDLERS[type(event)](self, event, now)
        except Exception as error:
            actions += self._failed(event, error, now)
        try:
            self._go_on(actions, now)
        except Exception as error:  # the engine's plan concerns all requests
            actions += self.errors.fatal(error, "planning")
        if self.errors.fresh:
            actions += self.errors.compare(self.check_integrity)
        return actions

    def _failed(self, event: Any, error: Exception, now: float) -> list[Any]:
        """Handle an error of an event: end the attempt that it is about, if there is one."""
        name = type(getattr(event, "message", event)).__name__
        if type(event) in self.ENGINE_EVENTS:
            return self.errors.fatal(error, name)
        if isinstance(event, RouterUp):
            self._member.linked(event.router, now)
        key = self._key_of(event)
        if key is None:
            return [self.errors.of(None, error, name)]
        job = self._jobs.get(key)
        if job is not None:
            return self._harm(job, error, name, now)
        actions: list[Any] = [self.errors.of(key, error, name)]
        try:
            actions += self._abandon(key, now)
            message = getattr(event, "message", None)
            if isinstance(message, Assign) and not self._member.has_ended(*key):
                until = now + message.deadline
                actions += self._end_jobless(event.router, key, message.proof, now, until)
        except Exception as again:
            actions += self.errors.fatal(again, f"after {name}")
        return actions

    def _key_of(self, event: Any) -> Key | None:
        """Return the attempt that an event is about, or None."""
        return key_of(event)

    def _harm(self, job: Any, error: Exception, where: str, now: float) -> list[Any]:
        """End the job whose handling raised, also if it was removed without a terminal."""
        actions: list[Any] = [self.errors.of(job.key, error, where)]
        try:
            if self._jobs.get(job.key) is job:
                text = failure_text(self._member.identity.worker)
                return actions + self._end(job, now, code=InternalError.code, message=text)
            if not self._member.has_ended(*job.key):
                actions += self._end_jobless(job.router, job.key, job.proof, now, job.deadline)
        except Exception as again:
            actions += self.errors.fatal(again, f"after {where}")
        return actions

    def _end_jobless(
        self, router: str, key: Key, proof: bytes, now: float, until: float
    ) -> list[Any]:
        """Send the terminal of an attempt without a job."""
        worker = self._member.identity.worker
        terminal = Terminal(
            request=key[0],
            attempt=key[1],
            code=InternalError.code,
            message=failure_text(worker),
        )
        return list(self._member.end(router, terminal, now, until, proof=proof))

    def _each(
        self, jobs: Iterable[Any], handle: Callable[[Any], list[Any]], where: str, now: float
    ) -> list[Any]:
        """Return the actions for every job; an error harms that job alone."""
        actions: list[Any] = []
        for job in jobs:
            try:
                actions += handle(job)
            except Exception as error:
                actions += self._harm(job, error, where, now)
        return actions

    def _each_event(
        self,
        events: Iterable[EngineEvent],
        handle: Callable[[Any, Any], list[Any]],
        now: float,
    ) -> list[Any]:
        """Return the actions for every event of the engine; an error harms its job alone.

        ``handle(job, event)``. Events of jobs that ended meanwhile are dropped.
        """
        actions: list[Any] = []
        for event in events:
            job = self._jobs.named(event.request)
            if job is None:
                continue
            try:
                actions += handle(job, event)
            except Exception as error:
                actions += self._harm(job, error, type(event).__name__, now)
        return actions

    def _outputs(
        self,
        outputs: Iterable[Any],
        handle: Callable[[Any], list[Any]],
        now: float,
        about: object = None,
    ) -> list[Any]:
        """Return the actions for every output of a handoff; an error harms its attempt alone.

        ``about``: the event whose handling makes the outputs. If making one raises, the actions
        for those before it are kept. Without an event the error is raised.
        """
        actions: list[Any] = []
        remaining = iter(outputs)
        while True:
            try:
                output = next(remaining, None)
            except Exception as error:  # nothing follows
                if about is None:
                    raise
                return actions + self._failed(about, error, now)
            if output is None:
                return actions
            try:
                actions += handle(output)
            except Exception as error:
                actions += self._failed(output, error, now)

    # ------------------------------------------------------------------ jobs

    def _held(self) -> list[RequestState]:
        """Return all requests at this worker, for a Hello."""
        return [job.held() for job in self._jobs]

    def _adopt(self, router: str, request: bytes, position: int) -> list[Any]:
        """Resend tokens from ``position`` on, and route later ones to this router."""
        job = self._jobs.newest(request)
        if job is None:
            return list(self._member.adopt(router, request, position))
        moved = moved_to(router, job.router, request)
        self._jobs.hand_to(router, job)
        return [*moved, ToRouter(router, Tokens(runs=job.replay(position)))]

    def _abort(self, router: str, message: Abort, now: float) -> list[Any]:
        """Abort a request's attempts, unless another router owns them."""
        jobs = self._jobs.of(message.request, message.attempt)
        owner = other_owner(jobs, router)
        if owner is not None:
            return list(left_alone(owner, router, message))
        return self._abort_jobs(jobs, router, message, now)

    # ------------------------------------------------------------------ routers

    def _on_router_up(self, event: RouterUp, now: float) -> list[Any]:
        return list(self._member.up(event.router, self.load(), self._held(), now))

    def _unknown_there(self, router: str, now: float) -> list[Any]:
        """Register again with a router that does not know us.

        It may refuse many of our messages in a row, so Hellos are rate-limited.
        """
        if not self._member.may_introduce(now):
            return []
        return self._on_router_up(RouterUp(router), now)

    def _on_router_down(self, event: RouterDown, now: float) -> list[Any]:
        self._member.down(event.router)
        return []

    def _on_router(self, event: FromRouter, now: float) -> list[Any]:
        router = event.router
        match event.message:
            case TerminalAck(requests=ended):
                self._member.acknowledged(router, ended)
                return self._maybe_drained()
            case Abort() as message:
                return self._abort(router, message, now)
            case Adopt(request=request, position=position):
                return self._claim(router, self._adopt(router, request, position))
            case PeerDead() as message:
                return self._peer_dead(message, now)
            case Drain():
                return self._drain()
            case Ping(nonce=nonce):
                return [ToRouter(router, Pong(nonce=nonce))]
            case Rejected(code="endpoint_unknown"):
                return self._unknown_there(router, now)
            case Rejected() as message:
                return list(self._member.rejected(router, message, now))
            case Welcome(key=key):
                self._member.welcomed(router, key, now)
                return []
            case message:
                return self._assigned(router, message, now)

    def _claim(self, router: str, answer: list[Any]) -> list[Any]:
        """Prepend the proof of assignment to the answer to an Adopt."""
        for action in answer:
            if not isinstance(action, ToRouter) or action.router != router:
                continue
            said = action.message
            if isinstance(said, Tokens) and said.runs:
                said_of = (said.runs[0].request, said.runs[0].attempt)
            elif isinstance(said, Terminal):
                said_of = (said.request, said.attempt)
            else:
                continue
            job = self._jobs.get(said_of)
            proof = self._member.proof_of(said_of) if job is None else job.proof
            accepted = Accepted(request=said_of[0], attempt=said_of[1], proof=proof)
            return [ToRouter(router, accepted), *answer]
        return answer

    # ------------------------------------------------------------------ aborts

    def _running(self, jobs: Iterable[Job]) -> list[bytes]:
        """Return the engine's names of the jobs that are part of a running step."""
        return [job.name for job in jobs if self._is_running(job.name)]

    def _freed(self, key: Key, now: float, running: Sequence[Any]) -> list[Any]:
        """Log that an aborted attempt's blocks are free, after the last step that uses them.

        ``running``: the attempt's engine names that are part of a running step.
        """
        if not running:
            return [blocks_freed(*key, now, now)]
        self._freed_later.append((key, now, running))
        return []

    def _step_over(
        self, now: float, is_out: Callable[[Any], bool] = lambda _name: False
    ) -> list[Any]:
        """Handle the end of a step; ``is_out(name)``: another running step uses its blocks."""
        waiting, self._freed_later = self._freed_later, []
        notes: list[Any] = []
        for entry in waiting:
            key, heard, running = entry
            if any(is_out(name) for name in running):
                self._freed_later.append(entry)
            else:
                notes.append(blocks_freed(*key, heard, now))
        return notes

    def _introduce_again(self, now: float) -> list[Any]:
        """Repeat Hello to routers that have not answered it."""
        actions: list[Any] = []
        for router in self._member.unanswered(now):
            actions += self._on_router_up(RouterUp(router), now)
        return actions

    def _deserted(self, now: float) -> list[Any]:
        """Abort requests of routers that have been away too long and that no router adopted."""
        gone = self._member.away(now)
        jobs = [job for job in self._jobs if job.router in gone] if gone else []

        def abort(job: Job) -> list[Any]:
            request, attempt = job.key
            return self._abort(job.router, Abort(request=request, attempt=attempt), now)

        actions = self._each(jobs, abort, "deserted", now)
        return [a for a in actions if not isinstance(a, ToRouter) or a.router not in gone]

    # ------------------------------------------------------------------ time

    def _on_tick(self, event: Tick, now: float) -> list[Any]:
        state = self._engine_state(event.layers)
        actions: list[Any] = []
        self.errors.apart(
            actions,
            heartbeat=lambda: self._member.tick(now, state, self.load),
            hello=lambda: self._introduce_again(now),
            deserted=lambda: self._deserted(now),
            **self._timed_parts(now, event),
            drain=self._maybe_drained,
        )
        return actions

    def _end_overdue(self, now: float) -> list[Any]:
        """End the jobs whose deadline has passed."""

        def late(job: Job) -> list[Any]:
            text = "the deadline passed"
            return self._end(job, now, code=DeadlineExceeded.code, message=text)

        return self._each(self._jobs.overdue(now), late, "deadline", now)

    # ------------------------------------------------------------------ drain

    def _on_drain(self, event: DrainRequested, now: float) -> list[Any]:
        return self._drain()

    def _drain(self) -> list[Any]:
        self._member.draining = True
        return [Log("worker.draining", {"requests": len(self._jobs)}), *self._maybe_drained()]

    def _maybe_drained(self) -> list[Any]:
        if not self.is_drained or self._drained_said:
            return []
        self._drained_said = True
        message = Drained(worker=self._member.identity.worker)
        return [ToRouter(router, message) for router in self._member.routers]


WorkerCore.HANDLERS = {
    FromRouter: WorkerCore._on_router,
    RouterUp: WorkerCore._on_router_up,
    RouterDown: WorkerCore._on_router_down,
    DrainRequested: WorkerCore._on_drain,
    Tick: WorkerCore._on_tick,
}
