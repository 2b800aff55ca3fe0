"""The memory in which the workers of one supervisor share their packed weights.

The supervisor holds an empty memfd for each model and kind of kernels; workers fill and map it
(:mod:`baton.engine.kernels.shared_weights`). So a restarted worker finds the weights, and nothing
is left if all processes are killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from baton.engine.kernels.shared_weights import has_huge_pages, new_memory
from baton.engine.loading.runner_config import RunnerConfig
from baton.runtime.process.log import get_logger

from .process import ProcessSpec

_log = get_logger()
Key = tuple[str, str, str, bool]


class WeightsMemories:
    """One descriptor for each model that workers of this supervisor may share."""

    def __init__(self) -> None:
        self._open: dict[Key, int] = {}

    def of(self, spec: ProcessSpec) -> int:
        """Return the descriptor for a process; -1 if it shares no weights."""
        key = _key(spec)
        if key is None:
            return -1
        if key not in self._open:
            try:
                self._open[key] = new_memory()
            except (OSError, AttributeError) as problem:  # a sandbox, or a system without memfd
                _log.warning("weights.private", error=str(problem))
                return -1
        return self._open[key]

    def keep(self, specs: Iterable[ProcessSpec]) -> None:
        """Close the memory of models that none of these processes uses."""
        used = {_key(spec) for spec in specs}
        for key in [key for key in self._open if key not in used]:
            os.close(self._open.pop(key))


def _key(spec: ProcessSpec) -> Key | None:
    """Return what decides the packed weights, as far as the settings show it."""
    runner = getattr(spec.config, "runner", None)
    if not isinstance(runner, RunnerConfig) or runner.backend in ("cuda", "numpy"):
        return None
    if runner.share_weights == "off":
        return None
    if runner.share_weights == "auto" and not has_huge_pages():
        return None
    tower = runner.vision and _sees(Path(runner.model))
    return runner.model, runner.backend, runner.task, tower


def _sees(model: Path) -> bool:
    """Return whether the model has a vision tower, which decode workers do not load."""
    try:
        return b'"vision_config"' in (model / "config.json").read_bytes()
    except OSError:
        return False  # the workers report the error
