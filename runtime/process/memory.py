"""Memory of the processes of this host, as shares: a page of N processes counts as 1/N in each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .control_groups import text_of

_PROC = Path("/proc")


def share_of(pid: int) -> int:
    """Return the bytes of a process, its shared pages divided among the processes that map them.

    0 if the process has ended or belongs to another user.
    """
    for line in text_of(_PROC / str(pid) / "smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def command_of(pid: int) -> list[str]:
    """Return the command line of a process, empty if it has ended."""
    return text_of(_PROC / str(pid) / "cmdline").split("\0")[:-1]


def parent_of(pid: int) -> int:
    """Return the parent of a process, 0 if the process has ended."""
    for line in text_of(_PROC / str(pid) / "status").splitlines():
        if line.startswith("PPid:"):
            return int(line.split()[1])
    return 0


def family_of(pid: int) -> Iterator[int]:
    """Yield a process and all processes that it has started."""
    yield pid
    for thread in sorted((_PROC / str(pid)).glob("task/*/children")):
        for child in text_of(thread).split():
            yield from family_of(int(child))
