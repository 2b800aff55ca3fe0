"""The address at which each user's own cluster on this machine listens by default.

Invariant: only this user can create sockets in the folder of the address.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from baton.proto.errors import ConfigError


def default_address() -> str:
    """Return this user's ipc address, the default of ``serve`` and of the other commands."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime_dir and Path(runtime_dir).is_dir():
        return f"ipc://{Path(runtime_dir) / 'baton.sock'}"
    return f"ipc://{private_folder() / 'serve.sock'}"


def private_folder() -> Path:
    """Return this user's folder for sockets, without creating it."""
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


def make_folder(folder: Path) -> None:
    """Create a folder that only this user can enter. Raises ConfigError for another one."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # check_folder below reports a path that is not a folder
    except OSError as problem:
        raise ConfigError(f"cannot make {folder}: {problem.strerror}") from problem
    check_folder(folder)


def trusted_default_address() -> str:
    """Like :func:`default_address`, but ConfigError if another user could listen there."""
    address = default_address()
    folder = Path(address.removeprefix("ipc://")).parent
    if folder.exists():  # else connecting fails with a better message
        check_folder(folder)
    return address


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless only this user can create sockets in ``folder``."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user; give --address")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"other users may write to {folder}; set its mode to 0700 or give --address"
        )
