"""Requests that leave a suspect worker before the worker timeout, because a replay is cheaper.

A suspect worker may continue at once, or never. So a request waits there for as long as a replay
elsewhere is predicted to take, and then moves: its wait is at most twice the shortest possible.
The prediction is made from the speed and the load of the prefill workers. So a long prompt waits
longer than a short one, and the requests of a full cluster stay.

Invariant: a request moves only while a decode worker with a free slot and a prefill worker have
sent messages lately. Each early move of a request doubles its next wait, so that workers which
pause in turn move it only a few times.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from .placement import HEARD_S
from .records import Request, Worker
from .state import RouterState
from .states import State, WorkerState

SHORTEST_S = 0.5
"""Shortest wait at a suspect worker, in seconds; most pauses end within it."""


class EarlyMoves:
    """Decides which requests leave their suspect workers now; ``move`` moves one."""

    def __init__(self, state: RouterState, move: Callable[[Worker, Request, float], None]) -> None:
        self._registry = state.registry
        self._health = state.health
        self._move = move
        self._errors = state.errors

    def tick(self, now: float) -> None:
        """Move the requests whose wait is over."""
        health = self._health
        if health.excused(now):
            return  # this process paused: the workers may have sent messages meanwhile
        for worker in self._registry.live():
            if worker.state is WorkerState.SUSPECT and worker.requests:
                self._look(worker, health.overdue(worker, now), now)

    def _look(self, worker: Worker, waited: float, now: float) -> None:
        if waited < SHORTEST_S:
            return

        def move(request: Request) -> None:
            if request.attempt.server is not worker or self._is_bound(request, worker):
                return
            replay = self._replay_s(request, now)
            if replay is not None and waited >= max(SHORTEST_S, replay) * 2**request.early_moves:
                self._move(worker, request, now)

        self._errors.each(list(worker.requests.values()), move)

    @staticmethod
    def _is_bound(request: Request, worker: Worker) -> bool:
        pinned = request.pin is not None and request.pin[1] == worker.endpoint
        return pinned or request.state is State.FOLLOWED

    def _replay_s(self, request: Request, now: float) -> float | None:
        """Predict the seconds until a replay reaches the next token; None if none can start."""
        registry, pool = self._registry, request.pool
        computing = [w for w in registry.prompt_workers(pool) if now - w.seen_at <= HEARD_S]
        decodes = registry.ready("decode", pool)
        if not computing or not (request.embeds or any(_has_slot(w, now) for w in decodes)):
            return None
        if request.work.file:  # its steps begin anew
            server = request.attempt.server
            seen = now if server is None else server.seen_at
            return max(0.0, seen - request.attempt.assigned_at)
        waits = [
            (worker.burden + request.next) * load.compute_seconds / load.prompt_tokens
            for worker in computing
            if (load := worker.load).prompt_tokens
        ]
        return min(waits, default=None)


def _has_slot(worker: Worker, now: float) -> bool:
    """Return whether a decode worker sent a message lately and has a free batch slot."""
    taken = len(worker.requests) + worker.others_requests
    return now - worker.seen_at <= HEARD_S and taken < worker.max_batch
