"""Memory of this machine and its control groups, and that of the processes of this host.

Processes have shares: a page of N processes counts as 1/N in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .control_groups import groups_of, text_of

_PROC = Path("/proc")


def size_text(size: int) -> str:
    """Format a byte count in the largest unit of which there is at least one, such as "1.5 GiB"."""
    if size < 1024:
        return f"{size} B"
    value, unit = size / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if round(value, 1) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


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


def total_memory(root: Path = Path("/")) -> int | None:
    """Return the memory limit in bytes of this machine and its control groups; None if unknown."""
    machine = _field(root / "proc/meminfo", "MemTotal:")
    if machine is None:
        return None
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    limits = [
        text_of(folder / names[version]).strip() for version, folder in groups_of("memory", root)
    ]
    return min([machine << 10, *(int(limit) for limit in limits if limit.isdigit())])


def memory_holder(total: int, root: Path = Path("/")) -> str:
    """Return subject and verb for a sentence that ends with :func:`total_memory`."""
    machine = _field(root / "proc/meminfo", "MemTotal:")
    limited = machine is not None and total < machine << 10
    return "the limit of this control group is" if limited else "this machine has"


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that new processes can use without swapping; None if unknown.

    The minimum over the machine's available memory and the free memory of each control group
    (version 1 or 2) of this process. Caches count as free.
    """
    machine = _field(root / "proc/meminfo", "MemAvailable:")
    if machine is None:
        return None
    return max(0, min([machine << 10, *_group_rooms(root)]))


def _group_rooms(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    for version, folder in groups_of("memory", root):
        limit, usage, cache = names[version]
        most, used = text_of(folder / limit).strip(), text_of(folder / usage).strip()
        if most.isdigit() and used.isdigit():
            yield int(most) - int(used) + (_field(folder / "memory.stat", cache) or 0)


def _field(path: Path, name: str) -> int | None:
    """Return the number after a name in a file with one name and number per line."""
    for line in text_of(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None
