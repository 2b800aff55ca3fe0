"""What the router counts: requests by outcome, latencies, sizes and handoffs, since its start.

Counting is part of every request's path. So the path keeps only rows of numbers, which are counted
many at once. :mod:`.families` makes metrics for Prometheus of the counts, and :mod:`.status` the
status report.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import inf, isfinite

import numpy as np

from baton.proto.contexts.status import GenerationStatus
from baton.proto.errors import BatonError, known_codes
from baton.proto.wire.messages import Terminal, WorkerTimes
from baton.runtime.metrics.families import (
    GAP_S,
    LATENCY_S,
    TOKENS,
    Column,
    Histogram,
    Rows,
)
from baton.runtime.metrics.latency import Latency

from .records import CLIENT_GONE, Attempt, Request

OK, FAILED, CANCELLED, DISCONNECTED = "ok", "failed", "cancelled", "disconnected"
REASONS = {
    GenerationStatus.END_OF_SEQUENCE.value: (OK, "stop"),
    GenerationStatus.MAXIMUM_LENGTH.value: (OK, "length"),
}
"""Outcome and finish reason of a terminal by its status."""
OWNERS = ("cluster", "own")
"""Whose limits a request has."""
MISSED = ("none", "ttft", "itl", "both")
"""Which limits a finished request missed; none: it counts for goodput."""
_CODES = known_codes()
_FINISHED = tuple(REASONS.values())
_NUMBERS = {status: number for number, status in enumerate(REASONS)}
_NOT_REACHED = -1.0


class Served:
    """Latencies and sizes of finished requests, and the times of attempts at prefill workers."""

    def __init__(self) -> None:
        self.finished = [0] * len(_FINISHED)  # by finish reason
        self.cached_tokens = 0
        self.durations = Histogram(LATENCY_S)
        self.queues = Histogram(LATENCY_S)
        self.prefills = Histogram(LATENCY_S)
        self.decoding = Histogram(LATENCY_S)
        self.per_token = Histogram(GAP_S)
        self.prompts = Histogram(TOKENS)
        self.generated = Histogram(TOKENS)
        self.kept: Counter[tuple[str, str]] = Counter()
        """Finished requests by whose limits they have, and by those that they missed."""

    def count_requests(self, columns: Column) -> None:
        """Count finished requests; the columns are those of :meth:`Metrics.ended`."""
        reason, cached, base, end, submitted, first, last, ended, own, ttft, itl = columns
        found = np.bincount(reason.astype(np.intp), minlength=len(_FINISHED))
        self.finished = [one + int(new) for one, new in zip(self.finished, found, strict=True)]
        self.cached_tokens += int(cached.sum())
        tokens = end - base
        self.prompts.observe_all(base)
        self.generated.observe_all(tokens)
        seconds = ended - submitted
        timed = seconds > 0  # a resumed request has no beginning
        self.durations.observe_all(seconds[timed])
        several = timed & (tokens > 1) & np.isfinite(first) & np.isfinite(last)
        decoding = last[several] - first[several]
        self.decoding.observe_all(decoding)
        self.per_token.observe_all(decoding / (tokens[several] - 1))
        gaps = np.zeros(len(tokens))
        gaps[several] = decoding / (tokens[several] - 1)
        limited = timed & np.isfinite(first) & (ttft >= 0)
        waited = first[limited] - submitted[limited]  # of others it may be the infinite less itself
        missed = (waited > ttft[limited]) + 2 * (gaps > itl)[limited] + len(MISSED) * own[limited]
        counts = np.bincount(missed.astype(np.intp), minlength=2 * len(MISSED))
        for key, count in zip(product(OWNERS, MISSED), counts.tolist(), strict=True):
            self.kept[key] += count

    def count_attempts(self, columns: Column) -> None:
        """Count attempts at prefill workers; the columns are those of :meth:`Metrics.prefilled`."""
        waited, computing, computed = columns
        self.queues.observe_all(np.maximum(waited, 0.0) + computing)
        reached = computed != _NOT_REACHED
        self.prefills.observe_all(np.maximum(computed[reached] - computing[reached], 0.0))


class Metrics:
    """Numbers of requests by outcome since the start, their latencies and their sizes.

    ``local``: attempts without a prefill worker, by reason. ``refused``: by error code.
    ``dropped``: messages and token runs without effect, by reason.
    ``first_tokens``: TTFT; ``between_tokens``: ITL; ``first_piece``: until the first piece of
    a file that tokens complete; ``first_tokens_s``, ``between_tokens_s`` and ``first_piece_s``:
    their sums in seconds.
    """

    __slots__ = (
        "_attempts", "_limits", "_lost", "_requests", "_served",
        "between_tokens", "between_tokens_s",
        "dropped", "first_piece", "first_piece_s", "first_tokens", "first_tokens_s",
        "local", "moved", "refused", "replayed", "submitted",
    )  # fmt: skip

    def __init__(self, slo_ttft: float = 0.0, slo_itl: float = 0.0) -> None:
        """``slo_ttft``, ``slo_itl``: the cluster's limits in seconds; 0: none."""
        self._limits = slo_ttft or inf, slo_itl or inf
        self.submitted = self.replayed = self.moved = 0
        self.local: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.first_tokens = Latency()
        self.between_tokens = Latency()
        self.first_piece = Latency()
        self.first_tokens_s = self.between_tokens_s = self.first_piece_s = 0.0
        self._lost: Counter[tuple[str, str]] = Counter()  # outcomes of requests without a result
        self._served = Served()
        self._requests = Rows(11, self._served.count_requests)
        self._attempts = Rows(3, self._served.count_attempts)

    def ended(self, request: Request, terminal: Terminal, now: float) -> None:
        """Count an admitted request that ends, by its outcome."""
        code = terminal.code
        reason = None if code else _NUMBERS.get(terminal.status or "")
        if reason is not None:
            ttft, itl = self._limits
            own = request.slo_ttft > 0 or request.slo_itl > 0
            if request.embeds or request.work.file:
                ttft = _NOT_REACHED  # their limits would be others
            self._requests.add(
                (
                    reason, terminal.cached_tokens, request.base, request.next,
                    request.submitted_at, request.first_at, request.token_at, now,
                    own, request.slo_ttft or ttft, request.slo_itl or itl,
                )
            )  # fmt: skip
            if terminal.times is not None and not terminal.decode:
                self.prefilled(request, request.attempt, terminal.times)
        elif terminal.status == CANCELLED or code == CANCELLED:
            gone = request.attempt.cause == CLIENT_GONE
            outcome = DISCONNECTED if gone else CANCELLED
            self._lost[outcome, outcome] += 1
        else:
            self._lost[FAILED, code if code in _CODES else "other"] += 1

    def prefilled(self, request: Request, attempt: Attempt, times: WorkerTimes) -> None:
        """Count an attempt's queue time and prefill time, as its prefill worker measured them."""
        computing, computed = times.computing, times.computed
        waited = attempt.assigned_at - request.submitted_at
        if computing is None or not isfinite(waited):
            return
        if computed is None:
            computed = _NOT_REACHED
        self._attempts.add((waited, computing, computed))

    def refuse(self, error: BatonError) -> None:
        """Count a request that was not admitted."""
        self.refused[error.code] += 1

    @property
    def served(self) -> Served:
        """Latencies and sizes of all requests so far."""
        self._requests.fold()
        self._attempts.fold()
        return self._served

    @property
    def outcomes(self) -> Counter[tuple[str, str]]:
        """Numbers of ended requests by (outcome, finish reason or error code)."""
        finished = zip(_FINISHED, self.served.finished, strict=True)
        return self._lost + Counter({reason: count for reason, count in finished if count})

    def total(self, outcome: str) -> int:
        """Return the number of requests with this outcome."""
        return sum(count for (found, _), count in self.outcomes.items() if found == outcome)
