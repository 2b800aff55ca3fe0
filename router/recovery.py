"""Recovery of requests after the death of a worker, and after lost messages.

Invariant: a stream continues from its client's position. If a worker still holds the request, that
worker continues it; else the router replays prompt and emitted tokens as a higher attempt. A
poisoned request is not replayed.

Theory of operation
-------------------

The router keeps each token that it relayed, and a draw depends on the request's seed and the
token's position alone. So prompt and emitted tokens are the whole state of a request: any pair of
workers can compute the KV again and continue with the same tokens. Rejected: keep a second copy of
the KV on another worker. That costs memory and a transfer for each token, to shorten a rare replay.

What happened decides what is done, from the cheapest remedy to the dearest:

- *Tokens or a terminal beyond the next position*: a message was lost. :meth:`.Lifecycle.ask_again`
  repeats Adopt, which asks the worker for its tokens from ``next`` on. A decode worker that leaves
  ``MAX_UNHEARD`` Adopts unanswered counts as not having the request, although it sends heartbeats.
- *A pair of workers cannot reach each other*: :meth:`.Lifecycle.unreachable` moves the request to
  another pair. This counts as no loss: a broken link would else end its requests with WorkerLost.
- *Silence*: the worker is suspect. Prompts that only wait move at once. Running requests stay,
  since the worker may continue at the next moment (:mod:`.early_moves` limits that wait).
- *A connection closed right after a message*: the process has probably ended, so its requests are
  replayed at once. They get a doubt instead of a death: if the worker returns, the doubt is removed
  and the superseded attempts are aborted there.
- *The worker timeout, a certificate of death, a successor*: the worker is dead. Its requests are
  replayed, and other workers receive PeerDead, so that they free what they hold for it. PeerDead is
  sent three times and is not acknowledged: mostly the handoff timeout would free the same blocks.

Deaths, doubts and losses count since a request's last progress. A request that is at two deaths,
and was nearly alone there, is poisoned; see ``POISON_BLAME``. Rejected: count deaths alone. Then
killing two busy workers would end each request that had run on both.

All workers that one event concerns become suspect before any request moves. Else, after a pause of
this process, the requests of one dead worker would move to the next dead one. The parts of a loss
run apart from each other: an exception in one must not keep the others from running, since nothing
repeats a loss.

This module handles all requests of a suspect, dead or returned worker; :class:`.Lifecycle` replays
or fails each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from baton.proto.wire.messages import PeerDead

from .events import Log, ToWorker
from .records import Request, Worker
from .state import Life, RouterState
from .states import State, WorkerState

Losses = Sequence[tuple[Worker, str]]
"""Workers, each with the reason."""
DEAD_WORKER_NOTICES = 3
"""How many times PeerDead is repeated for a dead worker."""
NOTICE_INTERVAL_S = 1.0


class WorkerLosses:
    """Moves requests away from suspect and dead workers, and reports deaths to other workers.

    ``on_lost``: called with the id of every worker that was declared dead.
    """

    def __init__(
        self,
        state: RouterState,
        life: Life,
        on_lost: Callable[[str], None],
    ) -> None:
        self._out = state.out
        self._registry = state.registry
        self._placement = state.placement
        self._life = life
        self._metrics = state.metrics
        self._errors = state.errors
        self._on_lost = on_lost
        # PeerDead messages to repeat: (message, receivers, time, number of times sent).
        self._notices: deque[tuple[PeerDead, list[Worker], float, int]] = deque()

    def registered(self, worker: Worker) -> None:
        """Stop reporting an incarnation as dead that has registered again."""
        self._notices = deque(
            notice for notice in self._notices if notice[0].incarnation != worker.incarnation
        )

    def disconnected(self, workers: list[Worker], now: float) -> None:
        """Handle closed connections; replay the requests of each process that probably ended.

        All of the workers become suspect before any request moves.
        """
        ended = [self._registry.disconnected(worker, now) for worker in workers]
        for worker, has_ended in zip(workers, ended, strict=True):
            reason = f"{worker.reason}, requests move" if has_ended else worker.reason
            self._out.append(Log("worker.suspect", {"worker": worker.id, "reason": reason}))
        for worker, has_ended in zip(workers, ended, strict=True):
            if has_ended:
                self._move_all(worker, now)
            else:
                self._move_waiting(worker, now)

    def _move_all(self, worker: Worker, now: float) -> None:
        """Replay the requests of a worker whose process has probably ended.

        They get a doubt, not a death: if the worker returns, the doubt is removed, and the
        superseded attempts are aborted there.
        """
        affected = list(worker.requests.values())
        for request in affected:
            if request.attempt.server is worker:
                self._doubt(worker, request)

        def move(request: Request) -> None:
            if worker.draining and request.attempt.server is not worker:
                # Not running there, and a drain is not a loss.
                self._life.requeue(request, now, f"{worker.id} drained and disconnected")
            else:
                self._life.lost(request, f"the connection of worker {worker.id} closed", now)

        self._errors.each(affected, move)

    def _doubt(self, worker: Worker, request: Request) -> None:
        request.start_over()
        request.doubts |= {worker.incarnation}
        worker.doubted.append(request)

    def move_early(self, worker: Worker, request: Request, now: float) -> None:
        """Move a request of a suspect worker: a doubt, as in :meth:`_move_all`, but no loss."""
        self._doubt(worker, request)
        request.early_moves += 1
        reason = f"worker {worker.id} is suspect: {worker.reason}"
        self._metrics.replayed += 1
        fields: dict[str, object] = {"request_id": request.request_id, "reason": reason}
        self._out.append(Log("request.replayed", fields))
        self._life.requeue(request, now, reason)

    def judged(self, lost: Losses, doubtful: Losses, now: float) -> None:
        """Handle workers without heartbeat or progress: the lost ones, and those newly suspect.

        Started requests of a suspect worker stay: it may continue at once, while a replay starts
        over. All of the workers become suspect before any request moves. So no request moves to
        another of them, as after a pause of this process, when several are lost at once.
        """
        for worker, reason in doubtful:
            self._registry.suspect(worker, reason)
            self._out.append(Log("worker.suspect", {"worker": worker.id, "reason": reason}))
        self.lose_all(lost, now)
        for worker, _ in doubtful:
            if worker.live:
                self._move_waiting(worker, now)

    def _move_waiting(self, worker: Worker, now: float) -> None:
        def move(request: Request) -> None:
            attempt = request.attempt
            if worker is not attempt.assignee or (attempt.prefill is None and not attempt.local):
                return  # a handoff reached it, or may
            computes = request.started or (request.state is State.DECODING and not attempt.local)
            waits = request.state is State.ASSIGNED or not computes
            pinned = request.pin is not None and request.pin[1] == worker.endpoint
            if waits and not pinned and self._registry.prompt_workers(request.pool):
                self._metrics.moved += 1
                self._life.requeue(request, now, f"{worker.id} is suspect: {worker.reason}")

        self._errors.each(list(worker.requests.values()), move)

    def returned(self, worker: Worker, now: float) -> None:
        """Handle the return of a suspect worker: remove the doubts of its requests."""
        for request in worker.doubted:
            request.doubts -= {worker.incarnation}
        worker.doubted = []
        self._out.append(Log("worker.returned", {"worker": worker.id}))
        self.ready(now)

    def ready(self, now: float) -> None:
        """Place waiting requests after a worker became ready, also those at suspect workers."""
        for worker in self._registry.live():
            if worker.state is WorkerState.SUSPECT:
                self._move_waiting(worker, now)
        self._life.retry_waiting(now)

    def lose_all(self, lost: Losses, now: float, *, taken_over: bool = False) -> None:
        """Declare workers dead, send PeerDead to the others, and replay their requests.

        All of the workers become suspect before any request moves. ``taken_over``: another process
        took their name or address. If the connection of such a worker is open, its process did not
        end, so no request is blamed.
        """
        blameless = {worker for worker, _ in lost if taken_over and worker.connected}
        for worker, reason in lost:
            self._registry.suspect(worker, reason)
        for worker, reason in lost:
            lose = partial(self._lose, worker, reason, now, blamed=worker not in blameless)
            self._errors.apart(worker.id, lose)

    def _lose(self, worker: Worker, reason: str, now: float, *, blamed: bool) -> None:
        """Each part runs even if an earlier one raised: nothing repeats a loss."""
        drained = worker.draining
        affected = list(worker.requests.values())
        doubted = [request for request in worker.doubted if worker.incarnation in request.doubts]
        for request in doubted:
            request.doubts -= {worker.incarnation}

        def announce() -> None:
            self._out.append(
                Log("worker.dead", {"worker": worker.id, "role": worker.role, "reason": reason})
            )
            dead = PeerDead(
                incarnation=worker.incarnation, endpoint=worker.endpoint, key=worker.key
            )
            others = self._registry.live()
            self._notices.append((dead, others, now + NOTICE_INTERVAL_S, 1))
            for other in others:
                self._out.append(ToWorker(other.identity, dead))

        def blame() -> None:
            running = [request for request in doubted if not request.done]
            there = [request for request in affected if request.attempt.server is worker]
            for request in there:
                request.start_over()
            if blamed:  # one death, which the requests that moved early share with the others
                self._blame([*running, *there])

        def move(request: Request) -> None:
            if drained and request.attempt.server is not worker:
                # Not running there, and a drain is not a loss.
                self._life.requeue(request, now, f"{worker.id} drained and was lost")
            else:
                self._life.lost(request, f"worker {worker.id} was lost: {reason}", now)

        apart = partial(self._errors.apart, worker.id)
        apart(lambda: self._registry.declare_dead(worker, reason))
        apart(lambda: self._placement.forget(worker))
        apart(announce)
        apart(blame)
        self._errors.each(affected, move)
        self._errors.each(doubted, lambda request: self._life.end_poisoned(request, now))
        worker.doubted = []
        worker.requests.clear()
        worker.aborts.clear()
        apart(lambda: self._on_lost(worker.id))
        # A request pinned to this worker can now fail or move.
        self._life.retry_waiting(now)

    @staticmethod
    def _blame(there: list[Request]) -> None:
        """Count a death for every request; those with the most deaths so far share the blame."""
        most = max((request.deaths for request in there), default=0)
        likely = [request for request in there if request.deaths == most]
        for request in likely:
            request.blame += 1 / len(likely)
        for request in there:
            request.deaths += 1

    def tick(self, now: float) -> None:
        """Repeat PeerDead: a decode worker that missed it would keep grants of the dead worker."""
        while self._notices and self._notices[0][2] <= now:
            dead, others, _, count = self._notices.popleft()
            for other in others:
                if other.live:
                    self._out.append(ToWorker(other.identity, dead))
            if count < DEAD_WORKER_NOTICES:
                self._notices.append((dead, others, now + NOTICE_INTERVAL_S, count + 1))
