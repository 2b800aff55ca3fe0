"""Out of memory: which processes the kernel kills first, and the evidence of such a kill.

The kernel kills the process with the highest score: its share of the memory in thousandths plus
``oom_score_adj``. Losing a worker costs a replay of its requests on another worker. Losing a router
interrupts every stream, and losing a controller or a supervisor ends the repair of everything else.
So workers score higher than the processes that manage them. The margin is small: another process
that uses a tenth of the memory more than a worker is killed before the worker.

The exit code of a killed process only shows SIGKILL. But the kernel counts its out-of-memory kills,
per control group and for the whole machine. A count that rose shortly before a SIGKILL is the
evidence. If no count can be read, the message contains a hint for the operator.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from baton.runtime.process.memory import size_text, total_memory

WORKER_MARGIN = 100
"""Difference between the scores of a worker and of the process that starts it, in thousandths."""
_HIGHEST = 1000


def score_adjustment(pid: int | str = "self") -> int:
    """Return ``oom_score_adj`` of a process, -1000 to 1000."""
    return int(_file(pid).read_text())


def let_die_first(pid: int) -> None:
    """Set a worker's score above the score of this process. Ignores a refusal by the system."""
    with contextlib.suppress(OSError):
        _file(pid).write_text(str(min(score_adjustment() + WORKER_MARGIN, _HIGHEST)))


def score_like_parent() -> None:
    """Give this process its parent's score. Ignores a refusal by the system.

    For actors: Ray sets the score of its worker processes to 1000. The kernel would then kill the
    controller and the supervisors before any other process on the host.
    """
    with contextlib.suppress(OSError):
        _file("self").write_text(str(score_adjustment(os.getppid())))


def _file(pid: int | str) -> Path:
    return Path(f"/proc/{pid}/oom_score_adj")


LOOK_EVERY_S = 1.0
_SPAN = 10
"""Number of stored observations: a kill may be counted seconds before the exit is noticed."""
HINT = "(out of memory? see: dmesg | grep -i 'killed process')"
_BY_GROUP = "(out of memory: the kernel killed it at its memory limit, {limit})"
_BY_MACHINE = "(probably out of memory: the kernel has just killed a process on this machine)"


class OomWatch:
    """The counts of this machine and of the control groups around this process."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._looks: deque[tuple[int | None, int | None]] = deque(maxlen=_SPAN)
        self.look()

    def look(self) -> None:
        """Store the present counts. Call this every :data:`LOOK_EVERY_S`."""
        self._looks.append((_sum(_group_kills(self._root)), _machine_kills(self._root)))

    def evidence(self, code: int) -> str:
        """Describe the evidence about a process that has just ended with this exit code.

        Empty unless the process died of SIGKILL and a count rose.
        """
        if code != -signal.SIGKILL:
            return ""
        group, machine = _sum(_group_kills(self._root)), _machine_kills(self._root)
        group_before, machine_before = self._looks[0]
        if group is not None and group_before is not None and group > group_before:
            return _BY_GROUP.format(limit=_limit(self._root))
        if machine is None or machine_before is None:
            return HINT if group is None else ""
        return _BY_MACHINE if machine > machine_before else ""


def _limit(root: Path) -> str:
    total = total_memory(root)
    return "unknown" if total is None else size_text(total)


def _sum(counts: Iterator[int]) -> int | None:
    found = list(counts)
    return sum(found) if found else None


def _group_kills(root: Path) -> Iterator[int]:
    """Yield the counts of this process's control group and its parents, version 1 or 2."""
    groups = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = groups / "memory" if controllers else groups
        name = "memory.oom_control" if controllers else "memory.events"
        group = mount / path.strip("/")
        for folder in (group, *group.parents):
            yield from _counts(folder / name)
            if folder == mount:
                break


def _machine_kills(root: Path) -> int | None:
    return next(_counts(root / "proc/vmstat"), None)


def _counts(path: Path) -> Iterator[int]:
    for line in _lines(path):
        words = line.split()
        if len(words) == 2 and words[0] == "oom_kill" and words[1].isdigit():
            yield int(words[1])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
