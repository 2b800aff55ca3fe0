"""Files that a user names: regular files alone, and those read as a whole never above a limit."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_file(path: str | Path) -> None:
    """Raise OSError unless this is a regular file or a link to one.

    A pipe may never have a writer and a device never end, so neither may be opened.
    """
    mode = Path(path).stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def check_writable(path: str | Path) -> None:
    """Raise OSError for a pipe, whose opening may never end. The file need not exist."""
    if Path(path).is_fifo():
        raise OSError(errno.EINVAL, "it is a pipe, not a regular file", str(path))


def read_small(path: str | Path) -> bytes:
    """Read a file of at most :data:`MAX_BYTES`. Raises OSError, also for a larger file."""
    check_file(path)
    with Path(path).open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_BYTES} bytes", str(path))
    return content
