"""How far the workers are with loading their checkpoints, shown now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

from .banner import load_progress

INTERVAL = 0.5
"""Least seconds between two lines."""


class LoadProgress:
    """Collects ``(bytes done, bytes total)`` per worker and shows all in one line.

    Shown at most every half second, and when all that began have finished.
    """

    def __init__(
        self, out: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._clock = clock
        self._shown_at = clock()
        self._shown = ""
        self._state: dict[str, tuple[int, int]] = {}

    def update(self, name: str, done: int, total: int) -> None:
        """Worker ``name`` has packed ``done`` of ``total`` bytes of weights."""
        self._state[name] = (done, total)
        finished = all(part >= whole for part, whole in self._state.values())
        line = load_progress([(n, *state) for n, state in sorted(self._state.items())])
        if line == self._shown or not (finished or self._clock() >= self._shown_at + INTERVAL):
            return
        self._shown, self._shown_at = line, self._clock()
        self._out(line)

    def forget(self, name: str) -> None:
        """The worker ended."""
        self._state.pop(name, None)
