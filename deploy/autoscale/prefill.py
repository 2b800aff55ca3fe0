"""How many prefill workers the last minutes would have needed.

What came is known second by second, and how fast a worker computes is measured. So the queue
that N workers would have had is played through for every N, and the fewest are taken with
which the share of requests that was asked for would have had its first token in time. This
holds for bursts as well as for steady load, and for N - 1 as well as for N + 1; no rule of thumb
about utilisation is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...prefill_worker.start_order import LATE_TURN
from .counters import Deltas, Rate
from .history import History, Values, fewest, growth, headroom
from .metrics import LONGEST_STEP_S, RouterSample, WorkerSample
from .settings import ScaleSettings

MOST_TOKENS = 10**8
"""More between two observations is damage."""


class PrefillDemand:
    """Arrivals, the speed of a worker, and what both ask for."""

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
        """Note one observation; all samples are usable."""
        for router in routers:
            # A request that ends unanswered leaves the queue: its tokens then seem to go back,
            # which Deltas takes for nothing.
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
        """Fewest workers that keep ``margin`` of the limit; None while too little is known.

        ``ahead_s``: how far growth is carried on, 0 for none.
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
        """Whether more than ``workers`` would help, though they come ``cold_s`` after their order.

        They do where more work comes than is done, or where first tokens were late so long ago
        that workers ordered then would be here by now. A burst that is over sooner would be
        paid for in vain; it only keeps the pool from shrinking.
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
        """Fewest workers with which the queue does not outgrow the limit; 0: ``target`` will do.

        What came tells of too few workers when requests are late already, a whole cold start
        before help. So the queue as it is is carried on by the mean load, until a worker would be
        here and then for half the window. ``coming``: others start, and what waits for them
        orders no more.
        """
        rate = self._rate.value
        if rate is None:
            return 0
        load = mean_load(self._history.columns()[0] / rate)
        limit = self._settings.slo_ttft * self._settings.up_margin
        queue = min(self._waiting / rate, limit * target)  # the rest is late already
        surplus = load - target
        horizon = cold_s + self._settings.window / 2
        if surplus <= 0 or queue + surplus * horizon <= limit * target:
            return 0
        wanted = math.ceil(load)
        if not coming:  # enough that what waits by then is done in time
            late = math.ceil((queue + surplus * cold_s) / limit)
            wanted = max(wanted, min(late, 2 * wanted))
        return min(wanted, most)

    def wait(self, workers: int) -> float:
        """Seconds until what waits now is computed by ``workers``; 0 while unknown."""
        rate = self._rate.value
        return 0.0 if rate is None or not workers else self._waiting / rate / workers


def share_in_time(work: Values, requests: Values, own: Values, workers: int, limit: float) -> float:
    """Share of ``requests`` whose first token ``workers`` make within ``limit`` seconds.

    Prompts that take longer by themselves count for nothing: no number of workers helps them.
    """
    possible = np.where(own <= limit, requests, 0.0)
    if not possible.sum():
        return 1.0
    return float(possible @ in_time(work, own, workers, limit) / possible.sum())


def mean_load(work: Values) -> float:
    """Work per second; of less than thirty seconds nothing is known, and it is 0."""
    return float(work.mean()) if len(work) >= 30 else 0.0


def in_time(work: Values, own: Values, workers: int, limit: float) -> Values:
    """Of what came in each second, the share whose first token is made within ``limit`` seconds.

    ``work`` that came in worker-seconds, ``own`` work of one request. A queue in the order of
    :mod:`..prefill_worker.start_order`: what cannot be in time any more waits behind what can,
    but for one start in LATE_TURN.
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
