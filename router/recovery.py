"""Recovery of requests after the death of a worker or a router, and after lost messages.

Invariant: a stream continues from its client's position. If a worker still holds the request, that
worker continues it; else the router replays prompt and emitted tokens as a higher attempt. A
poisoned request is not replayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..proto.errors import RequestPoisoned, WorkerLost
from ..proto.wire.messages import Abort, Adopt, Moved, PeerDead, RequestState
from .events import ToClient, ToWorker
from .lifecycle import Lifecycle
from .requests import NEVER, PLACED, Request, State, Step
from .takeover import Search
from .unclaimed import Orphans
from .workers import Worker, WorkerState

POISON_BLAME = 1.5
"""A request with more blame than this is poisoned.

The blame for a death is shared equally by the requests on the worker. So a request is poisoned if
it was alone, or nearly alone, at two deaths. A single kill by an operator poisons no request."""
MAX_UNHEARD = 6
"""Unanswered Adopts after which a decode worker is assumed not to have the request."""

DEAD_WORKER_NOTICES = 3
"""How many times PeerDead is repeated for a dead worker."""
NOTICE_INTERVAL_S = 1.0

Holder = tuple[Worker, RequestState]


class Recovery:
    """Finds, replays and fails requests whose current attempt was interrupted."""

    def __init__(self, life: Lifecycle, now: float) -> None:
        self._life = life
        self._until = now + life.config.recovery_s
        self.orphans = Orphans(life, now)
        self.on_lost: Callable[[str], None] = lambda _worker: None
        """Called with the id of every worker that was declared dead."""
        self._search = Search(life)
        # PeerDead messages to repeat: (message, receivers, time, number of times sent).
        self._notices: deque[tuple[PeerDead, list[Worker], float, int]] = deque()

    # ------------------------------------------------------------------ requests of other routers

    def resume(self, request: Request, now: float) -> None:
        """Resume an unknown request: find the worker that holds it, or wait for its Hello."""
        life = self._life
        life.requests[request.key] = request
        life.counters.submitted += 1
        request.state = State.RECOVERING
        request.attempt.foreign = True
        holder = self._holder(request)
        if holder is not None:
            self._adopt(request, *holder, now)
            return
        if not self._search.begin(request, now):
            self._replay_unheld(request, now)

    def continue_search(self, request: Request, now: float) -> None:
        """Continue the search for a resumed request."""
        if not self._search.repeat(request, now):
            self._replay_unheld(request, now)

    def denied(self, request: Request, worker: Worker, now: float) -> None:
        """Note that a worker does not hold the request."""
        if not self._search.denied(request, worker, now):
            self._replay_unheld(request, now)

    def _replay_unheld(self, request: Request, now: float) -> None:
        """Replay a request that no worker holds, but not before ``recovery_s`` has passed.

        Directly after this router's start, some workers may not have registered yet.
        """
        request.attempt.search = None
        if now < self._until:
            self._life.wake(request, self._until, now)
        else:
            self._life.requeue(request, now)

    def found(self, request: Request, worker: Worker, attempt: int, now: float) -> None:
        """Adopt a request whose search has found a worker."""
        request.attempt.number = attempt
        request.attempt.search = None
        request.step(Step.ADOPT)
        self.served_by(request, worker)
        self._follow(request, worker, now)

    def claimed(self, request: Request, worker: Worker, now: float) -> None:
        """Note that a worker has proved its assignment; its tokens follow in the same answer.

        Adopt is repeated later, in case those tokens are lost. After the handoff, a prefill
        worker's proof arrives too late to matter.
        """
        if request.state is State.DECODING and worker.role == "prefill":
            return
        attempt = request.attempt
        if attempt.server is not worker:
            self.served_by(request, worker)
        attempt.answered, attempt.adopts = False, 0
        request.backoff = self._life.config.adopt_retry_s
        self._life.repeat_later(request, now, request.backoff)

    def reclaim(self, request: Request, now: float) -> None:
        """Ask the worker for the tokens again after a Resume of a known request."""
        if request.running:
            self.ask_again(request, now)

    def _follow(self, request: Request, worker: Worker, now: float) -> None:
        """Repeat Adopt to a prefill worker of another router's request until the handoff is known.

        The decode worker sends its tokens to the router that the handoff names: the other one.
        """
        if request.attempt.foreign and worker.role == "prefill" and not request.embeds:
            request.step(Step.FOLLOW)
            request.backoff = self._life.config.adopt_retry_s
            self._life.repeat_later(request, now, request.backoff)
        else:
            self._life.wake(request, NEVER, now)

    def registered(self, worker: Worker, now: float, *, joined: bool) -> None:
        """Handle the requests that a worker's Hello lists, as far as they have a record.

        ``joined``: the worker is new, so no listed request was assigned since this router's start.
        """
        self._notices = deque(
            notice for notice in self._notices if notice[0].incarnation != worker.incarnation
        )
        self.orphans.reported(worker, now)
        for held in list(worker.reported.values()):
            request = self._life.requests.get(held.request)
            if request is None or held.attempt < request.attempt.number:
                continue
            attempt = request.attempt
            asked = attempt.server is worker and not attempt.answered  # the Hello may be older
            if not asked and self._is_elsewhere(request, held):
                self.moved(request, held.router)
            elif joined and held.attempt >= request.own:
                self._collide(request, worker, held, now)
            elif request.state is State.RECOVERING:
                self._adopt(request, worker, held, now)
            elif request.state is State.PREFILLING or request.state is State.FOLLOWED:
                attempt.number = held.attempt
                self.served_by(request, worker)
                self.ask_again(request, now)
            elif attempt.server is worker:
                self.ask_again(request, now)

    def _is_elsewhere(self, request: Request, held: RequestState) -> bool:
        """True if another router has adopted the request, unless its client resumed it here."""
        mine = held.router in ("", self._life.config.name)
        return not mine and not request.done and request.state is not State.RECOVERING

    def moved(self, request: Request, router: str) -> None:
        """Drop the record of a request that another router serves; notify its client, if any."""
        if request.client is not None:
            moved = Moved(request=request.key, router=router)
            self._life.out.append(ToClient(request.client.identity, moved))
        self._life.drop_moved(request)

    def registered_again(self, worker: Worker, now: float) -> None:
        """Handle another Hello of a live worker: requests that it does not list are lost there.

        Its aborts may have been lost with the old connection, so they are repeated at once.
        """
        for key, (attempt, _, _) in worker.aborts.items():
            abort = Abort(request=key, attempt=attempt, reason="repeated")
            self._life.out.append(ToWorker(worker.identity, abort))
        for request in list(worker.requests.values()):
            held = worker.reported.get(request.key)
            missing = held is None or held.attempt < request.attempt.number
            if missing and request.attempt.server is worker:
                self.lost(request, f"worker {worker.id} no longer holds it", now)
        self.registered(worker, now, joined=False)

    def _collide(self, request: Request, worker: Worker, held: RequestState, now: float) -> None:
        """Abort an attempt from before this router's start, and use a higher number for ours.

        The two attempts have the same number, but perhaps different content.
        """
        self._life.abort_on(worker, request.key, held.attempt, request.deadline, "superseded")
        if request.done:
            return
        request.attempt.number = held.attempt
        if request.state is State.QUEUED:
            request.attempt.number += 1
        else:
            self.lost(request, "its attempt number was used before the router's restart", now)

    def _adopt(self, request: Request, worker: Worker, held: RequestState, now: float) -> None:
        request.attempt.foreign = held.router not in ("", self._life.config.name)
        self.found(request, worker, held.attempt, now)
        self.ask_again(request, now)

    def _holder(self, request: Request) -> Holder | None:
        """Return the live worker that reported the highest attempt, preferring decode workers."""
        best: Holder | None = None
        best_rank = (request.attempt.number, False, -1)
        for worker in self._life.registry.reporting:
            held = worker.reported.get(request.key)
            if held is not None:
                rank = (held.attempt, worker.role == "decode", held.position)
                if rank > best_rank:
                    best, best_rank = (worker, held), rank
        return best

    # ------------------------------------------------------------------ lost messages

    def served_by(self, request: Request, worker: Worker) -> None:
        """Record that ``worker`` holds the current attempt."""
        attempt = request.attempt
        worker.requests[request.key] = request
        if worker.role == "prefill":
            if attempt.prefill is not worker:
                attempt.leave_prefill(request.key)
            attempt.prefill = attempt.server = worker
            return
        if attempt.decode is not worker:
            attempt.leave_decode(request.key)
        attempt.decode = worker
        self._life.handed_over(request)

    def ask_again(self, request: Request, now: float) -> None:
        """Send Adopt for the tokens from ``next`` on, and repeat it until the worker answers."""
        attempt = request.attempt
        if not attempt.answered and request.retry_at != NEVER:
            return  # already asking
        attempt.answered, attempt.adopts = False, 0
        request.backoff = self._life.config.adopt_retry_s
        self.ask(request, now)

    def ask(self, request: Request, now: float) -> None:
        """Send Adopt once; after too many unanswered ones the attempt counts as lost."""
        attempt, server = request.attempt, request.attempt.server
        if server is None:
            self.lost(request, "no worker is known to hold it", now)
            return
        if server.role == "decode" and attempt.adopts >= MAX_UNHEARD:
            self.lost(request, f"worker {server.id} does not hold it", now)
            return
        attempt.adopts += 1
        adopt = Adopt(request=request.key, position=request.next)
        self._life.out.append(ToWorker(server.identity, adopt))
        config = self._life.config
        followed = request.state is State.FOLLOWED
        ceiling = config.adopt_retry_s if followed else config.retry_ceiling_s
        self._life.repeat_later(request, now, ceiling)

    # ------------------------------------------------------------------ suspect workers

    def disconnected(self, worker: Worker, now: float) -> None:
        """Handle a closed connection; replay the worker's requests if its process probably ended.

        These requests get a doubt, not a death: if the worker returns, the doubt is removed, and
        the superseded attempts are aborted there.
        """
        life = self._life
        if not life.registry.disconnected(worker, now):
            life.log("worker.suspect", worker=worker.id, reason=worker.reason)
            self._move_waiting(worker, now)
            return
        life.log("worker.suspect", worker=worker.id, reason=f"{worker.reason}, requests move")
        affected = list(worker.requests.values())
        worker.doubted = [request for request in affected if request.attempt.server is worker]
        for request in worker.doubted:
            self._start_over(request)
            request.doubts |= {worker.incarnation}
        for request in affected:
            if worker.draining and request.attempt.server is not worker:
                life.requeue(request, now)  # not running there, and a drain is not a loss
            else:
                self.lost(request, f"the connection of worker {worker.id} closed", now)

    def suspected(self, found: list[tuple[Worker, str]], now: float) -> None:
        """Handle workers without heartbeat or progress: move their waiting prompts, if possible.

        Started requests stay: a worker may continue at once, while a replay starts over. All of the
        workers become suspect before any prompt moves, so no prompt moves between them.
        """
        for worker, reason in found:
            self._life.registry.suspect(worker, reason)
            self._life.log("worker.suspect", worker=worker.id, reason=reason)
        for worker, _ in found:
            self._move_waiting(worker, now)

    def _move_waiting(self, worker: Worker, now: float) -> None:
        life = self._life
        if worker.role != "prefill":
            return
        for request in list(worker.requests.values()):
            computes = request.started or request.state is State.DECODING
            waits = request.state is State.ASSIGNED or not computes
            pinned = request.pin is not None and request.pin[1] == worker.endpoint
            if waits and not pinned and life.registry.ready("prefill", request.pool):
                life.counters.moved += 1
                life.requeue(request, now)

    def returned(self, worker: Worker, now: float) -> None:
        """Handle the return of a suspect worker: remove the doubts of its requests."""
        for request in worker.doubted:
            request.doubts -= {worker.incarnation}
        worker.doubted = []
        self._life.log("worker.returned", worker=worker.id)
        self.ready(now)

    def ready(self, now: float) -> None:
        """Place waiting requests after a worker became ready, also those at suspect workers."""
        for worker in self._life.registry.live():
            if worker.state is WorkerState.SUSPECT:
                self._move_waiting(worker, now)
        self._life.retry_waiting(now)

    # ------------------------------------------------------------------ dead workers

    def lose(self, worker: Worker, reason: str, now: float) -> None:
        """Declare a worker dead, send PeerDead to the others, and replay its requests."""
        life = self._life
        drained = worker.draining
        life.registry.declare_dead(worker, reason)
        life.placement.forget(worker)
        life.log("worker.dead", worker=worker.id, role=worker.role, reason=reason)
        dead = PeerDead(incarnation=worker.incarnation, endpoint=worker.endpoint)
        others = life.registry.live()
        for other in others:
            life.out.append(ToWorker(other.identity, dead))
        self._notices.append((dead, others, now + NOTICE_INTERVAL_S, 1))
        doubted = [request for request in worker.doubted if worker.incarnation in request.doubts]
        for request in doubted:
            request.doubts -= {worker.incarnation}
        self._blame([request for request in doubted if not request.done])
        affected = list(worker.requests.values())
        there = [request for request in affected if request.attempt.server is worker]
        for request in there:
            self._start_over(request)
        self._blame(there)
        for request in affected:
            if drained and request.attempt.server is not worker:
                life.requeue(request, now)  # not running there, and a drain is not a loss
            else:
                self.lost(request, f"worker {worker.id} was lost: {reason}", now)
        for request in doubted:
            self._end_poisoned(request, now)
        worker.doubted = []
        worker.requests.clear()
        worker.aborts.clear()
        self.on_lost(worker.id)
        life.retry_waiting(now)  # a request pinned to this worker can now fail or move

    def tick(self, now: float) -> None:
        """Repeat PeerDead: a decode worker that missed it would keep grants of the dead worker."""
        self.orphans.tick(now)
        while self._notices and self._notices[0][2] <= now:
            dead, others, _, count = self._notices.popleft()
            for other in others:
                if other.live:
                    self._life.out.append(ToWorker(other.identity, dead))
            if count < DEAD_WORKER_NOTICES:
                self._notices.append((dead, others, now + NOTICE_INTERVAL_S, count + 1))

    def _blame(self, there: list[Request]) -> None:
        """Count a death for every request; those with the most deaths so far share the blame."""
        most = max((request.deaths for request in there), default=0)
        likely = [request for request in there if request.deaths == most]
        for request in likely:
            request.blame += 1 / len(likely)
        for request in there:
            request.deaths += 1

    @staticmethod
    def _start_over(request: Request) -> None:
        """Clear deaths, doubts and blame of a request that has progressed since its last loss."""
        if request.progressed:
            request.losses = request.deaths = 0
            request.doubts = frozenset()
            request.blame = 0.0
        request.lost_at = request.next

    def lost(self, request: Request, reason: str, now: float) -> None:
        """Replay a request whose attempt was lost; fail it if it is poisoned or lost too often."""
        if request.state not in PLACED:
            return
        life, config = self._life, self._life.config
        self._start_over(request)
        request.losses += 1
        if self._end_poisoned(request, now):
            return
        if request.losses >= config.max_attempts:
            text = f"{request.losses} attempts were lost, the last because {reason}"
            life.fail(request, WorkerLost(text), now)
        else:
            life.counters.replayed += 1
            life.log("request.replayed", request_id=request.request_id, reason=reason)
            life.requeue(request, now)

    def unreachable(self, request: Request, reason: str, now: float) -> None:
        """Move a request of a failed pair to another pair.

        The request did not cause the failure, so this is neither a death nor a lost attempt. If
        all pairs fail, it is retried with back-off until a pair works or its deadline passes.
        """
        if request.state not in PLACED:
            return
        life = self._life
        request.unreachable = reason
        life.counters.replayed += 1
        life.log("request.replayed", request_id=request.request_id, reason=reason)
        delay = 0.0
        try:
            if life.placement.all_failed(request, now):
                delay = life.back_off(request, life.config.busy_backoff_s, now)
        except WorkerLost as error:
            life.fail(request, error, now)
            return
        life.requeue(request, now, delay)

    def _end_poisoned(self, request: Request, now: float) -> bool:
        """Fail the request with RequestPoisoned and return True if it is poisoned."""
        deadly = request.deaths >= self._life.config.poison_deaths
        if request.done or not deadly or request.blame <= POISON_BLAME or request.progressed:
            return False
        text = f"{request.deaths} workers died with this request; it is not retried"
        self._life.fail(request, RequestPoisoned(text), now)
        return True
