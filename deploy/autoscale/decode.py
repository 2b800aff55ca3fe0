"""How many decode workers the last minutes would have needed.

Two things end a decode worker's capacity: its KV blocks, and a step that takes longer than
tokens may be apart. How a step grows with the blocks it reads is fitted to what is measured.
With fewer workers steps take longer, so requests stay longer and hold more blocks; that is
solved for, as a pool that just copes would otherwise look as if it could shrink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .history import History, Values, fewest, growth, headroom
from .metrics import WorkerSample
from .settings import ScaleSettings


class StepFit:
    """Seconds of a step as ``base + slope * blocks``, by least squares that forget."""

    def __init__(self, half_life: float = 2000.0) -> None:
        self._keep = math.exp2(-1 / half_life)
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, blocks: float, seconds: float) -> None:
        """One worker's step at one moment."""
        keep = self._keep
        self._n = self._n * keep + 1
        self._x = self._x * keep + blocks
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + blocks * blocks
        self._xy = self._xy * keep + blocks * seconds

    @property
    def line(self) -> tuple[float, float] | None:
        """``(base, slope)``, neither negative; None before ten steps were seen."""
        if self._n < 10:
            return None
        x, y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - x * x
        slope = (self._xy / self._n - x * y) / spread if spread > 1e-3 * x * x else 0.0
        slope = min(max(0.0, slope), y / x if x > 0 else 0.0)
        return y - slope * x, slope


class DecodeDemand:
    """Blocks in use, how long steps take with them, and what both ask for."""

    def __init__(self, settings: ScaleSettings) -> None:
        self._settings = settings
        self._history = History(3, settings.window)  # blocks, requests, step seconds
        self._fit = StepFit()
        self._capacity = 0.0
        self.step_s = 0.0
        """Of the slowest worker now."""

    def see(self, workers: Sequence[WorkerSample], now: float) -> None:
        """Note one observation; all samples are usable."""
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
            total *= (running + waiting) / running  # those that wait hold nothing yet
        if self._history.due(now):
            self._history.add((total, running + waiting, self.step_s), now, amounts=False)

    def needed(
        self, margin: float, ahead_s: float, most: int, *, spare: bool = False
    ) -> int | None:
        """Fewest workers that keep ``margin`` of the limits; None while too little is known."""
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
        """Whether steps can be short enough at all; if not, only room counts."""
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
        """Share of requests that ``workers`` would have had room and time for."""
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
