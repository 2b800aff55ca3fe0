"""Log events of this host's child processes: lines, progress bars, and reasons of exits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...runtime.process.main import SIGN_OF_LIFE
from .process import describe_log
from .progress import LoadProgress

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

    def hear(self, name: str, event: dict[str, Any]) -> None:
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
