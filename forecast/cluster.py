"""A trace played against modelled workers, with the router's own policy and decider.

Requests are bound to their workers when they come, as the router does it: a worker that joins
later takes nothing over. Everything is repeatable: a service model with spreads is drawn from by
generators of a seed, any other is exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.deploy.autoscale.metrics import ROLES, Metrics, RouterSample
from baton.loadgen.traces import BLOCK_TOKENS, Arrival
from baton.proto.wire.messages import WorkerLoad
from baton.router.config import PolicyConfig, RouterConfig
from baton.router.decider import Decider, HandoffTails
from baton.router.policy import make_policy
from baton.router.records import Worker
from baton.router.registry import store_load
from baton.runtime.liveness import HEARTBEAT_S

from .service import ServiceModel
from .spread import Draws, Values
from .workers import DecodeWorker, Life, PrefillWorker, Request

Targets = dict[str, int]
Scaler = Callable[[Callable[[], Metrics], float], Targets]
"""Targets per pool; may ask for the metrics of the moment."""
TICK_S = 1.0


@dataclass(frozen=True)
class Slo:
    """Seconds that a first token, and the mean gap between tokens, may take."""

    ttft: float
    itl: float


@dataclass(frozen=True)
class Setup:
    """How a cluster serves.

    ``mode``: as the router's. ``slo``: limits of mode adaptive. ``slo_ttft``: prompts begin in the
    order that keeps this time; 0: by arrival. ``step_s``, ``token_budget``: of decode workers'
    steps with prompt tokens. ``flipped``: number of the request that mode adaptive sends the other
    way, -1: none. ``turn_s``: seconds of a change of role after the drain; 0: workers keep theirs.
    ``chunk``: prompt tokens of a prefill worker's step; 0: the whole prompt. ``seed``: of the
    random draws. ``gaps``: whether the outcome has the times between all tokens.
    """

    mode: str = "disaggregated"
    slo: Slo = Slo(math.inf, math.inf)
    slo_ttft: float = 0.0
    step_s: float = 0.05
    token_budget: int = 512
    flipped: int = -1
    turn_s: float = 0.0
    chunk: int = 0
    seed: int = 0
    gaps: bool = False


@dataclass
class Outcome:
    """What came of a replay.

    ``changes``: (time, role, target) of every changed target. ``moves``: (time, new role) of every
    worker that changed its role. ``decided``: numbers of the requests
    of mode adaptive that had both ways.
    """

    requests: list[Request]
    workers: list[PrefillWorker | DecodeWorker]
    end: float
    changes: list[tuple[float, str, int]] = field(default_factory=list)
    moves: list[tuple[float, str]] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)

    def attained(self, slo: Slo) -> float:
        """Share of requests within both limits."""
        return sum(self.kept(slo)) / len(self.requests)

    def kept(self, slo: Slo) -> list[bool]:
        """For each request, whether it was within both limits."""
        return [r.ttft <= slo.ttft and r.itl <= slo.itl for r in self.requests]

    def gaps(self) -> Values:
        """Return the seconds between two tokens of a request, float64 ``[n]``; see ``Setup``."""
        found = [w.gaps.seconds() for w in self.workers if isinstance(w, DecodeWorker)]
        return np.concatenate(found) if found else np.empty(0)

    def hours(self, role: str | None = None) -> float:
        """Worker-hours paid for: from the order to the end of the drain or of the trace."""
        return sum(
            max(0.0, min(w.life.ended, self.end) - w.life.ordered) / 3600
            for w in self.workers
            if role is None or w.name.startswith(role)
        )


class Replay:
    """One run: ``service`` of each worker, ``cold_s`` from order to ready."""

    def __init__(
        self,
        trace: Sequence[Arrival],
        service: ServiceModel,
        cold_s: float,
        first: Targets,
        setup: Setup = Setup(),
        speed: float = 1.0,
    ) -> None:
        self._trace = trace
        self._setup = setup
        self._speed = speed
        self._service = service
        self._cold = cold_s
        self._hops, self._handoffs = Draws(setup.seed, "hops"), Draws(setup.seed, "handoffs")
        name = "prefix_aware" if trace[0].blocks else "least_loaded"
        self._policy = make_policy(PolicyConfig(name=name, block_tokens=BLOCK_TOKENS))
        self._tails = HandoffTails()
        self._decider = Decider(_router(setup), self._tails)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._next: dict[str, int] = dict.fromkeys(ROLES, 0)
        self._pools: dict[str, list[Any]] = {role: [] for role in ROLES}  # paid, not draining
        self._ready: dict[str, list[Any]] = {role: [] for role in ROLES}
        self._targets = dict(first)
        self._draining: list[Any] = []
        self._turning: dict[str, tuple[Any, str]] = {}  # successors of drained workers, by name
        self._submitted = self._started = self._queued = 0
        self._beat_at = -math.inf
        self.now = 0.0
        self.outcome = Outcome([], [], trace[-1].at / speed)
        for role in ROLES:
            for _ in range(first[role]):
                self._order(role, 0.0)

    def run(self, scaler: Scaler | None = None) -> Outcome:
        """Play the whole trace, then run until all requests have finished."""
        if scaler is not None:
            self._at(0.0, self._tick, scaler)
        for arrival in self._trace:
            at = arrival.at / self._speed
            while self._events and self._events[0][0] < at:
                self._pop()
            self.now = at
            self._arrive(arrival)
            self._share_host()
        while self._events:
            self._pop()
        return self.outcome

    def _pop(self) -> None:
        self.now, _, what, about = heapq.heappop(self._events)
        what(*about)
        self._share_host()

    def _share_host(self) -> None:
        """Let the workers that compute have the pace that the others leave them."""
        if not self._service.cores:
            return
        for worker in self.outcome.workers:
            if worker.idle or (pace := self._pace(worker)) == worker.pace:
                continue
            if isinstance(worker, PrefillWorker):
                self._prefilled_at(worker, worker.change_pace(self.now, pace))
            elif (end := worker.boundary(self.now)) < worker.due:
                self._turn_at(worker, end)

    def _pace(self, worker: PrefillWorker | DecodeWorker) -> float:
        """Return the pace of a worker beside the others that compute now."""
        if not self._service.cores:
            return 1.0
        others = sum(not one.idle for one in self.outcome.workers if one is not worker)
        return worker.pace_beside(others)

    def metrics(self) -> Metrics:
        """The present contents of the routers' reports."""
        workers = [w.sample(self.now) for role in ROLES for w in self._ready[role]]
        workers += [worker.sample(self.now) for worker in self._draining]
        router = RouterSample(
            name="router",
            life=0.0,
            submitted=self._submitted,
            started_tokens=self._started,
            queued_tokens=self._queued,
        )
        return Metrics(workers=tuple(workers), routers=(router,))

    def _at(self, when: float, what: Callable[..., None], *about: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what, about))

    # ------------------------------------------------------------------ requests

    def _arrive(self, arrival: Arrival) -> None:
        self._count += 1
        request = Request(arrival, self.now, self._count.to_bytes(8, "big"))
        self.outcome.requests.append(request)
        self._submitted += 1
        self._queued += arrival.prompt
        prefill, decode, late = self._choose(arrival)
        attempt, placed = request.attempt, self._policy.placed
        server = request.decode = self._named("decode", decode)
        attempt.decode, attempt.decode_cost = decode, arrival.prompt + arrival.output
        decode.requests[request.key] = request  # type: ignore[assignment]  # only counted
        decode.outstanding += attempt.decode_cost
        cached = 0
        if prefill is not None:
            request.prefill = self._named("prefill", prefill)
            attempt.prefill, attempt.prefill_cost = prefill, arrival.prompt
            prefill.outstanding += arrival.prompt
            cached = placed(prefill, arrival.blocks, arrival.prompt)
        at_decode = placed(decode, arrival.blocks, arrival.prompt)
        found = at_decode if prefill is None else cached
        attempt.count_prompt(max(0, arrival.prompt - found), self.now, late=late)
        hop = self._hops.seconds(self._service.hop_s, self._service.spreads.hop_s)
        if hop:
            self._at(self.now + hop, self._enter, request, server)
        else:
            self._enter(request, server)

    def _enter(self, request: Request, server: DecodeWorker) -> None:
        """A request reaches the worker of its prompt."""
        if request.prefill is None:
            server.add_prompt(request)
            self._turn_at(server, server.boundary(self.now))
        else:
            request.prefill.add(request)
            if request.prefill.idle:
                self._prefill(request.prefill)

    def _choose(self, arrival: Arrival) -> tuple[Worker | None, Worker, bool]:
        """Return the workers as the router chooses them, and whether a late request is expected."""
        decodes = [worker.entry for worker in self._ready["decode"]]
        prefills = [worker.entry for worker in self._ready["prefill"]]
        decode = self._policy.choose(decodes, arrival.blocks)
        if not prefills or self._decider.always:
            return None, decode, False
        prefill = self._policy.choose(prefills, arrival.blocks)
        if not self._decider.compares:
            return prefill, decode, False
        self._beat()
        cached = self._policy.cached

        def uncached(worker: Worker) -> int:
            return max(1, arrival.prompt - BLOCK_TOKENS * cached(worker, arrival.blocks))

        costs = self._decider.costs(prefills, decodes, (prefill, decode), uncached, self.now)
        local, late = costs.prefers_local, costs.over_prefill > costs.limit
        if costs.decode is not None and math.isfinite(costs.alone):
            number = len(self.outcome.requests) - 1
            self.outcome.decided.append(number)
            if local != (number == self._setup.flipped):
                return None, costs.decode, False
        return costs.prefill, decode, late

    def _named(self, role: str, entry: Worker) -> Any:
        return next(worker for worker in self._ready[role] if worker.entry is entry)

    def _beat(self) -> None:
        """Give the router the workers' heartbeats, if the last ones are old."""
        if self.now - self._beat_at < HEARTBEAT_S:
            return
        self._beat_at = self.now
        for worker in self._ready["prefill"]:
            tokens, seconds = worker.computed(self.now)
            worker.entry.load = WorkerLoad(prompt_tokens=tokens, compute_seconds=seconds)
        for worker in self._ready["decode"]:
            entry = worker.entry
            entry.step_s = worker.step_s(self.now)
            store_load(entry, worker.load(), "")
            if not worker.computes:
                entry.stream_step_s = entry.step_s

    def _prefill(self, worker: PrefillWorker) -> None:
        done = worker.begin(self.now, self._pace(worker))
        if done is not None:
            self._prefilled_at(worker, done)
        else:
            self._left(worker)

    def _prefilled_at(self, worker: PrefillWorker, when: float) -> None:
        worker.version += 1
        self._at(when, self._prefilled, worker, worker.version)

    def _prefilled(self, worker: PrefillWorker, version: int) -> None:
        if version != worker.version:
            return
        request = worker.finish(self.now)
        arrival = request.arrival
        self._first_token(worker, request)
        decode = request.decode
        if arrival.output > 1 and decode is not None:
            lacking = arrival.prompt - decode.cached(arrival)
            moved = self._service.handoff(lacking, request.computing_s)
            moved = self._handoffs.seconds(moved, self._service.spreads.handoff_s)
            self._at(self.now + moved, self._handed_over, decode, request)
            self._tails.learn(worker.name, decode.name, moved)
        else:
            request.ended = self.now
            self._released(request)
        self._prefill(worker)

    def _first_token(self, worker: Any, request: Request) -> None:
        prompt = request.arrival.prompt
        self._queued -= prompt
        self._started += prompt
        worker.entry.turned = self.now
        request.attempt.leave_prompt()
        request.attempt.leave_prefill(request.key)

    def _handed_over(self, worker: DecodeWorker, request: Request) -> None:
        worker.pending.append(request)
        self._turn_at(worker, worker.boundary(self.now))

    def _turn_at(self, worker: DecodeWorker, when: float) -> None:
        worker.version += 1
        worker.due = when
        self._at(when, self._turn, worker, worker.version)

    def _turn(self, worker: DecodeWorker, version: int) -> None:
        if version != worker.version:
            return
        worker.due = math.inf
        started, done, following = worker.turn(self.now, self._pace(worker))
        for request in started:
            self._first_token(worker, request)
        for request in done:
            self._released(request)
        if following is not None:
            self._turn_at(worker, following)

    def _released(self, request: Request) -> None:
        worker = request.decode
        if worker is not None:
            request.attempt.leave(request.key)
            self._left(worker)

    # ------------------------------------------------------------------ workers

    def _tick(self, scaler: Scaler) -> None:
        for role, target in scaler(self.metrics, self.now).items():
            if target != self._targets[role]:
                self._targets[role] = target
                self.outcome.changes.append((self.now, role, target))
        for role in ROLES if self._setup.turn_s else ():
            self._exchange(role)
        for role, target in self._targets.items():
            while len(self._pools[role]) < target:
                self._order(role, self._cold)
            while len(self._pools[role]) > max(1, target):
                self._drain(role)
        if self.now + TICK_S <= self.outcome.end:
            self._at(self.now + TICK_S, self._tick, scaler)

    def _exchange(self, role: str) -> None:
        """Let spare workers of the other pool change their role, as the controller does."""
        (other,) = set(ROLES) - {role}
        while len(self._pools[role]) < self._targets[role]:
            ready = len(self._ready[other])
            if len(self._pools[other]) <= self._targets[other] or ready <= self._targets[other]:
                return
            worker = min(self._ready[other], key=lambda w: w.entry.outstanding)
            successor = self._made(role, Life(math.inf, self.now))
            self._turning[worker.name] = successor, role
            self.outcome.moves.append((self.now, role))
            self._retire(worker, other)

    def _order(self, role: str, cold: float) -> None:
        worker = self._made(role, Life(self.now, self.now + cold))
        if cold:
            self._at(worker.life.ready, self._join, worker, role)
        else:
            self._join(worker, role)

    def _made(self, role: str, life: Life) -> PrefillWorker | DecodeWorker:
        """Add a worker to a pool, which is not ready yet."""
        number, setup = self._next[role], self._setup
        worker: PrefillWorker | DecodeWorker
        if role == "prefill":
            worker = PrefillWorker(
                number, self._service, life, setup.slo_ttft, setup.chunk, setup.seed
            )
        else:
            limit = setup.slo_ttft if setup.mode == "adaptive" else 0.0
            worker = DecodeWorker(
                number, self._service, life, setup.step_s, setup.token_budget, limit,
                setup.seed,
            )  # fmt: skip
            worker.gaps.kept = setup.gaps
        self._next[role] += 1
        self._pools[role].append(worker)
        self.outcome.workers.append(worker)
        return worker

    def _join(self, worker: Any, role: str) -> None:
        if worker in self._pools[role]:  # else it was cancelled while it started
            self._ready[role].append(worker)

    def _drain(self, role: str) -> None:
        """Cancel the youngest that still starts, else drain the one with the least to do."""
        pool, ready = self._pools[role], self._ready[role]
        starting = [worker for worker in pool if worker not in ready]
        if not starting and len(ready) == 1:
            return
        if starting:
            pool.remove(starting[-1])
            starting[-1].life.draining = True
            starting[-1].life.ended = self.now
            return
        self._retire(min(ready, key=lambda w: w.entry.outstanding), role)

    def _retire(self, worker: Any, role: str) -> None:
        """Let a ready worker finish its requests and take no others."""
        self._pools[role].remove(worker)
        worker.life.draining = True
        self._ready[role].remove(worker)
        self._policy.forget(worker.entry)
        self._draining.append(worker)
        self._left(worker)

    def _left(self, worker: Any) -> None:
        """A drained worker ends when no request needs it."""
        if worker.life.draining and not worker.entry.outstanding and math.isinf(worker.life.ended):
            worker.life.ended = self.now
            self._draining.remove(worker)
            successor, role = self._turning.pop(worker.name, (None, ""))
            if successor is not None:
                successor.life.ordered = self.now
                self._at(self.now + self._setup.turn_s, self._join, successor, role)


def _router(setup: Setup) -> RouterConfig:
    limit = setup.slo.ttft
    return RouterConfig(
        client_address="ipc:///client",
        worker_address="ipc:///worker",
        mode=setup.mode,
        step_time_s=setup.step_s,
        slo_ttft_s=limit if math.isfinite(limit) else 0.0,
    )


def fixed(
    trace: Sequence[Arrival],
    service: ServiceModel,
    pool: Targets,
    setup: Setup = Setup(),
    speed: float = 1.0,
) -> Outcome:
    """The trace on pools that never change."""
    return Replay(trace, service, 0.0, pool, setup, speed).run()
