"""Decide whether a request takes the way over a prefill worker or is local to a decode worker.

*Disaggregated* uses a prefill worker, and a decode worker alone only while no prefill worker is
ready. *Colocated* uses decode workers alone. *Adaptive* compares both ways for each request:

* Over prefill worker P, the first token comes after the prompts that P has still to compute and
  the uncached tokens of this one, at the speed that P has measured. The second token also waits for
  the end of the handoff, as in the last handoffs of this pair. The time grows with the bytes only
  by those of the last chunk, since the other blocks travel while the prompt is computed.
* Alone, decode worker D computes the prompt in chunks, one per step. So the first token comes after
  the local prompts that wait at D and this one, at P's speed, because both have the same model;
  and each step also generates a token for each stream of D, which takes as long as D's last steps.
* The streams of D wait for each step with a chunk. If such a step takes longer than the ITL limit,
  the request is not local, however early its first token came.

The request is local if that is earlier by :data:`MARGIN`, since a prefill worker is there for it.
Before a prefill worker has measured its speed, requests go to prefill workers.

A local request has no handoff, and the router treats it as a request after its handoff
(docs/decisions/0047-a-decode-worker-computes-prompts.md). Pure.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from baton.proto.requests import local_feature
from baton.proto.wire.messages import HandoffReport

from .config import RouterConfig
from .registry import Registry
from .requests import Request
from .workers import Worker

COLOCATED = "colocated workers"
NO_PREFILL = "no prefill worker was ready"
ADAPTIVE = "adaptive"
MARGIN = 0.9
"""Part of the time over a prefill worker within which a local request must be predicted."""
NEW = 0.2
"""Weight of the latest handoff of a pair."""
MAX_TAILS = 4096
LEAST_CHUNK = 32
"""Prompt tokens of a step at least, as the engine has it (``LEAST`` in its step times)."""


@dataclass(slots=True, frozen=True)
class Costs:
    """What the decision depends on, in tokens and seconds.

    ``ahead``: prompt tokens that wait at the prefill worker; ``uncached``: tokens of this prompt
    that are not cached there. ``local_ahead``, ``local_uncached``: the same at the decode worker.
    ``per_token``: seconds of a prompt token; 0: not measured. ``handoff``: seconds of the handoff.
    ``streams``: requests that generate at the decode worker; ``step``: seconds of its steps.
    ``chunk``: target seconds of a step with prompt tokens; ``itl``: the limit of a step.
    """

    ahead: int
    uncached: int
    local_ahead: int
    local_uncached: int
    per_token: float
    handoff: float
    streams: int
    step: float
    chunk: float
    itl: float

    @property
    def over_prefill(self) -> float:
        """Seconds until the first token over the prefill worker, and for the handoff."""
        return (self.ahead + self.uncached) * self.per_token + self.handoff

    @property
    def alone(self) -> float:
        """Seconds until the first token at the decode worker alone."""
        work = (self.local_ahead + self.local_uncached) * self.per_token
        steps = max(1, math.ceil(work / self._chunk_s)) if self.streams else 0
        return work + steps * self.step

    @property
    def _chunk_s(self) -> float:
        """Seconds of the prompt tokens of one step; without a target it takes all of them."""
        return max(self.chunk or math.inf, LEAST_CHUNK * self.per_token)

    @property
    def harms(self) -> bool:
        """Whether the streams of the decode worker would exceed the ITL limit."""
        chunk = min(self._chunk_s, self.local_uncached * self.per_token)
        return self.streams > 0 and self.step + chunk > self.itl

    @property
    def prefers_local(self) -> bool:
        """The decision."""
        return self.per_token > 0 and not self.harms and self.alone < MARGIN * self.over_prefill

    def explain(self) -> str:
        """Return the predictions as text, for the story of the request."""
        if not self.per_token:
            return f"{ADAPTIVE}: no prefill worker has measured its speed yet"
        harm = ", which delays its streams too long" if self.harms else ""
        return f"{ADAPTIVE}: {self.over_prefill:.3f} s with handoff, {self.alone:.3f} s alone{harm}"


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
        pair, seconds = (report.prefill, report.decode), max(0.0, times.ended - times.computed)
        known = self._seconds.pop(pair, seconds)
        self._seconds[pair] = known + NEW * (seconds - known)
        if len(self._seconds) > MAX_TAILS:
            self._seconds.popitem(last=False)

    def of(self, prefill: Worker, decode: Worker) -> float:
        """Return the mean of a pair, or 0.0 before its first handoff."""
        return self._seconds.get((prefill.id, decode.id), 0.0)


class Decider:
    """Applies the configured mode."""

    def __init__(self, registry: Registry, config: RouterConfig, tails: HandoffTails) -> None:
        self._registry = registry
        self._tails = tails
        self._config = config
        self.always = config.mode == "colocated"
        """Whether every request is local, so that no prefill worker is looked for."""
        self.compares = config.mode == "adaptive"
        """Whether both ways of a request are compared (:meth:`costs`)."""
        self._falls_back = not config.enforce_disaggregation

    def local(self, request: Request, decodes: list[Worker]) -> tuple[list[Worker], str]:
        """Return the decode workers that may serve the request alone, and why, or none.

        Call it without a candidate for a prefill worker, or if :attr:`always`. A request that is
        pinned to a prefill worker is never local. Workers that are only avoided for the moment,
        such as full ones, are worth waiting for.
        """
        if request.pin is not None and request.pin[0] == "prefill":
            return [], ""
        if not self.always and (
            not self._falls_back or self._registry.ready("prefill", request.pool)
        ):
            return [], ""
        able = [worker for worker in decodes if self._can(request, worker)]
        return able, COLOCATED if self.always else NO_PREFILL

    @staticmethod
    def _can(request: Request, worker: Worker) -> bool:
        return local_feature(request.context) in worker.card.features

    def costs(
        self, request: Request, prefill: Worker, decode: Worker, cached: int, local_cached: int
    ) -> Costs | None:
        """Return the costs of both ways, or None if the request cannot be local.

        ``cached``, ``local_cached``: tokens of the prompt that the workers have probably cached.
        """
        pinned = request.pin is not None and request.pin[0] == "prefill"
        if pinned or not self._can(request, decode):
            return None
        load, tokens, config = prefill.load, request.next, self._config
        waiting = [one for one in decode.requests.values() if one.attempt.local and not one.started]
        lacking = max(1, tokens - local_cached)
        return Costs(
            ahead=prefill.burden,
            uncached=max(1, tokens - cached),
            local_ahead=max(decode.load.tokens_waiting, sum(one.next for one in waiting)),
            local_uncached=lacking,
            per_token=load.compute_seconds / load.prompt_tokens if load.prompt_tokens else 0.0,
            handoff=self._tails.of(prefill, decode),
            streams=len(decode.requests) - len(waiting) + decode.others_requests,
            step=decode.step_s,
            chunk=config.step_time_s,
            itl=config.slo_itl_s,
        )
