"""Saving requests: after a worker's death, a lost message, this router's own or another's death.

Invariant: a stream goes on from the position its client has, wherever that leads: with the
worker that still holds the request when there is one, else by running prompt and emitted
tokens again under a higher attempt. A request that keeps killing workers is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..proto.errors import RequestPoisoned, WorkerLost
from ..proto.messages import Abort, Adopt, Moved, PeerDead, RequestState
from .events import ToClient, ToWorker
from .lifecycle import Lifecycle
from .orphans import Orphans
from .registry import Worker, WorkerState
from .request import NEVER, Request, State, Step
from .search import Search

POISON_BLAME = 1.5
"""Each death is blamed in equal parts on all requests that were on the worker. More than this
means alone at two deaths, or nearly so; the last one running at an operator's kill is not."""
MAX_UNHEARD = 6
"""Adopts without an answer after which a decode worker does not have the request."""

OBITUARIES = 3
OBITUARY_S = 1.0
"""How often a death is said again, and after which pauses."""

Holder = tuple[Worker, RequestState]


class Recovery:
    """What to do when the ordinary way is interrupted."""

    def __init__(self, life: Lifecycle, now: float) -> None:
        self._life = life
        self._until = now + life.config.recovery_s
        self.orphans = Orphans(life, now)
        self.on_lost: Callable[[str], None] = lambda _worker: None
        """Called with the name of every worker that is dead."""
        self._search = Search(life)
        # To whom to say again, and when; nothing more of a worker that returned.
        self._obituaries: deque[tuple[PeerDead, list[Worker], float, int]] = deque()

    # ------------------------------------------------------------------ this router was away

    def resume(self, request: Request, now: float) -> None:
        """Go on with an unknown request: find the worker that has it, or wait for its Hello."""
        life = self._life
        life.requests[request.key] = request
        life.counters.submitted += 1
        request.state = State.RECOVERING
        request.foreign = True
        holder = self._holder(request)
        if holder is not None:
            self._adopt(request, *holder, now)
            return
        if not self._search.begin(request, now):
            self._nobody_has(request, now)

    def look_on(self, request: Request, now: float) -> None:
        """Go on with a resumed request that no worker has claimed yet."""
        if not self._search.repeat(request, now):
            self._nobody_has(request, now)

    def denied(self, request: Request, worker: Worker, now: float) -> None:
        """A worker that was asked does not have it."""
        if not self._search.denied(request, worker, now):
            self._nobody_has(request, now)

    def _nobody_has(self, request: Request, now: float) -> None:
        """Run it anew; but the workers of a router that has just started may not all be here."""
        request.sought = None
        if now < self._until:
            self._life.wake(request, self._until, now)
        else:
            self._life.requeue(request, now)

    def found(self, request: Request, worker: Worker, attempt: int, now: float) -> None:
        """A worker says that it has a request that was sought."""
        request.attempt = attempt
        request.sought = None
        request.step(Step.ADOPT)
        self.served_by(request, worker)
        self._follow(request, worker, now)

    def claimed(self, request: Request, worker: Worker, now: float) -> None:
        """A worker has proven that it was given the attempt; its tokens come in the same answer.

        They are asked for again, in case they are lost.
        """
        if request.server is not worker:
            self.served_by(request, worker)
        request.heard, request.unheard = False, 0
        request.backoff = self._life.config.adopt_retry_s
        self._life.repeat_later(request, now, request.backoff)

    def reclaim(self, request: Request, now: float) -> None:
        """Its client came by another connection, perhaps from another router, or doubts."""
        if request.state is State.RUNNING:
            self.ask_again(request, now)

    def _follow(self, request: Request, worker: Worker, now: float) -> None:
        """The tokens of a decode worker that was told the other router's name go there."""
        request.followed = request.foreign and worker.role == "prefill" and not request.embeds
        if request.followed:
            request.backoff = self._life.config.adopt_retry_s
            self._life.repeat_later(request, now, request.backoff)
        else:
            self._life.wake(request, NEVER, now)

    def introduced(self, worker: Worker, now: float, *, joined: bool) -> None:
        """A worker said Hello: use what it holds of the requests known here.

        ``joined``: it is new to this router, so nothing it holds was assigned in this life.
        """
        self._obituaries = deque(
            one for one in self._obituaries if one[0].incarnation != worker.incarnation
        )
        self.orphans.reported(worker, now)
        for held in list(worker.reported.values()):
            request = self._life.requests.get(held.request)
            if request is None or held.attempt < request.attempt:
                continue
            asked = request.server is worker and not request.heard  # this Hello may be older
            if not asked and self._is_elsewhere(request, held):
                self.moved(request, held.router)
            elif joined and held.attempt >= request.own:
                self._collide(request, worker, held, now)
            elif request.state is State.RECOVERING:
                self._adopt(request, worker, held, now)
            elif request.state is State.RUNNING and not request.handed:
                request.attempt = held.attempt
                self.served_by(request, worker)
                self.ask_again(request, now)
            elif request.state is State.RUNNING and request.server is worker:
                self.ask_again(request, now)

    def _is_elsewhere(self, request: Request, held: RequestState) -> bool:
        """Whether another router has taken it up since; a client that came back wants it here."""
        mine = held.router in ("", self._life.config.name)
        return not mine and not request.done and request.state is not State.RECOVERING

    def moved(self, request: Request, router: str) -> None:
        """Another router serves it now: tell its client if one is here, and let it go."""
        if request.client is not None:
            moved = Moved(request=request.key, router=router)
            self._life.out.append(ToClient(request.client.identity, moved))
        self._life.drop_moved(request)

    def reintroduced(self, worker: Worker, now: float) -> None:
        """The same incarnation said Hello again: what it does not list it has lost.

        Aborts may have been lost with its connection: they are sent again at once.
        """
        for key, (attempt, _, _) in worker.aborts.items():
            abort = Abort(request=key, attempt=attempt, reason="repeated")
            self._life.out.append(ToWorker(worker.identity, abort))
        for request in list(worker.requests.values()):
            held = worker.reported.get(request.key)
            missing = held is None or held.attempt < request.attempt
            if missing and request.server is worker:
                self.lost(request, f"worker {worker.id} does not have it any more", now)
        self.introduced(worker, now, joined=False)

    def _collide(self, request: Request, worker: Worker, held: RequestState, now: float) -> None:
        """An earlier life used this attempt's number, perhaps for another content: rise above."""
        self._life.abort_on(worker, request.key, held.attempt, request.deadline, "superseded")
        if request.done:
            return
        request.attempt = held.attempt
        if request.state is State.QUEUED:
            request.attempt += 1
        else:
            self.lost(request, "its attempt has the number of an earlier one", now)

    def _adopt(self, request: Request, worker: Worker, held: RequestState, now: float) -> None:
        request.foreign = held.router not in ("", self._life.config.name)
        self.found(request, worker, held.attempt, now)
        self.ask_again(request, now)

    def _holder(self, request: Request) -> Holder | None:
        """The live worker that reported the highest attempt; decode before prefill."""
        best: Holder | None = None
        best_rank = (request.attempt, False, -1)
        for worker in self._life.registry.reporting:
            held = worker.reported.get(request.key)
            if held is not None:
                rank = (held.attempt, worker.role == "decode", held.position)
                if rank > best_rank:
                    best, best_rank = (worker, held), rank
        return best

    # ------------------------------------------------------------------ messages were lost

    def served_by(self, request: Request, worker: Worker) -> None:
        """``worker`` turned out to have the current attempt."""
        worker.requests[request.key] = request
        if worker.role == "prefill":
            before = request.prefill
            if before is not None and before is not worker:
                before.requests.pop(request.key, None)
                before.outstanding -= request.prefill_cost
                request.prefill_cost = 0
            request.prefill = request.server = worker
            return
        other = request.decode
        if other is not None and other is not worker:
            other.requests.pop(request.key, None)
            other.outstanding -= request.decode_cost
            request.decode_cost = 0
        request.decode = worker
        request.followed = False
        self._life.handed_over(request)

    def ask_again(self, request: Request, now: float) -> None:
        """Ask its worker for the tokens from ``next`` on, until it is heard."""
        if not request.heard and request.retry_at != NEVER:
            return  # already asking
        request.heard = False
        request.unheard = 0
        request.backoff = self._life.config.adopt_retry_s
        self.ask(request, now)

    def ask(self, request: Request, now: float) -> None:
        """Send the Adopt; a decode worker that never answers does not have the request."""
        server = request.server
        if server is None:
            self.lost(request, "no worker is known to have it", now)
            return
        if server.role == "decode" and request.unheard >= MAX_UNHEARD:
            self.lost(request, f"worker {server.id} does not have it", now)
            return
        request.unheard += 1
        adopt = Adopt(request=request.key, position=request.next)
        self._life.out.append(ToWorker(server.identity, adopt))
        config = self._life.config
        ceiling = config.adopt_retry_s if request.followed else config.retry_ceiling_s
        self._life.repeat_later(request, now, ceiling)

    # ------------------------------------------------------------------ suspect workers

    def disconnected(self, worker: Worker, now: float) -> None:
        """Its connection closed: move its requests at once if its process seems to have ended.

        Whether it has is known later, so these requests are only doubted: if the worker returns
        its end is not held against them, and what it still holds of them is aborted.
        """
        life = self._life
        if not life.registry.disconnected(worker, now):
            life.log("worker.suspect", worker=worker.id, reason=worker.reason)
            self._move_waiting(worker, now)
            return
        life.log("worker.suspect", worker=worker.id, reason=f"{worker.reason}, requests move")
        affected = list(worker.requests.values())
        worker.doubted = [request for request in affected if request.server is worker]
        for request in worker.doubted:
            self._start_over(request)
            request.doubts |= {worker.incarnation}
        for request in affected:
            if worker.draining and request.server is not worker:
                life.requeue(request, now)  # it was never there: an ordered end is no loss
            else:
                self.lost(request, f"the connection of worker {worker.id} closed", now)

    def suspected(self, found: list[tuple[Worker, str]], now: float) -> None:
        """Workers show no heartbeat or no progress: move what only waits there, if it can move.

        What they already compute stays: it may go on at once, and a replay begins at the start.
        All of them are suspect before anything moves, so nothing moves from one to another.
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
            waits = request.state is State.ASSIGNED or not (request.started or request.handed)
            pinned = request.pin is not None and request.pin[1] == worker.endpoint
            if waits and not pinned and life.registry.ready("prefill", request.pool):
                life.counters.moved += 1
                life.requeue(request, now)

    def returned(self, worker: Worker, now: float) -> None:
        """A suspect worker is back with the same incarnation: nothing died with it."""
        for request in worker.doubted:
            request.doubts -= {worker.incarnation}
        worker.doubted = []
        self._life.log("worker.returned", worker=worker.id)
        self.ready(now)

    def ready(self, now: float) -> None:
        """A worker takes requests (again): move to it what waits at suspect workers."""
        for worker in self._life.registry.live():
            if worker.state is WorkerState.SUSPECT:
                self._move_waiting(worker, now)
        self._life.retry_waiting(now)

    # ------------------------------------------------------------------ workers died

    def lose(self, worker: Worker, reason: str, now: float) -> None:
        """A worker is dead: notify the others and save its requests."""
        life = self._life
        drained = worker.draining
        life.registry.bury(worker, reason)
        life.placement.forget(worker)
        life.log("worker.dead", worker=worker.id, role=worker.role, reason=reason)
        dead = PeerDead(incarnation=worker.incarnation, endpoint=worker.endpoint)
        others = life.registry.live()
        for other in others:
            life.out.append(ToWorker(other.identity, dead))
        self._obituaries.append((dead, others, now + OBITUARY_S, 1))
        doubted = [one for one in worker.doubted if worker.incarnation in one.doubts]
        for request in doubted:
            request.doubts -= {worker.incarnation}
        self._blame([request for request in doubted if not request.done])
        affected = list(worker.requests.values())
        there = [request for request in affected if request.server is worker]
        for request in there:
            self._start_over(request)
        self._blame(there)
        for request in affected:
            if drained and request.server is not worker:
                life.requeue(request, now)  # it was never there: an ordered end is no loss
            else:
                self.lost(request, f"worker {worker.id} died: {reason}", now)
        for request in doubted:
            self._end_poisoned(request, now)
        worker.doubted = []
        worker.requests.clear()
        worker.aborts.clear()
        self.on_lost(worker.id)
        life.retry_waiting(now)  # what is bound to this worker alone need not wait any more

    def tick(self, now: float) -> None:
        """Say some deaths again: a decode worker that missed one would keep blocks for it."""
        self.orphans.tick(now)
        while self._obituaries and self._obituaries[0][2] <= now:
            dead, others, _, said = self._obituaries.popleft()
            for other in others:
                if other.live:
                    self._life.out.append(ToWorker(other.identity, dead))
            if said < OBITUARIES:
                self._obituaries.append((dead, others, now + OBITUARY_S, said + 1))

    def _blame(self, there: list[Request]) -> None:
        """Share a death among the requests on the worker that saw most deaths before."""
        most = max((request.deaths for request in there), default=0)
        likely = [request for request in there if request.deaths == most]
        for request in likely:
            request.blame += 1 / len(likely)
        for request in there:
            request.deaths += 1

    @staticmethod
    def _start_over(request: Request) -> None:
        """What was passed unharmed since the last loss speaks for the request."""
        if request.progressed:
            request.losses = request.deaths = 0
            request.doubts = frozenset()
            request.blame = 0.0
        request.lost_at = request.next

    def lost(self, request: Request, reason: str, now: float) -> None:
        """The current attempt cannot be finished: run it again, unless that has no point."""
        if request.state is not State.ASSIGNED and request.state is not State.RUNNING:
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
        """Its two workers live and cannot reach each other: run it on another pair.

        The request is not to blame, so this counts neither as a death nor as a lost attempt: where
        no pair works it is tried again, ever less often, until one does or its deadline passes.
        """
        if request.state is not State.ASSIGNED and request.state is not State.RUNNING:
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
        """End a request that has killed its workers; whether it has."""
        deadly = request.deaths >= self._life.config.poison_deaths
        if request.done or not deadly or request.blame <= POISON_BLAME or request.progressed:
            return False
        text = f"{request.deaths} workers died with this request; it is not tried again"
        self._life.fail(request, RequestPoisoned(text), now)
        return True
