"""What the children of this host log: shown, shown as progress, or kept as the reason of an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..runtime.process import SIGN_OF_LIFE
from .processes import describe_log
from .progress import LoadProgress

_SEVERITY = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 3}
_HOPELESS = 1
"""Exit code of a process that another start would not help."""


class ChildLog:
    """``out`` gets the lines from ``level`` on, ``on_life`` the name for each sign of life."""

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
        self._gave_in: set[str] = set()  # workers that said why they end

    def hear(self, name: str, event: dict[str, Any]) -> None:
        """One event of a child's log."""
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
            self._refused.add(name)  # what it said comes with what is decided about its end
            return
        if severity >= self._shown_from:
            self._out(f"{name}: {event.get('level', 'info')}: {line}")

    def ended(self, name: str, code: int) -> tuple[str, bool]:
        """Why a child ended, and whether its settings are wrong; then it is forgotten.

        They are too when the routers refused it for good, as one that serves another model.
        """
        self._progress.forget(name)
        refused = name in self._refused or (name in self._gave_in and code == _HOPELESS)
        self._refused.discard(name)
        self._gave_in.discard(name)
        words = self._last_words.pop(name, "")
        return self._last_error.pop(name, "") or (words if code > 0 else ""), refused
