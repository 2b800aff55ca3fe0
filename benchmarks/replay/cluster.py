"""A trace played against modelled workers, with Baton's own routing policy.

Requests are bound to their workers when they come, as the router does it: a worker that joins
later takes nothing over. Everything is exact and repeatable, without randomness.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.deploy.autoscale.metrics import ROLES, Metrics, RouterSample
from baton.loadgen.traces import BLOCK_TOKENS, Arrival
from baton.router.config import PolicyConfig
from baton.router.policy import make_policy

from .service import ServiceModel
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


@dataclass
class Outcome:
    """What came of a replay; ``changes``: (time, role, target) of every changed target."""

    requests: list[Request]
    workers: list[PrefillWorker | DecodeWorker]
    end: float
    changes: list[tuple[float, str, int]] = field(default_factory=list)

    def attained(self, slo: Slo) -> float:
        """Share of requests within both limits."""
        return sum(self.kept(slo)) / len(self.requests)

    def kept(self, slo: Slo) -> list[bool]:
        """For each request, whether it was within both limits."""
        return [r.ttft <= slo.ttft and r.itl <= slo.itl for r in self.requests]

    def hours(self, role: str | None = None) -> float:
        """Worker-hours paid for: from the order to the end of the drain or of the trace."""
        return sum(
            max(0.0, min(w.life.ended, self.end) - w.life.ordered) / 3600
            for w in self.workers
            if role is None or w.name.startswith(role)
        )


class Replay:
    """One run: ``service`` of each worker, ``cold_s`` from order to ready.

    ``slo_ttft``: prompts begin in the order that keeps this time, 0: in the order of their coming.
    """

    def __init__(
        self,
        trace: Sequence[Arrival],
        service: ServiceModel,
        cold_s: float,
        first: Targets,
        slo_ttft: float = 0.0,
    ) -> None:
        self._trace = trace
        self._slo_ttft = slo_ttft
        self._service = service
        self._cold = cold_s
        name = "prefix_aware" if trace[0].blocks else "least_loaded"
        self._policy = make_policy(PolicyConfig(name=name, block_tokens=BLOCK_TOKENS))
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._next = dict.fromkeys(ROLES, 0)
        self._pools: dict[str, list[Any]] = {role: [] for role in ROLES}  # paid, not draining
        self._ready: dict[str, list[Any]] = {role: [] for role in ROLES}
        self._targets = dict(first)
        self._draining: list[Any] = []
        self._submitted = self._started = self._queued = 0
        self.now = 0.0
        self.outcome = Outcome([], [], trace[-1].at)
        for role in ROLES:
            for _ in range(first[role]):
                self._order(role, 0.0)

    def run(self, scaler: Scaler | None = None) -> Outcome:
        """Play the whole trace, then run until all requests have finished."""
        for arrival in self._trace:
            self._at(arrival.at, self._arrive, arrival)
        if scaler is not None:
            self._at(0.0, self._tick, scaler)
        while self._events:
            self.now, _, what, about = heapq.heappop(self._events)
            what(*about)
        return self.outcome

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
        request = Request(arrival)
        self.outcome.requests.append(request)
        self._submitted += 1
        self._queued += arrival.prompt
        decode = request.decode = self._place("decode", arrival, arrival.prompt + arrival.output)
        prefill = request.prefill = self._place("prefill", arrival, arrival.prompt)
        self._policy.placed(prefill.entry, arrival.blocks, arrival.prompt)
        self._policy.placed(decode.entry, arrival.blocks, arrival.prompt)
        prefill.add(request)
        if prefill.idle:
            self._prefill(prefill)

    def _place(self, role: str, arrival: Arrival, cost: int) -> Any:
        ready = self._ready[role]
        chosen = self._policy.choose([worker.entry for worker in ready], arrival.blocks)
        chosen.outstanding += cost
        return next(worker for worker in ready if worker.entry is chosen)

    def _prefill(self, worker: PrefillWorker) -> None:
        done = worker.begin(self.now)
        if done is not None:
            self._at(done, self._prefilled, worker)
        else:
            self._left(worker)

    def _prefilled(self, worker: PrefillWorker) -> None:
        request = worker.finish(self.now)
        arrival = request.arrival
        worker.entry.outstanding -= arrival.prompt
        self._queued -= arrival.prompt
        self._started += arrival.prompt
        if arrival.output > 1:
            moved = self.now + self._service.kv_move_s * arrival.prompt
            self._at(moved, self._handed_over, request)
        else:
            request.ended = self.now
            self._released(request)
        self._prefill(worker)

    def _handed_over(self, request: Request) -> None:
        worker = request.decode
        if worker is None:
            raise RuntimeError("a request came without its decode worker")
        worker.pending.append(request)
        self._turn_at(worker, worker.boundary(self.now))

    def _turn_at(self, worker: DecodeWorker, when: float) -> None:
        worker.version += 1
        self._at(when, self._turn, worker, worker.version)

    def _turn(self, worker: DecodeWorker, version: int) -> None:
        if version != worker.version:
            return
        done, following = worker.turn(self.now)
        for request in done:
            self._released(request)
        if following is not None:
            self._turn_at(worker, following)

    def _released(self, request: Request) -> None:
        worker = request.decode
        if worker is not None:
            worker.entry.outstanding -= request.arrival.prompt + request.arrival.output
            self._left(worker)

    # ------------------------------------------------------------------ workers

    def _tick(self, scaler: Scaler) -> None:
        for role, target in scaler(self.metrics, self.now).items():
            if target != self._targets[role]:
                self._targets[role] = target
                self.outcome.changes.append((self.now, role, target))
            while len(self._pools[role]) < target:
                self._order(role, self._cold)
            while len(self._pools[role]) > max(1, target):
                self._drain(role)
        if self.now + TICK_S <= self.outcome.end:
            self._at(self.now + TICK_S, self._tick, scaler)

    def _order(self, role: str, cold: float) -> None:
        life, number = Life(self.now, self.now + cold), self._next[role]
        worker: PrefillWorker | DecodeWorker
        if role == "prefill":
            worker = PrefillWorker(number, self._service, life, self._slo_ttft)
        else:
            worker = DecodeWorker(number, self._service, life)
        self._next[role] += 1
        self._pools[role].append(worker)
        self.outcome.workers.append(worker)
        if cold:
            self._at(worker.life.ready, self._join, worker, role)
        else:
            self._join(worker, role)

    def _join(self, worker: Any, role: str) -> None:
        if worker in self._pools[role]:  # else it was cancelled while it started
            self._ready[role].append(worker)

    def _drain(self, role: str) -> None:
        """Cancel the youngest that still starts, else drain the one with the least to do."""
        pool, ready = self._pools[role], self._ready[role]
        starting = [worker for worker in pool if worker not in ready]
        if not starting and len(ready) == 1:
            return
        worker = starting[-1] if starting else min(ready, key=lambda w: w.entry.outstanding)
        pool.remove(worker)
        worker.life.draining = True
        if starting:
            worker.life.ended = self.now
            return
        ready.remove(worker)
        self._policy.forget(worker.entry)
        self._draining.append(worker)
        self._left(worker)

    def _left(self, worker: Any) -> None:
        """A drained worker ends when no request needs it."""
        if worker.life.draining and not worker.entry.outstanding and math.isinf(worker.life.ended):
            worker.life.ended = self.now
            self._draining.remove(worker)


def fixed(
    trace: Sequence[Arrival], service: ServiceModel, pool: Targets, slo_ttft: float = 0.0
) -> Outcome:
    """The trace on pools that never change."""
    return Replay(trace, service, 0.0, pool, slo_ttft).run()
