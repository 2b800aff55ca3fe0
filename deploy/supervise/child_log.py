"""Log events of child processes: lines, the progress of loading, and reasons of exits.

For the progress of loading, a terminal shows a bar that is redrawn. A log file gets lines: one if
loading takes longer than ``MOMENT``, and one when a worker's weights are loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...runtime.process.main import SIGN_OF_LIFE
from ..local.terminal import Terminal
from ..messages import load_progress, mebibytes
from .process import describe_log

INTERVAL = 0.1
"""Minimum seconds between two drawings of the bar."""
MOMENT = 1.0
"""Seconds of loading before a line is printed."""
_SEVERITY = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 3}
_HOPELESS = 1
"""Exit code of a process that would fail again after a restart."""


class ChildLog:
    """Handles the log events of child processes.

    ``out`` receives lines of severity ``level`` and above. ``on_life`` receives the process name
    of each heartbeat to the supervisor.
    """

    def __init__(
        self,
        out: Callable[[str], object],
        level: str,
        on_life: Callable[[str], object] = lambda _name: None,
    ) -> None:
        self._out = out
        self._on_life = on_life
        self._shown_from = _SEVERITY[level]
        self._progress = LoadProgress(out)
        self._last_error: dict[str, str] = {}
        self._last_words: dict[str, str] = {}
        self._refused: set[str] = set()
        self._gave_in: set[str] = set()  # workers that logged why they exit

    def handle(self, name: str, event: dict[str, Any]) -> None:
        """Handle one event of a child's log."""
        if event.get("event") == SIGN_OF_LIFE:
            self._on_life(name)
            return
        severity = _SEVERITY.get(str(event.get("level", "info")), 1)
        if event.get("event") == "load.progress":
            done, total = (event.get(key, 0) for key in ("bytes_done", "bytes_total"))
            self._progress.update(name, int(done), int(total))
            return
        line = describe_log(event)
        if event.get("raw"):
            self._last_words[name] = line
        if severity >= _SEVERITY["error"]:
            self._last_error[name] = str(event.get("error", line))
        if event.get("event") == "worker.exit" and severity >= _SEVERITY["error"]:
            self._last_error[name] = str(event.get("reason", line))
            self._gave_in.add(name)
        if event.get("event") == "process.failed":
            self._refused.add(name)  # the error is printed with the decision about the exit
            return
        if severity >= self._shown_from:
            self._out(f"{name}: {event.get('level', 'info')}: {line}")

    def ended(self, name: str, code: int) -> tuple[str, bool]:
        """Return the reason of a child's exit and whether its settings are wrong.

        Settings are also wrong if the routers rejected the worker permanently, for example because
        it serves another model. Drops all data about the child.
        """
        self._progress.forget(name)
        refused = name in self._refused or (name in self._gave_in and code == _HOPELESS)
        self._refused.discard(name)
        self._gave_in.discard(name)
        words = self._last_words.pop(name, "")
        return self._last_error.pop(name, "") or (words if code > 0 else ""), refused


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
