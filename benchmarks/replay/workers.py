"""Modelled workers: queues, caches and steps, without tokens.

A prefill worker computes prompts one after the other. A decode worker's steps are not simulated
one by one: between two changes of its batch their times are an arithmetic series, so a request
costs a few events however long it runs.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from baton.deploy.autoscale.metrics import WorkerSample
from baton.loadgen.traces import BLOCK_TOKENS, Arrival
from baton.prefill_worker.start_order import Pace, StartOrder, latest_start
from baton.proto.layout import KVLayout, ModelCard
from baton.proto.wire.messages import Hello, WorkerLoad
from baton.router.policy import PrefixIndex
from baton.router.workers import Worker, WorkerState

from .service import ServiceModel

_CARD = ModelCard(
    name="modelled",
    architecture="Modelled",
    fingerprint="modelled",
    numerics="modelled",
    vocab_size=1,
    max_length=1 << 20,
    eos_token_ids=[0],
    layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_TOKENS),
)


class Request:
    """One request's way; times in seconds of the replay, NaN until they are known."""

    __slots__ = ("arrival", "decode", "ended", "first", "prefill")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.prefill: PrefillWorker | None = None
        self.decode: DecodeWorker | None = None
        self.first = math.nan
        self.ended = math.nan

    @property
    def ttft(self) -> float:
        """Seconds until the first token."""
        return self.first - self.arrival.at

    @property
    def itl(self) -> float:
        """Mean seconds between tokens, with the wait after the first; 0 for a single token."""
        gaps = self.arrival.output - 1
        return (self.ended - self.first) / gaps if gaps else 0.0


@dataclass(slots=True)
class Life:
    """When a worker was paid for and took requests."""

    ordered: float
    ready: float
    ended: float = math.inf
    draining: bool = False


def _entry(name: str, role: str, number: int, service: ServiceModel, now: float) -> Worker:
    """The router's record of a worker, for its policy."""
    hello = Hello(
        version=0,
        worker=name,
        role=role,
        incarnation=number,
        pid=0,
        endpoint=name,
        model=_CARD,
        max_batch=service.max_batch,
        load=WorkerLoad(kv_blocks_total=service.kv_tokens // BLOCK_TOKENS),
    )
    worker = Worker(name.encode(), hello, now)
    worker.enter(WorkerState.READY)
    return worker


class PrefillWorker:
    """Prompts in the order of their coming, one at a time; a cache of prefix blocks."""

    def __init__(
        self, number: int, service: ServiceModel, life: Life, slo_ttft: float = 0.0
    ) -> None:
        self.name = f"prefill-{number}"
        self.number = number
        self.life = life
        self.service = service
        self.entry = _entry(self.name, "prefill", number, service, life.ready)
        self._pace = Pace()
        self._order = StartOrder(self._start_by if slo_ttft else None)
        self._slo_ttft = slo_ttft
        self._places = 0
        self.current: Request | None = None
        self._cache = PrefixIndex(service.kv_tokens // BLOCK_TOKENS)
        self._began = self._ends = 0.0
        self._new = 0
        self._waiting_tokens = 0
        self._tokens = self._hits = 0
        self._seconds = 0.0

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return self.current is None

    def add(self, request: Request) -> None:
        """One more prompt waits."""
        self._places += 1
        self._order.put(request, self._places)
        self._waiting_tokens += request.arrival.prompt

    def begin(self, now: float) -> float | None:
        """Start the next prompt; when it will be done, None without one."""
        request = self.current = self._order.pop(now)
        if request is None:
            return None
        arrival = request.arrival
        self._waiting_tokens -= arrival.prompt
        cached = self._cached(arrival)
        self._new = arrival.prompt - cached
        self._hits += cached
        self._began = now
        self._ends = now + self.service.prefill(self._new, cached)
        return self._ends

    def _cached(self, arrival: Arrival) -> int:
        """Tokens of a prompt whose KV is here; its last token is always computed."""
        return min(self._cache.match(arrival.blocks) * BLOCK_TOKENS, arrival.prompt - 1)

    def _start_by(self, request: Request) -> float:
        arrival = request.arrival
        own = (arrival.prompt - self._cached(arrival)) * self._pace.seconds_per_token
        return latest_start(arrival.at, self._slo_ttft, own)

    def finish(self, now: float) -> Request:
        """The current prompt has its first token."""
        request = self.current
        if request is None:
            raise RuntimeError(f"{self.name} finished nothing")
        self._cache.add(request.arrival.blocks)
        self._tokens += self._new
        self._seconds += self._ends - self._began
        self._pace.learn(self._new, self._ends - self._began)
        self.current = None
        request.first = now
        return request

    def sample(self, now: float) -> WorkerSample:
        """Return the load that a heartbeat would report."""
        done = 0.0
        if self.current is not None:
            done = (now - self._began) / (self._ends - self._began)
        left = round(self._new * (1 - done)) if self.current else 0
        return WorkerSample(
            name=self.name,
            role="prefill",
            incarnation=self.number,
            ready=not self.life.draining,
            tokens_waiting=self._waiting_tokens + left,
            kv_total=self.service.kv_tokens // BLOCK_TOKENS,
            running=int(self.current is not None),
            waiting=len(self._order),
            prompt_tokens=self._tokens + round(self._new * done),
            cached_tokens=self._hits,
            compute_seconds=self._seconds + done * (self._ends - self._began),
        )


class DecodeWorker:
    """A batch that makes a token per sequence and step; admits while prompt and answer fit."""

    def __init__(self, number: int, service: ServiceModel, life: Life) -> None:
        self.name = f"decode-{number}"
        self.number = number
        self.life = life
        self.service = service
        self.entry = _entry(self.name, "decode", number, service, life.ready)
        self.pending: deque[Request] = deque()
        self.version = 0  # of the scheduled event; older ones are void
        self._ends: list[tuple[int, int, Request]] = []
        self._joined = 0
        self._steps = 0
        self._at = 0.0  # end of the last step counted
        self._context = 0.0
        self._reserved = 0

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self._ends and not self.pending

    def boundary(self, now: float) -> float:
        """The end of the step that runs at ``now``; ``now`` without one."""
        if not self._ends:
            return now
        return self._at + self._span(self._steps_until(now))

    def turn(self, now: float) -> tuple[list[Request], float | None]:
        """End a step at ``now``. Return the finished requests and the end of the next step."""
        self._advance(now)
        done = []
        while self._ends and self._ends[0][0] <= self._steps:
            request = heapq.heappop(self._ends)[2]
            request.ended = now
            arrival = request.arrival
            self._context -= arrival.prompt + arrival.output
            self._reserved -= arrival.prompt + arrival.output
            done.append(request)
        self._admit()
        if not self._ends:
            return done, None
        return done, self._at + self._span(self._ends[0][0] - self._steps)

    def sample(self, now: float) -> WorkerSample:
        """Return the load that a heartbeat would report."""
        count = len(self._ends)
        steps = self._steps_until(now) if count else 0
        blocks = self.service.kv_tokens // BLOCK_TOKENS
        return WorkerSample(
            name=self.name,
            role="decode",
            incarnation=self.number,
            ready=not self.life.draining,
            kv_used=min(blocks, math.ceil(self._reserved / BLOCK_TOKENS)),
            kv_total=blocks,
            running=count,
            waiting=len(self.pending),
            step_s=self.service.step(count, self._context + steps * count) if count else 0.0,
        )

    def _admit(self) -> None:
        service = self.service
        while self.pending and len(self._ends) < service.max_batch:
            arrival = self.pending[0].arrival
            size = arrival.prompt + arrival.output
            if self._ends and self._reserved + size > service.kv_tokens:
                return
            request = self.pending.popleft()
            self._joined += 1
            heapq.heappush(self._ends, (self._steps + arrival.output - 1, self._joined, request))
            self._context += arrival.prompt + 1
            self._reserved += size

    def _advance(self, now: float) -> None:
        if self._ends:
            steps = self._steps_until(now)
            self._context += steps * len(self._ends)
            self._steps += steps
        self._at = now

    def _span(self, steps: int) -> float:
        """Seconds of the next ``steps`` steps; the context grows by a token a sequence."""
        count = len(self._ends)
        first = self.service.step(count, self._context)
        return steps * first + self.service.decode_token_s * count * steps * (steps - 1) / 2

    def _steps_until(self, now: float) -> int:
        """Fewest steps that end at ``now`` or later."""
        count = len(self._ends)
        half = self.service.decode_token_s * count / 2
        first = self.service.step(count, self._context) - half
        left = max(0.0, now - self._at - 1e-9)
        steps = 2 * left / (first + math.sqrt(first * first + 4 * half * left))
        return math.ceil(steps - 1e-9)
