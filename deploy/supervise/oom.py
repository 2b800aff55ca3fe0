"""The order in which the kernel kills Baton's processes if a host or container runs out of memory.

The kernel kills the process with the highest score: its share of the memory in thousandths plus
``oom_score_adj``. Losing a worker costs a replay of its requests on another worker. Losing a router
interrupts every stream, and losing a controller or a supervisor ends the repair of everything else.
So workers score higher than the processes that manage them. The margin is small: another process
that uses a tenth of the memory more than a worker is killed before the worker.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

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
