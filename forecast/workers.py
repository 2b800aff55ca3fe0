"""Modelled workers: queues, caches and steps, without tokens.

A prefill worker computes prompts one after the other. A decode worker computes the prompts of its
local requests in chunks beside the tokens of its streams, by the engine's own rule for the size of
a chunk. Its steps without prompt tokens are not simulated one by one: between two changes of the
batch their times are an arithmetic series, so a stream costs a few events however long it runs.

``pace`` is how many times as long a worker's steps take as alone, while others of its host compute.
A prompt at a prefill worker has a new pace at once, a decode worker from its next step on.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from baton.deploy.autoscale.metrics import WorkerSample
from baton.engine.scheduling.step_time import ChunkBudget
from baton.loadgen.traces import BLOCK_TOKENS, Arrival
from baton.proto.layout import KVLayout, ModelCard
from baton.proto.wire.messages import Buckets, Hello, WorkerLoad
from baton.router.policy import PrefixIndex
from baton.router.records import Attempt, Worker
from baton.router.states import WorkerState
from baton.runtime.metrics.families import STEP_SECONDS
from baton.worker.start_order import Pace, StartOrder, latest_start

from .service import ServiceModel
from .spread import Draws, Steps, Values, steps_of

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

    __slots__ = (
        "arrival",
        "at",
        "attempt",
        "computed",
        "computing_s",
        "decode",
        "ended",
        "first",
        "key",
        "prefill",
    )

    def __init__(self, arrival: Arrival, at: float, key: bytes) -> None:
        self.arrival = arrival
        self.key = key
        self.attempt = Attempt(1)  # the router's record of its place
        self.at = at  # of the replay's clock
        self.prefill: PrefillWorker | None = None
        self.decode: DecodeWorker | None = None
        self.first = math.nan
        self.computed = 0  # tokens of a local prompt
        self.computing_s = 0.0  # of a prompt at a prefill worker
        self.ended = math.nan

    @property
    def ttft(self) -> float:
        """Seconds until the first token."""
        return self.first - self.at

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


class Gaps:
    """The seconds between the tokens of a decode worker's streams, if they are kept."""

    def __init__(self) -> None:
        self.kept = False
        self._found: list[tuple[Values, int]] = []
        self._waits: list[float] = []  # of streams without a step here yet

    def joined(self, wait: float) -> None:
        """A stream has its first step next, ``wait`` seconds after its first token."""
        if self.kept:
            self._waits.append(wait)

    def add(self, steps: Values, rows: int) -> None:
        """So many streams had a token in each of these steps."""
        if not len(steps):
            return
        self._found.append((steps, rows - len(self._waits)))
        rest = steps[1:]
        for wait in self._waits:
            self._found.append((np.array([steps[0] + wait, *rest]), 1))
        self._waits = []

    def seconds(self) -> Values:
        """Return all of them, float64 ``[n]``."""
        return np.concatenate([np.empty(0), *(np.repeat(*one) for one in self._found)])


class PrefillWorker:
    """Prompts in the order of their coming, one at a time; a cache of prefix blocks."""

    def __init__(
        self, number: int, service: ServiceModel, life: Life, slo_ttft: float = 0.0, chunk: int = 0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.name = f"prefill-{number}"
        self._chunk = chunk
        self._draws = Draws(seed, self.name)
        self.number = number
        self.life = life
        self.service = service
        self.entry = _entry(self.name, "prefill", number, service, life.ready)
        self._pace = Pace()
        self._order = StartOrder(self._start_by if slo_ttft else None, self._own)
        self._slo_ttft = slo_ttft
        self._places = 0
        self.current: Request | None = None
        self._cache = PrefixIndex(service.kv_tokens // BLOCK_TOKENS)
        self._began = self._ends = 0.0
        self.pace = 1.0
        self.version = 0  # of the scheduled end; older ones are void
        self._new = 0
        self._waiting_tokens = 0
        self._tokens = self._hits = 0
        self._seconds = 0.0

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return self.current is None

    def pace_beside(self, others: int) -> float:
        """Return its pace while so many other workers of its host compute."""
        return self.service.slowed(self.service.prefill_beside, others)

    def add(self, request: Request) -> None:
        """One more prompt waits."""
        self._places += 1
        self._order.put(request, self._places)
        self._waiting_tokens += request.arrival.prompt

    def begin(self, now: float, pace: float = 1.0) -> float | None:
        """Start the next prompt; when it will be done, None without one."""
        request = self.current = self._order.pop(now)
        if request is None:
            return None
        arrival = request.arrival
        self._waiting_tokens -= arrival.prompt
        cached = self.cached(arrival)
        self._new = arrival.prompt - cached
        self._hits += cached
        self._began, self.pace = now, pace
        spreads = self.service.spreads
        drawn = self._draws.multiple(spreads.prefill_beside if pace > 1 else spreads.prefill)
        self._ends = now + drawn * pace * self.service.prefill(self._new, cached, self._chunk)
        return self._ends

    def change_pace(self, now: float, pace: float) -> float:
        """Return when the current prompt will be done at another pace."""
        self._ends = now + (self._ends - now) * pace / self.pace
        self.pace = pace
        return self._ends

    def cached(self, arrival: Arrival) -> int:
        """Tokens of a prompt whose KV is here; its last token is always computed."""
        return min(self._cache.match(arrival.blocks) * BLOCK_TOKENS, arrival.prompt - 1)

    def _start_by(self, request: Request) -> float:
        return latest_start(request.at, self._slo_ttft, self._own(request))

    def _own(self, request: Request) -> float:
        arrival = request.arrival
        return (arrival.prompt - self.cached(arrival)) * self._pace.seconds_per_token

    def computed(self, now: float) -> tuple[int, float]:
        """Return the prompt tokens computed since the start, and the seconds that took."""
        if self.current is None:
            return self._tokens, self._seconds
        done = (now - self._began) / (self._ends - self._began)
        return self._tokens + round(self._new * done), self._seconds + now - self._began

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
        request.computing_s = self._ends - self._began
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
    """A batch that makes a token per stream and step, and computes local prompts in chunks.

    ``step_s``, ``token_budget``: target seconds of a step with prompt tokens, and their maximum
    (0: none), as the scheduler has them. A request is admitted when its prompt and answer fit.
    """

    def __init__(
        self,
        number: int,
        service: ServiceModel,
        life: Life,
        step_s: float = 0.0,
        token_budget: int = 0,
        slo_ttft: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.name = f"decode-{number}"
        self.gaps = Gaps()
        self._draws = Draws(seed, self.name)
        alone, beside = service.spreads.decode, service.spreads.decode_beside
        self._spans = steps_of(seed, self.name, alone), steps_of(seed, self.name, beside)
        self.number = number
        self.life = life
        self.service = service
        self.entry = _entry(self.name, "decode", number, service, life.ready)
        self.pending: deque[Request] = deque()  # handed over
        self._prompts: dict[Request, int] = {}  # local, without a place in the batch; their places
        self._places = 0
        self._slo_ttft = slo_ttft
        self._pace = Pace()
        self._order = StartOrder(self._start_by if slo_ttft else None, self._own)
        self.version = 0  # of the scheduled event; older ones are void
        self.due = math.inf  # when that is
        self.pace = 1.0
        self._budget = ChunkBudget(token_budget, step_s)
        self._cache = PrefixIndex(service.kv_tokens // BLOCK_TOKENS)
        self._computing: list[Request] = []
        self._chunks: list[tuple[Request, int]] = []  # of the running step
        self._ends: list[tuple[int, int, Request]] = []
        self._joined = 0
        self._steps = 0
        self._at = 0.0  # end of the last step counted
        self._until = 0.0  # end of the running step with chunks
        self._context = 0.0
        self._reserved = 0
        self._tokens = self._hits = self._generated = 0
        self._seconds = self._step_s = 0.0

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not (self._ends or self.pending or self._prompts or self._computing)

    def pace_beside(self, others: int) -> float:
        """Return its pace while so many other workers of its host compute."""
        return self.service.slowed(self.service.decode_beside, others)

    @property
    def computes(self) -> bool:
        """Whether its running step has prompt tokens."""
        return bool(self._chunks)

    def add_prompt(self, request: Request) -> None:
        """One more local request waits."""
        self._places += 1
        self._prompts[request] = self._places
        self._order.put(request, self._places)

    def _start_by(self, request: Request) -> float:
        return latest_start(request.at, self._slo_ttft, self._own(request))

    def _own(self, request: Request) -> float:
        arrival = request.arrival
        return (arrival.prompt - self.cached(arrival)) * self._pace.seconds_per_token

    def boundary(self, now: float) -> float:
        """The end of the step that runs at ``now``; ``now`` without one."""
        if self._chunks:
            return self._until
        if not self._ends:
            return now
        return self._at + self._span(self._steps_until(now))

    def turn(
        self, now: float, pace: float = 1.0
    ) -> tuple[list[Request], list[Request], float | None]:
        """End a step at ``now``; the next ones have this pace.

        Return the local requests with a first token, the finished requests and the time of the
        next call.
        """
        started = self._apply(now)
        self.pace = pace
        done = [request for request in started if request.arrival.output == 1]
        while self._ends and self._ends[0][0] <= self._steps:
            request = heapq.heappop(self._ends)[2]
            arrival = request.arrival
            self._context -= arrival.prompt + arrival.output
            done.append(request)
        for request in done:
            request.ended = now
            self._reserved -= request.arrival.prompt + request.arrival.output
        self._admit(now)
        if self._computing:
            self._plan(now)
            return started, done, self._until
        if not self._ends:
            return started, done, None
        return started, done, self._at + self._span(self._ends[0][0] - self._steps)

    def sample(self, now: float) -> WorkerSample:
        """Return the load that a heartbeat would report."""
        blocks = self.service.kv_tokens // BLOCK_TOKENS
        local = [*self._prompts, *self._computing]
        return WorkerSample(
            name=self.name,
            role="decode",
            incarnation=self.number,
            ready=not self.life.draining,
            tokens_waiting=sum(one.arrival.prompt - one.computed for one in local),
            kv_used=min(blocks, math.ceil(self._reserved / BLOCK_TOKENS)),
            kv_total=blocks,
            running=len(self._ends) + len(self._computing),
            waiting=len(self.pending) + len(self._prompts),
            prompt_tokens=self._tokens,
            cached_tokens=self._hits,
            step_s=self.step_s(now),
        )

    def load(self) -> WorkerLoad:
        """Return what a heartbeat would report of the steps that have ended."""
        return WorkerLoad(
            tokens_waiting=int(bool(self._chunks)),
            prompt_tokens=self._tokens,
            generated_tokens=self._generated,
            compute_seconds=self._seconds,
            histograms={STEP_SECONDS: Buckets([self._steps], self._seconds)},
        )

    def step_s(self, now: float) -> float:
        """Seconds of the running step; 0 without one."""
        if self._chunks:
            return self._step_s
        count = len(self._ends)
        if not count:
            return 0.0
        return self._seconds_of(self._context + self._steps_until(now) * count)

    # ------------------------------------------------------------------ inner

    def _apply(self, now: float) -> list[Request]:
        """Count the steps until ``now``; return the local requests whose prompts are computed."""
        if not self._chunks:
            self._advance(now)
            return []
        rows, new = len(self._ends), sum(count for _, count in self._chunks)
        self._budget.learn(new + rows, self._step_s, rows)
        self._pace.learn(new, self._step_s)
        self._tokens += new
        self._steps += 1
        self._seconds += self._step_s
        self._generated += rows
        self._context += rows
        self._at = now
        if self.gaps.kept:
            self.gaps.add(np.array([self._step_s]), rows)
        started = []
        for request, count in self._chunks:
            request.computed += count
            arrival = request.arrival
            if request.computed < arrival.prompt:
                continue
            self._computing.remove(request)
            self._cache.add(arrival.blocks)
            request.first = now
            started.append(request)
            if arrival.output > 1:
                self._join(request)
        self._chunks = []
        return started

    def _join(self, request: Request) -> None:
        """Let a request generate from the next step on."""
        arrival = request.arrival
        self._joined += 1
        heapq.heappush(self._ends, (self._steps + arrival.output - 1, self._joined, request))
        self._context += arrival.prompt + 1

    def _admit(self, now: float) -> None:
        """Fill the batch: first with what was handed over, then with prompts within the budget."""
        while self.pending and self._has_room(self.pending[0]):
            request = self.pending.popleft()
            self._cache.add(request.arrival.blocks)
            self._join(request)
            self.gaps.joined(now - request.first)
        left = self._budget.tokens
        left -= sum(one.arrival.prompt - one.computed for one in self._computing)
        while left > 0 and (first := self._order.pop(now)) is not None:
            if not self._has_room(first):
                self._order.put(first, self._prompts[first])
                return
            del self._prompts[first]
            arrival = first.arrival
            first.computed = self.cached(arrival)
            self._hits += first.computed
            self._computing.append(first)
            left -= arrival.prompt - first.computed

    def cached(self, arrival: Arrival) -> int:
        """Tokens of a prompt whose KV is here; its last token is always computed."""
        return min(self._cache.match(arrival.blocks) * BLOCK_TOKENS, arrival.prompt - 1)

    def _has_room(self, request: Request) -> bool:
        """Whether a request fits; if so, its memory is reserved."""
        size = request.arrival.prompt + request.arrival.output
        running = len(self._ends) + len(self._computing)
        if running >= self.service.max_batch:
            return False
        if running and self._reserved + size > self.service.kv_tokens:
            return False
        self._reserved += size
        return True

    def _plan(self, now: float) -> None:
        """Begin a step with as many tokens of the first prompts as the budget allows."""
        left = self._budget.tokens
        new, pairs, last = 0, 0.0, 0
        for request in self._computing:
            count = min(left, request.arrival.prompt - request.computed)
            if not count:
                break
            left -= count
            new += count
            pairs += count * (request.computed + count / 2)
            last += request.computed + count == request.arrival.prompt
            self._chunks.append((request, count))
        service = self.service
        self._step_s = service.mixed(len(self._ends), self._context, new, pairs)
        if not self._ends:
            self._step_s += last * service.prefill_s
        spreads = service.spreads
        drawn = spreads.prefill_beside if self.pace > 1 else spreads.prefill
        self._step_s *= self.pace * self._draws.multiple(drawn)
        self._until = now + self._step_s

    def _advance(self, now: float) -> None:
        if self._ends:
            steps = self._steps_until(now)
            self._seconds += self._span(steps)
            if self.gaps.kept:
                self.gaps.add(self._drawn.each(self._steps, steps, *self._costs), len(self._ends))
            self._generated += steps * len(self._ends)
            self._context += steps * len(self._ends)
            self._steps += steps
        self._at = now

    @property
    def _drawn(self) -> Steps:
        """The steps at the present pace."""
        return self._spans[self.pace > 1]

    @property
    def _costs(self) -> tuple[float, float]:
        """The cost of the next step without prompt tokens, and by how much each later one has more.

        The context grows by a token a stream.
        """
        return (
            self._seconds_of(self._context),
            self.pace * self.service.decode_token_s * len(self._ends),
        )

    def _span(self, steps: int) -> float:
        """Seconds of the next ``steps`` steps."""
        return self._drawn.span(self._steps, steps, *self._costs)

    def _seconds_of(self, context: float) -> float:
        """Mean seconds of a step without prompt tokens."""
        return self.pace * self.service.step(len(self._ends), context)

    def _steps_until(self, now: float) -> int:
        """Fewest steps that end at ``now`` or later."""
        left = max(0.0, now - self._at - 1e-9)
        return self._drawn.until(self._steps, left, *self._costs)
