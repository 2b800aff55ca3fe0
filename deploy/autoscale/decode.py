"""The number of decode workers that the load of the last minutes needed.

Two limits bound a decode worker's capacity: its KV blocks, and the target inter-token latency
(ITL), which a step must not exceed. A line fitted to measurements gives the step time for a number
of blocks. With fewer workers, steps take longer, so requests run longer and hold more blocks. The
calculation includes this feedback. Otherwise a fully loaded pool would seem able to shrink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .history import History, Values, fewest, growth, headroom
from .metrics import WorkerSample
from .settings import ScaleSettings


class StepFit:
    """Fit step seconds as ``base + slope * blocks``, by least squares with fading old samples."""

    def __init__(self, half_life: float = 2000.0) -> None:
        self._keep = math.exp2(-1 / half_life)
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, blocks: float, seconds: float) -> None:
        """Add one worker's step: KV blocks in use, and its duration in seconds."""
        keep = self._keep
        self._n = self._n * keep + 1
        self._x = self._x * keep + blocks
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + blocks * blocks
        self._xy = self._xy * keep + blocks * seconds

    @property
    def line(self) -> tuple[float, float] | None:
        """``(base, slope)``, neither negative; None before ten samples."""
        if self._n < 10:
            return None
        x, y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - x * x
        slope = (self._xy / self._n - x * y) / spread if spread > 1e-3 * x * x else 0.0
        slope = min(max(0.0, slope), y / x if x > 0 else 0.0)
        return y - slope * x, slope


class DecodeDemand:
    """History of blocks in use and step times, and the number of workers for them."""

    def __init__(self, settings: ScaleSettings) -> None:
        self._settings = settings
        self._history = History(3, settings.window)  # blocks, requests, step seconds
        self._fit = StepFit()
        self._capacity = 0.0
        self.step_s = 0.0
        """Step seconds of the slowest worker in the last observation."""

    def see(self, workers: Sequence[WorkerSample], now: float) -> None:
        """Record one observation. All samples are usable."""
        self.step_s = 0.0
        total = 0.0
        for worker in workers:
            if worker.running and worker.step_s:
                self._fit.add(worker.kv_used, worker.step_s)
                self.step_s = max(self.step_s, worker.step_s)
            total += worker.kv_used
        self._capacity = min((worker.kv_total for worker in workers), default=0)
        running = sum(worker.running for worker in workers)
        waiting = sum(worker.waiting for worker in workers)
        if running:
            total *= (running + waiting) / running  # waiting requests hold no blocks yet
        if self._history.due(now):
            self._history.add((total, running + waiting, self.step_s), now, amounts=False)

    def needed(
        self, margin: float, ahead_s: float, most: int, *, spare: bool = False
    ) -> int | None:
        """Fewest workers that use at most ``margin`` of the limits; None without enough data.

        ``ahead_s``: extrapolate growth by this many seconds. ``spare``: add headroom for bursts.
        """
        line = self._fit.line
        if not len(self._history) or not self._capacity:
            return None
        blocks, requests, steps = self._history.columns()
        if not requests.sum():
            return 1
        if line is None:
            return None
        more = growth(blocks, ahead_s) if ahead_s else 1.0
        more *= headroom(blocks) if spare else 1.0
        held = blocks * more

        def enough(workers: int) -> bool:
            share = self._share(held, requests, steps, workers, margin, line)
            return share >= self._settings.keep

        return fewest(enough, most)

    def can_keep(self, margin: float = 1.0) -> bool:
        """Whether an empty step meets the ITL target. If not, only KV blocks limit the load."""
        line = self._fit.line
        return line is not None and line[0] < self._settings.slo_itl * margin

    def _share(
        self,
        blocks: Values,
        requests: Values,
        steps: Values,
        workers: int,
        margin: float,
        line: tuple[float, float],
    ) -> float:
        """Share of requests that ``workers`` could have served within both limits."""
        base, slope = line
        room = self._capacity * self._settings.kv_share * margin / self._settings.up_margin
        step = np.where(steps > 0, steps, base)
        per_step = blocks / (workers * np.maximum(step, 1e-9))
        stays = 1 - per_step * slope
        held = np.where(stays > 0, per_step * base / np.where(stays > 0, stays, 1.0), np.inf)
        held = np.maximum(held, 0.0)
        fits = held <= room
        if self.can_keep(margin):
            fits &= base + slope * held <= self._settings.slo_itl * margin
        return float(requests[fits].sum() / requests.sum())
