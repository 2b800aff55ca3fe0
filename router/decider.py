"""Decide whether a request takes the way over a prefill worker or is local to a decode worker.

*Disaggregated* uses a prefill worker, and a decode worker alone only while no prefill worker is
ready. *Colocated* uses decode workers alone. *Adaptive* predicts the first token of a request at
every prefill worker and, alone, at every decode worker, and takes the earliest one, within limits:

* A prefill worker computes the prompts that it has and the uncached tokens of this one. The
  router counts these tokens itself, from the placement to the first token, so that a burst does
  not go to one worker between two heartbeats. What the worker has computed of its present prompt
  is the time since its last first token.
* A decode worker computes the prompt in chunks, one per step, and each step also generates a token
  for each of its streams. So only the rest of a step's target time is left for the chunk, and the
  prompt takes as many such steps as it has chunks. A step without prompt tokens takes as long as
  the last such step that the worker reported. Its reports also tell by how much a prompt token
  makes a step longer (``Worker.added_s``: less than it takes alone, where a step waits for its
  weights anyway), and how fast prompts are computed beside streams (``Worker.local_s``). Before
  that, and without streams, the speed is that of the prefill workers.
* The streams of a decode worker wait for each step with a chunk. The target of such steps must
  be within the ITL limit (``step_time_s``). If not even the least chunk fits, the worker takes no
  local request, however early its first token came.
* A request may have limits of its own, which replace the cluster's (:class:`Limits`). A decode
  worker keeps its steps with a chunk within the ITL limits of its streams' own
  (``Sequence.step_limit``), so the target is shorter there. A request with such a limit needs it
  at a worker that has other local prompts, whose chunks its tokens will wait for.
* A request that no way serves within the TTFT limit goes to a prefill worker, which begins late
  prompts last (``worker/start_order.py``). So it delays no streams, and other prompts only
  if the worker has nothing else to do and has begun it.

The request is local if that is earlier by :data:`MARGIN`, since a prefill worker is there for it.
The second token of the other way also waits for the handoff, which costs as the last handoffs of
the pair took after the first token. Before a prefill worker has measured its speed, requests go to
the pair that the policy chose. The decode worker of a handoff is always the policy's.

A local request has no handoff, and the router treats it as a request after its handoff
(docs/decisions/0047-a-decode-worker-computes-prompts.md). Pure.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baton.proto.requests import local_feature
from baton.proto.wire.messages import HandoffReport

from .config import STEP_SHARE, RouterConfig
from .placement import NO_PREFILL, Way
from .records import Request, Worker

COLOCATED = "colocated workers"
ADAPTIVE = "adaptive"
MARGIN = 0.9
"""Part of the time over a prefill worker within which a local request must be predicted."""
NEW = 0.2
"""Weight of the latest handoff of a pair."""
MAX_TAILS = 4096
LEAST_CHUNK = 32
"""Prompt tokens of a step at least, as the engine has it (``LEAST`` in its step times)."""


class Limits(NamedTuple):
    """A request's own limits in seconds; 0: the cluster's."""

    ttft: float = 0.0
    itl: float = 0.0


CLUSTERS = Limits()


@dataclass(slots=True, frozen=True)
class Costs:
    """The best way over a prefill worker and the best one alone, in predicted seconds.

    ``over_prefill``: until the first token at ``prefill``. ``handoff``: of the pair. ``alone``:
    until the first token at ``decode``; infinite if the prompt would delay the streams of each
    decode worker. ``limit``: the TTFT limit. ``decode`` is None if it may not serve it alone.
    ``per_token``: seconds of a prompt token; 0: not measured yet, so nothing is predicted and the
    workers are those of the policy. ``target``: seconds of a step with a chunk at ``decode``.
    """

    over_prefill: float
    handoff: float
    alone: float
    limit: float
    prefill: Worker
    decode: Worker | None
    per_token: float
    target: float

    @property
    def prefers_local(self) -> bool:
        """The decision."""
        return self.alone < min(MARGIN * (self.over_prefill + self.handoff), self.limit)

    def explain(self) -> str:
        """Return the predictions as text, for the story of the request."""
        return f"{ADAPTIVE}: {self._predictions()}"

    def explain_own(self, name: str, missed: str) -> str:
        """Return the same of a user's decider; ``missed``: why it did not decide, or empty."""
        if missed:
            return f"{self.explain()}, because {name} {missed}"
        way = "local" if self.prefers_local else "handoff"
        return f"{ADAPTIVE}: chosen by {name} (Baton: {way}, {self._predictions()})"

    def _predictions(self) -> str:
        if not self.per_token:
            return "no prefill worker has measured its speed yet"
        over = self.over_prefill + self.handoff
        if math.isinf(self.alone):
            return f"{over:.3f} s with handoff, alone it delays streams too long"
        return f"{over:.3f} s with handoff, {self.alone:.3f} s alone"


def at_prefill(worker: Worker, uncached: int, per_token: float, now: float) -> float:
    """Return the seconds until a prefill worker has computed its prompts and this one."""
    waiting = float(worker.uncached)
    if not waiting and worker.late:  # it computes one of them
        waiting = worker.late / worker.prompts
    mine = waiting * per_token
    if mine:
        mine = max(0.0, mine - (now - worker.turned))
    return mine + (worker.others + uncached) * per_token


def alone_at(worker: Worker, uncached: int, per_token: float, target: float) -> float:
    """Return the seconds until a decode worker has computed its local prompts and this one.

    ``target``: seconds of a step with prompt tokens, 0: it takes all of them. Infinite if the step
    of its streams leaves no time for a chunk.
    """
    waiting = worker.uncached if not worker.others_requests else worker.load.tokens_waiting
    work = (max(waiting, worker.uncached) + uncached) * per_token
    step, added = worker.stream_step_s, worker.added_s
    if added < 0:  # until it is measured, one prompt at a time may try
        added = per_token if worker.prompts else 0.0
    left = target - step if target else math.inf
    if left < LEAST_CHUNK * added:
        return math.inf  # also without a stream at present: the next one would wait as long
    if streams_of(worker) <= 0 or not step:
        return work
    if worker.local_s:
        return work * max(1.0, worker.local_s / per_token)
    return work + max(1, math.ceil(work / max(left, LEAST_CHUNK * per_token))) * step


def streams_of(worker: Worker) -> int:
    """Return the number of requests that generate at a decode worker."""
    return len(worker.requests) - worker.prompts + worker.others_requests


class HandoffTails:
    """Seconds from the first token to the end of the handoff, by pair of workers; a moving mean.

    Bounded: the pair without a handoff for the longest time is dropped.
    """

    def __init__(self) -> None:
        self._seconds: OrderedDict[tuple[str, str], float] = OrderedDict()

    def add(self, report: HandoffReport) -> None:
        """Learn from the report of a finished handoff."""
        times = report.times
        if times is None or times.computed is None or times.ended is None:
            return
        self.learn(report.prefill, report.decode, max(0.0, times.ended - times.computed))

    def learn(self, prefill: str, decode: str, seconds: float) -> None:
        """Learn that a handoff of this pair ended so many seconds after the first token."""
        pair = prefill, decode
        known = self._seconds.pop(pair, seconds)
        self._seconds[pair] = known + NEW * (seconds - known)
        if len(self._seconds) > MAX_TAILS:
            self._seconds.popitem(last=False)

    def of(self, prefill: Worker, decode: Worker) -> float:
        """Return the mean of a pair, or 0.0 before its first handoff."""
        return self._seconds.get((prefill.id, decode.id), 0.0)


class Chooser(Protocol):
    """What decides instead of Baton: :class:`.custom.CustomDecider`."""

    def decided(
        self, request: Request, costs: Costs, uncached: Callable[[Worker], int]
    ) -> tuple[bool, str]:
        """Return whether the request is local, and why as text."""
        ...


class Decider:
    """Applies the configured mode; a user's own decider chooses between the ways that it found."""

    def __init__(
        self, config: RouterConfig, tails: HandoffTails, own: Chooser | None = None
    ) -> None:
        self._tails = tails
        self._own = own
        self.learn = tails.add
        self._target = config.step_time_s
        self._limit = config.slo_ttft_s or math.inf
        self.always = config.mode == "colocated"
        """Whether every request is local, so that no prefill worker is looked for."""
        self.compares = config.mode == "adaptive"
        """Whether both ways of a request are compared (:meth:`costs`)."""
        self._falls_back = not config.enforce_disaggregation
        self._own_itl = False  # some request had an ITL limit of its own

    def alone(
        self, request: Request, decodes: list[Worker], *, prefill: bool
    ) -> tuple[list[Worker], str]:
        """Return the decode workers that may serve the request alone, and why, or none.

        ``prefill``: whether a prefill worker of its pool is ready. Call it without a candidate for
        one, or if :attr:`always`. A request that is pinned to a prefill worker is never local.
        Workers that are only avoided for the moment, such as full ones, are worth waiting for.
        """
        self._own_itl |= request.slo_itl > 0
        if _pinned_to_prefill(request):
            return [], ""
        if not self.always and (not self._falls_back or prefill):
            return [], ""
        return able(request, decodes), COLOCATED if self.always else NO_PREFILL

    def way(
        self,
        request: Request,
        prefills: Sequence[Worker],
        decodes: Sequence[Worker],
        pair: tuple[Worker, Worker],
        uncached: Callable[[Worker], int],
        now: float,
    ) -> Way:
        """Return the way that mode adaptive prefers; ``pair``: the choice of the policy."""
        alone = able(request, decodes)
        own = Limits(request.slo_ttft, request.slo_itl)
        costs = self.costs(prefills, alone, pair, uncached, now, own)
        if self._own is None:
            why, local = costs.explain(), costs.prefers_local
        else:
            local, why = self._own.decided(request, costs, uncached)
        if local and costs.decode is not None:
            return Way(None, costs.decode, why, len(alone))
        return Way(
            costs.prefill, pair[1], why, len(prefills), late=costs.over_prefill > costs.limit
        )

    def costs(
        self,
        prefills: Sequence[Worker],
        decodes: Sequence[Worker],
        pair: tuple[Worker, Worker],
        uncached: Callable[[Worker], int],
        now: float,
        own: Limits = CLUSTERS,
    ) -> Costs:
        """Return the best way of each kind.

        ``decodes``: workers that may serve it alone. ``pair``: the workers that the policy chose.
        ``uncached``: tokens of the prompt that a worker has to compute. ``own``: the request's.
        """
        self._own_itl |= own.itl > 0
        prefill, over = pair[0], 0.0
        target = self._target
        local, alone = pair[1] if pair[1] in decodes else None, math.inf
        per_token = _seconds_per_token(prefills)
        if per_token:
            over = math.inf
            for worker in prefills:
                at = at_prefill(worker, uncached(worker), per_token, now)
                if at < over:
                    prefill, over = worker, at
            for worker in decodes:
                step = self._step_at(worker, own) if self._own_itl else self._target
                at = alone_at(worker, uncached(worker), per_token, step)
                if at < alone:
                    local, alone, target = worker, at, step
        return Costs(
            over_prefill=over,
            handoff=self._tails.of(prefill, pair[1]),
            alone=alone,
            limit=own.ttft or self._limit,
            prefill=prefill,
            decode=local,
            per_token=per_token,
            target=target,
        )

    def _step_at(self, worker: Worker, own: Limits) -> float:
        """Return the target seconds of a worker's steps with a chunk, within own ITL limits too.

        The streams are those of this router: the worker has the limits of all of them.
        """
        limits = [request.slo_itl for request in worker.requests.values() if request.slo_itl]
        if own.itl and worker.prompts:
            limits.append(own.itl)
        if not limits:
            return self._target
        return min(self._target or math.inf, STEP_SHARE * min(limits))


def _seconds_per_token(prefills: Sequence[Worker]) -> float:
    """Return the seconds of a prompt token that prefill workers have measured; 0: none has."""
    tokens = seconds = 0.0
    for worker in prefills:
        tokens += worker.load.prompt_tokens
        seconds += worker.load.compute_seconds
    return seconds / tokens if tokens else 0.0


def able(request: Request, decodes: Sequence[Worker]) -> list[Worker]:
    """Return the decode workers that may compute this request's prompt."""
    if _pinned_to_prefill(request):
        return []
    feature = local_feature(request.context)
    return [worker for worker in decodes if feature in worker.card.features]


def _pinned_to_prefill(request: Request) -> bool:
    return request.pin is not None and request.pin[0] == "prefill"
