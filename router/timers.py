"""Timers: deadlines, repeated messages, and checks of the workers' health.

Invariant: a message that needs an answer is repeated until the answer arrives, and every request
ends at its deadline even if no process answers.
"""

from __future__ import annotations

from baton.proto.errors import DeadlineExceeded
from baton.proto.wire.messages import Abort, Drain

from .early_moves import EarlyMoves
from .events import Tick, ToWorker
from .history import History
from .lifecycle import Lifecycle
from .records import CLIENT_GONE, NEVER, Request, Worker
from .recovery import WorkerLosses
from .state import RouterState
from .states import State
from .takeover import Takeover

WORKERS_EVERY_S = 0.05
"""Seconds between checks of all workers."""


class Timers:
    """Evaluates all timers of the router."""

    def __init__(
        self,
        state: RouterState,
        lifecycle: Lifecycle,
        takeover: Takeover,
        losses: WorkerLosses,
        history: History,
    ) -> None:
        self._config = state.config
        self._out = state.out
        self._table = state.table
        self._registry = state.registry
        self._health = state.health
        self._admission = state.admission
        self._lifecycle = lifecycle
        self._takeover = takeover
        self._losses = losses
        self._early_moves = EarlyMoves(state, losses.move_early)
        self._history = history
        self._errors = state.errors
        self._workers_next = state.started_at
        self._rates_next = state.started_at

    def next_time(self) -> float:
        """Return the time at which :meth:`tick` must be called next."""
        requests = self._table.timers.next_time()
        return self._workers_next if requests is None else min(requests, self._workers_next)

    def tick(self, _event: Tick, now: float) -> None:
        """Handle all timers that are due."""
        apart = self._errors.apart
        self._errors.each(self._table.timers.due(now), lambda request: self._request(request, now))
        if now >= self._workers_next:
            self._workers_next = now + WORKERS_EVERY_S
            apart("the workers' timers", lambda: self._workers(now))
            apart("early moves", lambda: self._early_moves.tick(now))
            apart("unclaimed requests", lambda: self._takeover.unclaimed.tick(now))
            apart("notices of dead workers", lambda: self._losses.tick(now))
            apart("history", lambda: self._history.tick(now))
        if now >= self._rates_next:
            self._rates_next = now + 1.0
            apart("rates", lambda: self._admission.roll(now))

    # ------------------------------------------------------------------ requests

    def _request(self, request: Request, now: float) -> None:
        if now >= request.limit:
            self._over(request, now)
        elif now < request.retry_at:
            self._table.wake(request, request.retry_at, now)
        elif request.state is State.ASSIGNED:
            self._lifecycle.assign(request, now)
        elif request.state is State.QUEUED:
            self._lifecycle.place(request, now)
        elif request.state is State.RECOVERING:
            self._takeover.continue_search(request, now)
        elif request.state is State.ENDED:
            self._lifecycle.send_terminal(request, now)
        elif request.attempt.waits or request.state is State.FOLLOWED:
            self._lifecycle.ask(request, now)
        else:
            self._table.wake(request, NEVER, now)

    def _over(self, request: Request, now: float) -> None:
        """Handle a reached limit: the deadline, the age of the terminal, or the resume window."""
        if request.state is State.ENDED:
            self._lifecycle.hand_out(request)
            self._lifecycle.forget(request)
        elif now >= request.deadline:
            made = len(request.emitted)
            where = "running" if request.running else request.state.value
            text = f"the deadline passed while {where}, after {made} tokens"
            if request.unreachable:
                text = f"{text}; {request.unreachable}"
            self._lifecycle.fail(request, DeadlineExceeded(text), now)
        else:
            self._lifecycle.cancel(request, now, CLIENT_GONE)
            self._lifecycle.forget(request)

    # ------------------------------------------------------------------ workers

    def _workers(self, now: float) -> None:
        registry, health = self._registry, self._health
        health.look(registry.live(), now)
        lost = health.failing(registry.live(), now)
        self._losses.judged(lost, health.doubtful(registry.live(), now), now)
        for worker in registry.live():
            if worker.aborts:
                self._repeat_aborts(worker, now)
            if now >= worker.drain_at and worker.draining:
                worker.drain_at = now + self._config.retry_ceiling_s
                self._out.append(ToWorker(worker.identity, Drain()))

    def _repeat_aborts(self, worker: Worker, now: float) -> None:
        later = now + self._config.abort_retry_s
        for key, (attempt, repeat_at, until) in list(worker.aborts.items()):
            if now >= until:
                del worker.aborts[key]
                continue
            if now >= repeat_at:
                abort = Abort(request=key, attempt=attempt, reason="repeated")
                self._out.append(ToWorker(worker.identity, abort))
            if now >= repeat_at or repeat_at == NEVER:
                worker.aborts[key] = (attempt, later, until)
