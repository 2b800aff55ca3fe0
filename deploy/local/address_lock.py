"""A lock file beside the admin socket, so that only one controller uses an address.

ZeroMQ silently takes an ipc path over from another listening process. The lock (flock) lets the
second controller detect the first. The kernel releases the lock when the process ends in any way.
The file names the holder's run folder, so that a killed cluster's folder is found wherever it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Self

from baton.proto.errors import ConfigError

from ..plan.addresses import ipc_path

_MAX_PATH = 4096


class AddressLock:
    """A held lock. :meth:`release` removes its file.

    ``left``: the run folder of a killed holder; None without one.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        noted = os.fsdecode(os.pread(descriptor, _MAX_PATH, 0))
        self.left = Path(noted) if noted.startswith("/") and "\0" not in noted else None

    def note(self, run_folder: Path) -> None:
        """Write the holder's run folder into the file. A full disk is no error."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, os.fsencode(run_folder), 0)

    @classmethod
    def take(cls, address: str) -> Self | None:
        """Lock an ipc address. Returns None for tcp, where a second bind fails by itself.

        Raises ConfigError if another controller holds the lock.
        """
        socket = ipc_path(address)
        if socket is None:
            return None
        path = socket.with_name(f"{socket.name}.lock")
        while True:
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as problem:
                raise ConfigError(f"cannot listen on {address}: {problem.strerror}") from problem
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file(descriptor, path):
                    return cls(path, descriptor)
            except BlockingIOError:
                os.close(descriptor)
                raise ConfigError(
                    f"a cluster runs at {address.removesuffix('.admin')}; "
                    "give another --address, or end it with baton down"
                ) from None
            os.close(descriptor)  # the previous holder removed the file meanwhile: try again

    @classmethod
    def sweep(cls, address: str) -> Path | None:
        """Remove the lock file of a killed controller and return its run folder, if noted."""
        socket = ipc_path(address)
        if socket is not None and socket.with_name(f"{socket.name}.lock").exists():
            with contextlib.suppress(ConfigError):
                lock = cls.take(address)
                if lock is not None:
                    lock.release()
                    return lock.left
        return None

    def release(self) -> None:
        """Remove the file, then release the lock. The reverse order could remove a new holder's."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _is_file(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    return False
