"""The control groups of this process, versions 1 and 2, for limits of memory and processors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def groups_of(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of each group with ``controller`` and of its parents.

    A container sees only the mount point, which counts as a parent of every group.
    """
    groups = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = groups / controller if controllers else groups
        group = mount / path.strip("/")
        for folder in (group, *group.parents):
            yield 1 if controllers else 2, folder
            if folder == mount:
                break


def text_of(path: Path) -> str:
    """Return the text of a file of the kernel; empty if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
