"""A cluster's private folder of socket and config files, and the removal of old folders.

The folder has mode 0700 and contains ``owner.lock``, locked (flock) by the supervisor while it
lives. The kernel releases the lock when the process ends in any way. So a folder whose lock is free
has no owner: the next start removes the folder and the socket files listed in its file
``sockets``. Process ids are not used, because the kernel may reuse them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from baton.proto.errors import ConfigError
from baton.proto.wire.endpoints import MAX_IPC_PATH_BYTES

PREFIX = "baton-run-"
_LOCK = "owner.lock"
_SOCKETS = "sockets"


class RunFolder:
    """An open run folder. :meth:`close` removes it."""

    def __init__(self, parent: Path | None = None) -> None:
        base = parent or Path(tempfile.gettempdir())
        try:
            new = Path(tempfile.mkdtemp(prefix="baton-new-", dir=base.absolute()))
        except OSError as problem:
            raise _no_folder(base, problem) from problem
        try:
            self._lock = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Rename after locking: a sweep would remove an unlocked folder with this prefix.
            self.path = new.rename(new.with_name(new.name.replace("baton-new-", PREFIX)))
        except OSError as problem:
            shutil.rmtree(new, ignore_errors=True)
            raise _no_folder(base, problem) from problem

    def ipc(self, name: str) -> str:
        """Return the ``ipc://`` address of a socket file in this folder.

        Raises ConfigError if the path is too long.
        """
        path = str(self.path / f"{name}.sock")
        if len(path.encode()) > MAX_IPC_PATH_BYTES:
            raise ConfigError(
                f"the socket path {path} is longer than {MAX_IPC_PATH_BYTES} bytes; "
                "set TMPDIR to a shorter folder"
            )
        return f"ipc://{path}"

    def write(self, name: str, content: bytes) -> Path:
        """Write a file with mode 0600 and return its path. Raises ConfigError.

        A file with the same content is not written again, so that a worker can restart on a full
        disk.
        """
        path = self.path / name
        try:
            if path.exists() and path.read_bytes() == content:
                return path
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        except OSError as problem:
            raise _not_written(path, problem) from problem
        return path

    def own_socket(self, path: Path) -> None:
        """List a socket file outside this folder, to be removed with it. Raises ConfigError."""
        try:
            with (self.path / _SOCKETS).open("a") as file:
                file.write(f"{path}\n")
        except OSError as problem:
            raise _not_written(self.path / _SOCKETS, problem) from problem

    def close(self) -> None:
        """Remove the folder and the listed socket files."""
        _remove(self.path)
        os.close(self._lock)


def _no_folder(base: Path, problem: OSError) -> ConfigError:
    return ConfigError(f"cannot make a run folder in {base}: {problem.strerror}")


def _not_written(path: Path, problem: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {path}: {problem.strerror}; free disk space there, or choose another folder "
        "with --run-dir or TMPDIR"
    )


def sweep(parent: Path | None = None) -> list[Path]:
    """Remove this user's run folders of dead supervisors. Returns the removed folders."""
    base = parent or Path(tempfile.gettempdir())
    return [path for path in sorted(base.glob(f"{PREFIX}*")) if sweep_one(path)]


def sweep_one(path: Path) -> bool:
    """Remove a run folder of this user if its supervisor is dead. Returns whether it did."""
    if not path.name.startswith(PREFIX):
        return False
    try:
        if path.stat().st_uid != os.getuid():
            return False
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # being made or removed now, or not a run folder
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        _remove(path)
        return True
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        for line in (path / _SOCKETS).read_text().splitlines():
            remove_dead_socket(Path(line))
    shutil.rmtree(path, ignore_errors=True)


def socket_in_use(path: Path) -> bool:
    """Whether a process listens at this Unix socket path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def remove_dead_socket(path: Path) -> None:
    """Remove a socket file without a listening process. Other files are not removed."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(path.lstat().st_mode) and not socket_in_use(path):
            path.unlink()
