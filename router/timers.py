"""Timers: deadlines, repeated messages, and checks of the workers' health.

Invariant: a message that needs an answer is repeated until the answer arrives, and every request
ends at its deadline even if no process answers.
"""

from __future__ import annotations

from ..proto.errors import DeadlineExceeded
from ..proto.wire.messages import Abort, Drain
from .events import ToWorker
from .lifecycle import Lifecycle
from .recovery import Recovery
from .requests import NEVER, Request, State
from .workers import Worker

WORKERS_EVERY_S = 0.05
"""Seconds between checks of all workers."""


class Timers:
    """Evaluates all timers of the router."""

    def __init__(self, life: Lifecycle, recovery: Recovery, now: float) -> None:
        self._life = life
        self._recovery = recovery
        self._workers_next = now
        self._rates_next = now

    def next_time(self) -> float:
        """Return the time at which :meth:`tick` must be called next."""
        requests = self._life.wheel.next_time()
        return self._workers_next if requests is None else min(requests, self._workers_next)

    def tick(self, now: float) -> None:
        """Handle all timers that are due."""
        for request in self._life.wheel.due(now):
            self._request(request, now)
        if now >= self._workers_next:
            self._workers(now)
            self._recovery.tick(now)
        if now >= self._rates_next:
            self._rates_next = now + 1.0
            self._life.admission.roll(now)

    # ------------------------------------------------------------------ requests

    def _request(self, request: Request, now: float) -> None:
        life = self._life
        if now >= request.limit:
            self._over(request, now)
        elif now < request.retry_at:
            life.wake(request, request.retry_at, now)
        elif request.state is State.ASSIGNED:
            life.assign(request, now)
        elif request.state is State.QUEUED:
            life.place(request, now)
        elif request.state is State.RECOVERING:
            self._recovery.continue_search(request, now)
        elif request.state is State.ENDED:
            life.send_terminal(request, now)
        elif request.attempt.waits or request.state is State.FOLLOWED:
            self._recovery.ask(request, now)
        else:
            life.wake(request, NEVER, now)

    def _over(self, request: Request, now: float) -> None:
        """Handle a reached limit: the deadline, the age of the terminal, or the resume window."""
        life = self._life
        if request.state is State.ENDED:
            life.hand_out(request)
            life.forget(request)
        elif now >= request.deadline:
            made = len(request.emitted)
            where = "running" if request.running else request.state.value
            text = f"the deadline passed while {where}, after {made} tokens"
            if request.unreachable:
                text = f"{text}; {request.unreachable}"
            life.fail(request, DeadlineExceeded(text), now)
        else:
            life.cancel(request, now, "client gone")
            life.forget(request)

    # ------------------------------------------------------------------ workers

    def _workers(self, now: float) -> None:
        registry = self._life.registry
        registry.look(now)
        self._workers_next = now + WORKERS_EVERY_S
        for worker, reason in registry.failing(now):
            self._recovery.lose(worker, reason, now)
        self._recovery.suspected(registry.doubtful(now), now)
        for worker in registry.live():
            if worker.aborts:
                self._repeat_aborts(worker, now)
            if now >= worker.drain_at and worker.draining:
                worker.drain_at = now + self._life.config.retry_ceiling_s
                self._life.out.append(ToWorker(worker.identity, Drain()))

    def _repeat_aborts(self, worker: Worker, now: float) -> None:
        later = now + self._life.config.abort_retry_s
        for key, (attempt, repeat_at, until) in list(worker.aborts.items()):
            if now >= until:
                del worker.aborts[key]
                continue
            if now >= repeat_at:
                abort = Abort(request=key, attempt=attempt, reason="repeated")
                self._life.out.append(ToWorker(worker.identity, abort))
            if now >= repeat_at or repeat_at == NEVER:
                worker.aborts[key] = (attempt, later, until)
