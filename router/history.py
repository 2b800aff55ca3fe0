"""What the router did in the last 15 minutes: a sample of its numbers per 5 seconds.

The dashboard's charts begin with these samples. The path of a request does no work for them: a
sample is the difference of two readings of counters that exist anyway. The memory is bounded.
Pure.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import msgspec

from baton.runtime.metrics.latency import percentile

from .metrics import FAILED
from .state import RouterState

INTERVAL_S = 5.0
"""Seconds between samples."""
SAMPLES = 180
"""Number of samples that are kept: 15 minutes."""
_RATE_DIGITS = 3


class Sample(msgspec.Struct, frozen=True, gc=False):
    """Numbers of one interval that ended at ``at``, monotonic seconds.

    Rates and failures are of the interval, as are the percentiles of TTFT and ITL and the mean
    duration of a handoff (None: no such event). ``queued`` requests have no worker yet, and
    ``waiting`` requests are in a worker's queue. ``prefill_kv`` and ``decode_kv``: share of the
    role's KV blocks that requests own, None without live workers.
    """

    at: float
    requests_per_s: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    in_flight: int
    queued: int
    waiting: int
    handoffs_per_s: float
    handoff_bytes_per_s: float
    handoff_s: float | None
    prefill_kv: float | None
    decode_kv: float | None
    failed: int
    refused: int


class Counters(msgspec.Struct, frozen=True, gc=False):
    """Readings of the counters since the router's start, of which a sample is a difference."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    handoffs: int = 0
    handoff_bytes: int = 0
    handoff_seconds: float = 0.0
    failed: int = 0
    refused: int = 0

    def since(self, before: Counters) -> Counters:
        """Return what was counted after the reading ``before``."""
        names = self.__struct_fields__
        return Counters(**{name: getattr(self, name) - getattr(before, name) for name in names})


class History:
    """The latest samples of one router; ``now`` is monotonic seconds in all calls."""

    def __init__(self, state: RouterState) -> None:
        self._table = state.table
        self._registry = state.registry
        self._admission = state.admission
        self._metrics = metrics = state.metrics
        self._handoffs = state.handoffs.metrics
        now = state.started_at
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._at = now
        self._next = now + INTERVAL_S
        self._counters = Counters()
        self._first_tokens = metrics.first_tokens.counts.copy()
        self._between_tokens = metrics.between_tokens.counts.copy()

    def tick(self, now: float) -> None:
        """Add a sample if it is due. After a pause it covers the whole pause."""
        if now < self._next:
            return
        while self._next <= now:  # a grid, so that late ticks do not add up
            self._next += INTERVAL_S
        self._samples.append(self._sample(now))

    def report(self, most: int, now: float) -> dict[str, object]:
        """Return up to ``most`` samples, latest last: a list per field; ``age_s`` for ``at``."""
        skipped = max(0, len(self._samples) - most)
        samples = list(islice(self._samples, skipped, None))
        columns: dict[str, list[float | None]] = {
            "age_s": [round(max(0.0, now - one.at), 3) for one in samples]
        }
        for name in Sample.__struct_fields__[1:]:
            columns[name] = [getattr(one, name) for one in samples]
        return {"interval_s": INTERVAL_S, "columns": columns}

    def _sample(self, now: float) -> Sample:
        self._admission.roll(now)
        elapsed, self._at = now - self._at, now
        before, self._counters = self._counters, self._read()
        new = self._counters.since(before)

        def rate(count: float) -> float:
            return round(count / elapsed, _RATE_DIGITS)

        first, between = self._metrics.first_tokens.counts, self._metrics.between_tokens.counts
        ttft, self._first_tokens = _since(self._first_tokens, first), first.copy()
        itl, self._between_tokens = _since(self._between_tokens, between), between.copy()
        return Sample(
            at=now,
            requests_per_s=rate(new.requests),
            prompt_tokens_per_s=rate(new.prompt_tokens),
            generated_tokens_per_s=rate(new.generated_tokens),
            ttft_p50_s=_percentile(ttft, 50),
            ttft_p99_s=_percentile(ttft, 99),
            itl_p50_s=_percentile(itl, 50),
            itl_p99_s=_percentile(itl, 99),
            in_flight=self._admission.requests,
            queued=len(self._table.queued),
            waiting=sum(one.load.requests_waiting for one in self._registry.live()),
            handoffs_per_s=rate(new.handoffs),
            handoff_bytes_per_s=rate(new.handoff_bytes),
            handoff_s=round(new.handoff_seconds / new.handoffs, 6) if new.handoffs else None,
            prefill_kv=self._kv_share("prefill"),
            decode_kv=self._kv_share("decode"),
            failed=new.failed,
            refused=new.refused,
        )

    def _read(self) -> Counters:
        transports = self._handoffs.by_transport.values()
        return Counters(
            requests=self._admission.ended.total,
            prompt_tokens=self._admission.prompt_tokens.total,
            generated_tokens=self._admission.tokens.total,
            handoffs=sum(one.count for one in transports),
            handoff_bytes=sum(one.bytes for one in transports),
            handoff_seconds=sum(one.seconds.total for one in transports),
            failed=self._metrics.total(FAILED),
            refused=self._metrics.refused.total(),
        )

    def _kv_share(self, role: str) -> float | None:
        loads = [worker.load for worker in self._registry.live() if worker.role == role]
        total = sum(load.kv_blocks_total for load in loads)
        return round(sum(load.kv_blocks_used for load in loads) / total, 4) if total else None


def _since(before: list[int], counts: list[int]) -> list[int]:
    return [now - old for now, old in zip(counts, before, strict=True)]


def _percentile(counts: list[int], percent: float) -> float | None:
    found = percentile(counts, percent)
    return None if found is None else round(found, 6)
