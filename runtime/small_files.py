"""Files that a user names, which are read as a whole: never more than a limit."""

from __future__ import annotations

import errno
from pathlib import Path

MAX_BYTES = 1 << 20


def read_small(path: str | Path) -> bytes:
    """Read a file of at most :data:`MAX_BYTES`. Raises OSError, also for a larger file."""
    with Path(path).open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_BYTES} bytes", str(path))
    return content
