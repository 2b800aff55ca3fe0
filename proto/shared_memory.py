"""Large arrays of a message beside it, in shared memory of one host.

A segment is a file in ``/dev/shm`` with a random name. Who owns it and for how long:

* The process that encodes owns its segments. Each has a lease; behind it the owner removes it,
  read or not, so a message nobody reads leaks nothing.
* Readers only open. A message can be decoded again until the lease ends; what was mapped by
  then stays valid, since the kernel keeps removed files that are in use.
* An owner holds a lock on a file of its own as long as it lives, however it dies. Whoever
  begins to own segments removes those of owners whose lock is free.

A reader that maps a segment relies on its owner, a process of the same user, not to shorten the
file; one that copies relies on nothing.

The files are opened here and not through :mod:`multiprocessing.shared_memory`: its tracker
(until Python 3.13 without a way out) unlinks what a reader merely attached to.
"""

from __future__ import annotations

import atexit
import fcntl
import mmap
import os
import re
import secrets
import stat
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .errors import DecodeFailed

FOLDER = Path("/dev/shm")  # noqa: S108  # where POSIX shared memory lives
LEASE_S = 60.0
"""How long a segment can be opened, in seconds."""
WATERMARK = 0.9
"""Most of the free shared memory one array may take."""

_PREFIX = "baton-arrays-"
_NAME = re.compile(r"/?[A-Za-z0-9._-]{1,200}")


class SegmentStore:
    """The segments of this process; see the module. Thread-safe."""

    def __init__(self, folder: Path = FOLDER, lease_s: float = LEASE_S) -> None:
        self._folder = folder
        self._lease_s = lease_s
        self._leases: dict[str, float] = {}  # in order of their ends
        self._mutex = threading.Lock()
        self._timer: threading.Timer | None = None
        self.pid = os.getpid()
        sweep_dead_owners(folder)
        self._token, self._lock = _own_lock(folder)

    def put(self, data: npt.NDArray[np.generic]) -> str | None:
        """Name of a new segment with the C-ordered ``data``; None when there is no room."""
        free = os.statvfs(self._folder)
        if not 0 < data.nbytes < free.f_bavail * free.f_frsize * WATERMARK:
            return None
        name = f"{_PREFIX}{self._token}-{secrets.token_hex(8)}"
        with self._mutex:
            self._expire(time.monotonic())
            self._leases[name] = time.monotonic() + self._lease_s
        try:
            self._write(self._folder / name, data)
        except OSError:  # another process took the room: the array goes into the message
            self._remove(name)
            return None
        self._wake()
        return name

    def expire(self) -> None:
        """Remove the segments whose lease is over."""
        with self._mutex:
            self._timer = None
            self._expire(time.monotonic())
        self._wake()

    def close(self) -> None:
        """Remove all segments; not in a process forked off the owner."""
        if os.getpid() != self.pid:
            return
        with self._mutex:
            if self._timer is not None:
                self._timer.cancel()
            for name in list(self._leases):
                self._remove(name)
        (self._folder / f"{_PREFIX}{self._token}.owner").unlink(missing_ok=True)
        os.close(self._lock)

    def _write(self, path: Path, data: npt.NDArray[np.generic]) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, data.nbytes)  # no room is an error here, not a signal
            with mmap.mmap(file, data.nbytes) as room:
                np.ndarray(data.shape, data.dtype, room)[...] = data
        finally:
            os.close(file)

    def _expire(self, now: float) -> None:
        for name, end in list(self._leases.items()):
            if end > now:
                break
            self._remove(name)

    def _remove(self, name: str) -> None:
        self._leases.pop(name, None)
        (self._folder / name).unlink(missing_ok=True)

    def _wake(self) -> None:
        """Have the oldest lease looked at when it ends."""
        with self._mutex:
            if self._timer is None and self._leases:
                wait = next(iter(self._leases.values())) - time.monotonic()
                self._timer = threading.Timer(max(0.0, wait), self.expire)
                self._timer.daemon = True
                self._timer.start()


_store: SegmentStore | None = None
_store_mutex = threading.Lock()


def process_store() -> SegmentStore | None:
    """The store of this process, made when first needed; None where there is no shared memory."""
    global _store
    with _store_mutex:
        if _store is None or _store.pid != os.getpid():
            if not os.access(FOLDER, os.W_OK):
                return None
            _store = SegmentStore()
            atexit.register(_store.close)
        return _store


def open_segment(
    name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic], nbytes: int, *, copy: bool
) -> npt.NDArray[np.generic]:
    """Array in a segment, read-only or copied; ``nbytes`` as of shape and dtype, not 0.

    DecodeFailed when the lease is over, or the file is not one this user made for sharing.
    """
    if not _NAME.fullmatch(name):
        raise DecodeFailed(f"{name[:40]!r} is no name of shared memory")
    path = FOLDER / name.removeprefix("/")
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = error.strerror or "error"
        raise DecodeFailed(f"shared memory {name[:80]!r} cannot be opened: {reason}") from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise DecodeFailed(f"shared memory {name[:80]!r} is not ours")
        if found.st_size < nbytes:
            raise DecodeFailed(f"shared memory of {found.st_size} bytes instead of {nbytes}")
        return _read(file, shape, dtype, nbytes, copy=copy)
    finally:
        os.close(file)


def _read(
    file: int, shape: tuple[int, ...], dtype: np.dtype[np.generic], nbytes: int, *, copy: bool
) -> npt.NDArray[np.generic]:
    if not copy:
        return np.ndarray(shape, dtype, mmap.mmap(file, nbytes, prot=mmap.PROT_READ))
    array = np.empty(shape, dtype)
    view, done = array.reshape(-1).view(np.uint8).data, 0
    while done < nbytes:
        count = os.preadv(file, [view[done:]], done)
        if not count:
            raise DecodeFailed("shared memory ended early")
        done += count
    return array


def sweep_dead_owners(folder: Path = FOLDER) -> int:
    """Remove what owners left that live no more; how many segments that were."""
    removed = 0
    for lock in folder.glob(_PREFIX + "*.owner"):
        try:
            file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or just removed
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in folder.glob(f"{lock.name.removesuffix('.owner')}-*"):
                path.unlink(missing_ok=True)
                removed += 1
            lock.unlink(missing_ok=True)
        except BlockingIOError:  # alive
            continue
        finally:
            os.close(file)
    return removed


def _own_lock(folder: Path) -> tuple[str, int]:
    """A token for this owner's names, and the lock that says it lives."""
    while True:
        token = secrets.token_hex(8)
        path = folder / f"{_PREFIX}{token}.owner"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                return token, file
        except BlockingIOError:  # a sweeper came between the two calls and removes it
            pass
        os.close(file)
