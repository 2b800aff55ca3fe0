"""The processor cores that this process may use, and the default number of compute threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .control_groups import groups_of, text_of

MAX_THREADS = 256
"""Most compute threads of a worker."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Usable cores, and a description of them: ``2 of 8 cores (CPU quota)``."""

    count: int
    title: str


@dataclass(frozen=True, slots=True)
class Threads:
    """Number of compute threads, and why: ``4 cores for 2 workers``."""

    count: int
    why: str


def usable_cores(root: Path = Path("/")) -> Cores:
    """Return the cores that this process may use: by affinity, and by quotas of control groups.

    A quota of two and a half cores counts as two; less than one as one.
    """
    machine = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    count = max(1, min(allowed, *(int(quota) for quota in _quotas(root)), allowed))
    if count == machine:
        return Cores(count, f"{count} {plural(count, 'core')}")
    limit = "affinity" if count == allowed else "CPU quota"
    return Cores(count, f"{count} of {machine} cores ({limit})")


def default_threads(workers: int, taken: int = 0, root: Path = Path("/")) -> Threads:
    """Divide the cores that other threads have not ``taken`` among the workers of a host."""
    cores = usable_cores(root)
    share = max(1, (cores.count - taken) // max(1, workers))
    why = f"{cores.title} for {workers} {plural(workers, 'worker')}"
    return Threads(min(share, MAX_THREADS), why + (f" beside {taken} threads" if taken else ""))


def plural(count: int, noun: str) -> str:
    """Return the noun, with an s unless there is one."""
    return noun if count == 1 else f"{noun}s"


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas of the control groups, in cores."""
    for version, folder in groups_of("cpu", root):
        if version == 1:
            words = [text_of(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        else:
            words = text_of(folder / "cpu.max").split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            yield int(words[0]) / int(words[1])
