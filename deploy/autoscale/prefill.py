"""The number of prefill workers that the load of the last minutes needed.

The arrivals of each second are recorded, and the speed of a worker is measured. From both, the
queue of N workers is simulated for every N. The result is the smallest N with which the required
share of requests would have met the TTFT target. The simulation is valid for bursts and for steady
load, and needs no rule of thumb about utilisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...prefill_worker.start_order import LATE_TURN
from .history import Deltas, History, Rate, Values, fewest, growth, headroom
from .metrics import LONGEST_STEP_S, RouterSample, WorkerSample
from .settings import ScaleSettings

MOST_TOKENS = 10**8
"""Maximum plausible tokens between two observations."""


class PrefillDemand:
    """History of arrivals, the speed of a worker, and the number of workers for both."""

    def __init__(self, settings: ScaleSettings) -> None:
        self._settings = settings
        self._history = History(2, settings.window)  # prompt tokens, requests
        self._deltas = Deltas()
        self._rate = Rate(half_life_s=120.0, least_s=1.0)
        self._tokens = self._requests = 0.0  # since the last row
        self._waiting = 0.0

    def see(
        self, routers: Sequence[RouterSample], workers: Sequence[WorkerSample], now: float
    ) -> None:
        """Record one observation. All samples are usable."""
        for router in routers:
            # If a request ends without a first token, the sum falls. Deltas counts that as zero.
            arrived = router.started_tokens + router.queued_tokens
            owner = (router.name, router.life)
            (requests,) = self._deltas.of((owner, "requests"), router.submitted)
            (tokens,) = self._deltas.of((owner, "tokens"), arrived)
            if tokens <= MOST_TOKENS:
                self._requests += requests
                self._tokens += tokens
        for worker in workers:
            owner = (worker.name, worker.incarnation)
            prompt, cached, seconds = self._deltas.of(
                owner, worker.prompt_tokens, worker.cached_tokens, worker.compute_seconds
            )
            if 0 < seconds <= LONGEST_STEP_S and prompt + cached <= MOST_TOKENS:
                self._rate.add(prompt + cached, seconds)
        self._waiting = sum(worker.tokens_waiting for worker in workers)
        if self._history.due(now):
            self._history.add((self._tokens, self._requests), now, amounts=True)
            self._tokens = self._requests = 0.0

    def needed(
        self, margin: float, ahead_s: float, most: int, *, spare: bool = False
    ) -> int | None:
        """Fewest workers that use at most ``margin`` of the limit; None without enough data.

        ``ahead_s``: extrapolate growth by this many seconds. ``spare``: add headroom for bursts.
        """
        rate = self._rate.value
        if rate is None or not len(self._history):
            return None
        tokens, requests = self._history.columns()
        if not requests.sum():
            return 1
        more = growth(tokens, ahead_s) if ahead_s else 1.0
        more *= headroom(tokens) if spare else 1.0
        work = tokens * (more / rate)
        own = np.divide(work / more, requests, out=np.zeros_like(work), where=requests > 0)
        limit = self._settings.slo_ttft * margin

        def enough(workers: int) -> bool:
            return share_in_time(work, requests, own, workers, limit) >= self._settings.keep

        return fewest(enough, most)

    def lasting(self, workers: int, cold_s: float) -> bool:
        """Whether more than ``workers`` would help although they need ``cold_s`` to start.

        More workers help if more work arrives than ``workers`` can do, or if first tokens have
        been late for longer than ``cold_s``. A shorter burst ends before new workers are ready.
        Such a burst only prevents the pool from shrinking.
        """
        rate = self._rate.value
        if rate is None:
            return False
        tokens, requests = self._history.columns()
        work = tokens / rate
        recent = work[-max(1, round(cold_s)) :]
        if recent.sum() > workers * max(len(recent), cold_s):
            return True
        own = np.divide(work, requests, out=np.zeros_like(work), where=requests > 0)
        limit = self._settings.slo_ttft
        possible = (requests > 0) & (own <= limit)
        missed = in_time(work, own, workers, limit) < self._settings.keep
        late = np.flatnonzero(possible & missed)
        return bool(len(late)) and late[-1] - late[0] >= cold_s

    def behind(self, target: int, cold_s: float, most: int, *, coming: bool) -> int:
        """Fewest workers that keep the queue within the limit; 0 if ``target`` is enough.

        The history of arrivals shows a lack of workers only after requests are late, which is one
        cold start too late. So the present queue is extrapolated with the mean load, until a new
        worker would be ready and for half the window after that. ``coming``: workers are already
        starting, so requests that wait for them do not order more.
        """
        rate = self._rate.value
        if rate is None:
            return 0
        load = mean_load(self._history.columns()[0] / rate)
        limit = self._settings.slo_ttft * self._settings.up_margin
        queue = min(self._waiting / rate, limit * target)  # requests beyond this are late anyway
        surplus = load - target
        horizon = cold_s + self._settings.window / 2
        if surplus <= 0 or queue + surplus * horizon <= limit * target:
            return 0
        wanted = math.ceil(load)
        if not coming:  # enough to finish the queue of that time within the limit
            late = math.ceil((queue + surplus * cold_s) / limit)
            wanted = max(wanted, min(late, 2 * wanted))
        return min(wanted, most)

    def wait(self, workers: int) -> float:
        """Seconds for ``workers`` to compute all waiting prompts; 0 while the rate is unknown."""
        rate = self._rate.value
        return 0.0 if rate is None or not workers else self._waiting / rate / workers


def share_in_time(work: Values, requests: Values, own: Values, workers: int, limit: float) -> float:
    """Share of ``requests`` whose first token ``workers`` compute within ``limit`` seconds.

    Prompts whose own computation exceeds the limit are ignored: more workers cannot help them.
    """
    possible = np.where(own <= limit, requests, 0.0)
    if not possible.sum():
        return 1.0
    return float(possible @ in_time(work, own, workers, limit) / possible.sum())


def mean_load(work: Values) -> float:
    """Mean work per second, or 0 with less than thirty seconds of data."""
    return float(work.mean()) if len(work) >= 30 else 0.0


def in_time(work: Values, own: Values, workers: int, limit: float) -> Values:
    """For the arrivals of each second, the share with a first token within ``limit`` seconds.

    ``work``: arrived work in worker-seconds. ``own``: work of one request. The simulated queue has
    the order of :mod:`..prefill_worker.start_order`: late prompts start after prompts that can
    still be in time, except for one start in LATE_TURN.
    """
    shares = np.ones(len(work))
    backlog = late = 0.0
    for second, (came, alone) in enumerate(zip(work.tolist(), own.tolist(), strict=True)):
        power = workers * (1 - 1 / LATE_TURN) if late else float(workers)
        before = backlog + came
        over = min(came, max(0.0, before - power - workers * max(0.0, limit - alone)))
        backlog = max(0.0, before - over - power)
        late = max(0.0, late + over - (workers - (before - over - backlog)))
        if over:
            shares[second] = 1 - over / came
    return shares
