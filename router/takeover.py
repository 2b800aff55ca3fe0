"""Requests that began elsewhere: at another router, or before a restart of this one.

Theory of operation
-------------------

Routers share no state and exchange no messages. Only the record of a request is lost with its
router: the client has the prompt, the tokens so far and the request's secret, and a worker has the
KV blocks. The client sends Resume with the prompt, the tokens and the secret. :class:`Search` sends
Adopt to every worker. The worker that holds the request proves the assignment
(:class:`.authorization.Proofs`) and sends its tokens; every other worker denies it with Aborted.
Rejected: a store that all routers write to, which would have to outlive the routers and would be
written at each token. Rejected: send Adopt only to workers that the client names. A client cannot
know where its request is between two tokens, and could name a worker that helps it to take over
the request of another client.

A request can move from a prefill to a decode worker during the search, but never back. So after
all workers have denied it, a second round asks the decode workers once more. If all of them deny
it again, no worker holds the request, and the router replays it. Adopt is repeated to a worker that
does not answer, until the worker is dead or the search ends. A search that misses the holder costs
a second computation, never a wrong token: the replay has a higher attempt number, and the holder's
attempt is aborted. The number rises by ``TAKEOVER``, since the router that counted the attempts may
be alive, cut off, and still raising its own numbers.

Right after a start some workers have not registered yet, so a request that no worker holds is not
replayed before ``recovery_s`` has passed. The Hello of a worker lists the requests that it holds:

- A request that its client has resumed here is adopted, without a search.
- A request that no client has resumed continues for ``orphan_grace_s``. Then it is aborted, so that
  no blocks stay allocated without a client (:class:`UnclaimedRequests`).
- A request with the attempt number of a new request here is aborted, and the new request gets a
  higher number, because the contents may differ (:meth:`Takeover._collide`).
- A request that another router has adopted is dropped here without an Abort, and its client is
  notified with Moved. The worker serves the router that sent the last Adopt.

If the search finds a request of another router at its prefill worker, the handoff names that
router, and the decode worker will send the tokens there. So Adopt is repeated to the prefill worker
until the handoff is known (state FOLLOWED).
"""

from __future__ import annotations

from baton.proto.wire.messages import Abort, Adopt, Moved, RequestState

from .events import ToClient, ToWorker
from .records import NEVER, OpenSearch, Request, Worker
from .state import Life, RouterState
from .states import State, Step

SEARCH_S = 2.5
"""Longest search in seconds; after it the request is replayed."""

Holder = tuple[Worker, RequestState]


class Search:
    """Sends Adopt to workers and collects their denials."""

    def __init__(self, state: RouterState) -> None:
        self._config = state.config
        self._out = state.out
        self._table = state.table
        self._registry = state.registry

    def begin(self, request: Request, now: float) -> bool:
        """Send Adopt to all workers; return False if no worker can answer."""
        sought = request.attempt.search = OpenSearch(now + SEARCH_S)
        return self._ask(request, sought, request.roles, now)

    def repeat(self, request: Request, now: float) -> bool:
        """Repeat Adopt to workers without an answer; return False if the search has ended."""
        sought = request.attempt.search
        if sought is None or now >= sought.until:
            return False
        sought.waiting = {key: one for key, one in sought.waiting.items() if _answers(one)}
        if not sought.waiting:
            return self._second_round(request, sought, now)
        self._send(request, sought, now)
        return True

    def denied(self, request: Request, worker: Worker, now: float) -> bool:
        """Note that ``worker`` does not hold the request; return False if the search has ended."""
        sought = request.attempt.search
        if sought is None or sought.waiting.pop(worker.incarnation, None) is None:
            return True  # it got no Adopt, or has answered already
        return bool(sought.waiting) or self._second_round(request, sought, now)

    def _second_round(self, request: Request, sought: OpenSearch, now: float) -> bool:
        if sought.second_round or request.embeds:
            return False
        sought.second_round = True
        return self._ask(request, sought, ("decode",), now)

    def _ask(
        self, request: Request, sought: OpenSearch, roles: tuple[str, ...], now: float
    ) -> bool:
        live = self._registry.live()
        workers = [worker for worker in live if worker.role in roles and _answers(worker)]
        sought.waiting = {worker.incarnation: worker for worker in workers}
        self._send(request, sought, now)
        return bool(workers)

    def _send(self, request: Request, sought: OpenSearch, now: float) -> None:
        adopt = Adopt(request=request.key, position=request.next)
        self._out += [ToWorker(one.identity, adopt) for one in sought.waiting.values()]
        retry = now + self._config.adopt_retry_s
        self._table.wake(request, min(retry, sought.until), now)


def _answers(worker: Worker) -> bool:
    """True if the worker can answer. A disconnected worker lists its requests when it returns."""
    return worker.live and not worker.hung_up


class UnclaimedRequests:
    """Decides which requests without a record here may continue at their workers.

    These requests began before a restart of the router. For ``orphan_grace_s`` their clients may
    resume them. After that the router aborts every unknown request that a worker reports, so that
    no blocks stay allocated without a client. A client that resumes later gets a replay.
    """

    def __init__(self, state: RouterState, life: Life) -> None:
        self._config = state.config
        self._table = state.table
        self._registry = state.registry
        self._life = life
        self._until = state.started_at + state.config.orphan_grace_s
        self._swept = False

    def expected(self, worker: Worker, key: bytes, attempt: int, now: float) -> bool:
        """True if a client may still resume the attempt that ``worker`` holds."""
        held = worker.reported.get(key)
        return held is not None and self._is_ours(held) and not self._is_over(key, attempt, now)

    def unknown(self, worker: Worker, key: bytes, attempt: int, now: float) -> None:
        """Abort a request without a record that a worker reports, unless it may continue."""
        if self._is_over(key, attempt, now):
            self._life.abort_on(worker, key, attempt, NEVER, "unknown")

    def reported(self, worker: Worker, now: float) -> None:
        """Abort the listed requests of a worker that may not continue."""
        for held in list(worker.reported.values()):
            key = held.request
            known = key in self._table.requests
            if not known and self._is_ours(held) and self._is_over(key, held.attempt, now):
                self._drop(worker, held)

    def cancelled(self, key: bytes) -> None:
        """Abort an unknown request on every worker that holds it; its client cancelled it."""
        for worker in self._registry.reporting:
            held = worker.reported.get(key)
            if held is not None and self._is_ours(held):
                self._drop(worker, held)

    def highest(self, key: bytes) -> int:
        """Return the highest attempt of an unknown request that a worker reports, else 0."""
        highest = 0
        for worker in self._registry.reporting:
            held = worker.reported.get(key)
            if held is not None:
                highest = max(highest, held.attempt)
        return highest

    def tick(self, now: float) -> None:
        """Abort the remaining requests once the grace period has passed."""
        if not self._swept and now >= self._until:
            self._swept = True
            for worker in self._registry.live():
                self.reported(worker, now)

    def _drop(self, worker: Worker, held: RequestState) -> None:
        del worker.reported[held.request]
        self._table.remember_attempt(held.request, held.attempt)
        self._life.abort_on(worker, held.request, held.attempt, NEVER, "not resumed")

    def _is_ours(self, held: RequestState) -> bool:
        return held.router == self._config.name

    def _is_over(self, key: bytes, attempt: int, now: float) -> bool:
        ended = attempt <= self._table.last_attempt(key) or self._table.cancelled.holds(key, now)
        return ended or now >= self._until


class Takeover:
    """Adopts requests that workers hold, and replays requests that no worker holds."""

    def __init__(self, state: RouterState, life: Life) -> None:
        self._errors = state.errors
        self._config = state.config
        self._out = state.out
        self._table = state.table
        self._life = life
        self._registry = state.registry
        self._metrics = state.metrics
        self._until = state.started_at + state.config.recovery_s
        self._search = Search(state)
        self.unclaimed = UnclaimedRequests(state, life)

    def resume(self, request: Request, now: float) -> None:
        """Resume an unknown request: find the worker that holds it, or wait for its Hello."""
        self._table.add(request)
        self._metrics.submitted += 1
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
            self._table.wake(request, self._until, now)
        else:
            self._life.requeue(request, now, "no worker holds it")

    def found(self, request: Request, worker: Worker, attempt: int, now: float) -> None:
        """Adopt a request whose search has found a worker."""
        request.attempt.number = attempt
        request.attempt.search = None
        request.step(Step.ADOPT)
        self._life.served_by(request, worker)
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
            self._life.served_by(request, worker)
        attempt.answered, attempt.adopts = False, 0
        request.backoff = self._config.adopt_retry_s
        self._table.repeat_later(request, now, request.backoff)

    def _follow(self, request: Request, worker: Worker, now: float) -> None:
        """Repeat Adopt to a prefill worker of another router's request until the handoff is known.

        The decode worker sends its tokens to the router that the handoff names: the other one.
        """
        if request.attempt.foreign and worker.role == "prefill" and not request.embeds:
            request.step(Step.FOLLOW)
            request.backoff = self._config.adopt_retry_s
            self._table.repeat_later(request, now, request.backoff)
        else:
            self._table.wake(request, NEVER, now)

    def registered(self, worker: Worker, now: float, *, joined: bool) -> None:
        """Handle the requests that a worker's Hello lists, as far as they have a record.

        ``joined``: the worker is new, so no listed request was assigned since this router's start.
        """
        self.unclaimed.reported(worker, now)
        for held in list(worker.reported.values()):
            request = self._table.requests.get(held.request)
            if request is None or held.attempt < request.attempt.number:
                continue
            try:
                self._listed(request, held, worker, now, joined=joined)
            except Exception as error:
                self._errors.of_request(error, request.key)

    def _listed(
        self, request: Request, held: RequestState, worker: Worker, now: float, *, joined: bool
    ) -> None:
        """Handle one request that a worker's Hello lists."""
        attempt = request.attempt
        asked = attempt.server is worker and not attempt.answered  # the Hello may be older
        if not asked and self._is_elsewhere(request, held):
            self.moved(request, held.router, now)
        elif joined and held.attempt >= request.own:
            self._collide(request, worker, held, now)
        elif request.state is State.RECOVERING:
            self._adopt(request, worker, held, now)
        elif request.state is State.PREFILLING or request.state is State.FOLLOWED:
            attempt.number = held.attempt
            self._life.served_by(request, worker)
            self._life.ask_again(request, now)
        elif attempt.server is worker:
            self._life.ask_again(request, now)

    def _is_elsewhere(self, request: Request, held: RequestState) -> bool:
        """True if another router has adopted the request, unless its client resumed it here."""
        mine = held.router in ("", self._config.name)
        return not mine and not request.done and request.state is not State.RECOVERING

    def moved(self, request: Request, router: str, now: float) -> None:
        """Drop the record of a request that another router serves; notify its client, if any."""
        if request.client is not None:
            moved = Moved(request=request.key, router=router)
            self._out.append(ToClient(request.client.identity, moved))
        self._life.drop_moved(request, router, now)

    def registered_again(self, worker: Worker, now: float) -> None:
        """Handle another Hello of a live worker: requests that it does not list are lost there.

        Its aborts may have been lost with the old connection, so they are repeated at once.
        """
        for key, (attempt, _, _) in worker.aborts.items():
            abort = Abort(request=key, attempt=attempt, reason="repeated")
            self._out.append(ToWorker(worker.identity, abort))

        def check(request: Request) -> None:
            held = worker.reported.get(request.key)
            missing = held is None or held.attempt < request.attempt.number
            if missing and request.attempt.server is worker:
                self._life.lost(request, f"worker {worker.id} no longer holds it", now)

        self._errors.each(list(worker.requests.values()), check)
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
            self._life.lost(request, "its attempt number was used before the router's restart", now)

    def _adopt(self, request: Request, worker: Worker, held: RequestState, now: float) -> None:
        request.attempt.foreign = held.router not in ("", self._config.name)
        self.found(request, worker, held.attempt, now)
        self._life.ask_again(request, now)

    def _holder(self, request: Request) -> Holder | None:
        """Return the live worker that reported the highest attempt, preferring decode workers."""
        best: Holder | None = None
        best_rank = (request.attempt.number, False, -1)
        for worker in self._registry.reporting:
            held = worker.reported.get(request.key)
            if held is not None:
                rank = (held.attempt, worker.role == "decode", held.position)
                if rank > best_rank:
                    best, best_rank = (worker, held), rank
        return best
