"""Progress of loading the workers' checkpoints.

A terminal shows a bar that is redrawn. A log file gets lines: one if loading takes longer than
``MOMENT``, and one when a worker's weights are loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..local.banner import load_progress, mebibytes
from ..local.terminal import Terminal

INTERVAL = 0.1
"""Minimum seconds between two drawings of the bar."""
MOMENT = 1.0
"""Seconds of loading before a line is printed."""


@dataclass(slots=True)
class _Load:
    """Loading of one worker's weights: ``done`` of ``total`` bytes, and the lines printed."""

    began: float
    done: int = 0
    total: int = 0
    announced: bool = False
    ended: bool = False


class LoadProgress:
    """Collects ``(bytes done, bytes total)`` per worker. ``out`` receives the lines."""

    def __init__(
        self, out: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._draw = out.draw if isinstance(out, Terminal) and out.draws() else None
        self._clock = clock
        self._drawn_at = clock()
        self._loads: dict[str, _Load] = {}

    def update(self, name: str, done: int, total: int) -> None:
        """Worker ``name`` has packed ``done`` of ``total`` bytes of weights."""
        now = self._clock()
        load = self._loads.setdefault(name, _Load(began=now))
        if load.ended:
            return  # a repeated event
        load.done, load.total = done, total
        if done >= total:
            load.ended = True
            self._out(f"{name} loaded {mebibytes(total)} of weights in {now - load.began:.1f} s")
        elif self._draw is None and not load.announced and now >= load.began + MOMENT:
            load.announced = True
            self._out(f"{name} loads {mebibytes(total)} of weights")
        running = [(n, o.done, o.total) for n, o in self._loads.items() if not o.ended]
        if self._draw is not None and running and now >= self._drawn_at + INTERVAL:
            self._drawn_at = now
            self._draw(load_progress(running))

    def forget(self, name: str) -> None:
        """Drop an ended worker."""
        self._loads.pop(name, None)
