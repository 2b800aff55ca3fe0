"""Large arrays of a message, in shared memory of one host.

A segment is a file in ``/dev/shm``. Its owner and lifetime:

* The encoding process owns its segments. Each segment has a lease. After the lease the owner
  removes the segment, read or unread, so an unread message leaks nothing.
* Readers only open segments. A message can be decoded repeatedly until the lease ends. Mapped
  segments stay valid after that, because the kernel keeps removed files that are in use.
* An owner holds a lock on its owner file while it lives; the kernel frees the lock at any kind of
  death. A new owner removes the segments of all owners whose lock is free.

The name of a segment carries a seal, a keyed hash of the segment's owner, number and size. Its key
is made from a random secret in the owner file, which only processes of the same user can read, and
from the text of ``BATON_SHARED_ARRAYS_KEY``, with which an operator separates clusters. So a
message cannot name any other file of the user, and a forged file has no seal. The size is checked
before a file is opened. The file's own size, memory, owner and mode are checked before anything is
mapped or allocated. ``BATON_SHARED_ARRAYS=off`` refuses all shared memory.

A reader that maps a segment relies on the owner, a process of the same user, not to shorten the
file. A reader that copies relies on nothing.

:mod:`multiprocessing.shared_memory` cannot be used: its tracker, which cannot be turned off before
Python 3.13, unlinks segments that a process only attached to.
"""

from __future__ import annotations

import atexit
import fcntl
import hmac
import math
import mmap
import os
import re
import secrets
import stat
import threading
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import DecodeFailed, LimitExceeded
from ..limits import MAX_SHARED_BYTES

FOLDER = Path("/dev/shm")  # noqa: S108  # where POSIX shared memory lives
LEASE_S = 60.0
"""How long a segment can be opened, in seconds."""
WATERMARK = 0.9
"""Maximum share of the free shared memory for one array."""
SWITCH_VARIABLE = "BATON_SHARED_ARRAYS"
"""A value other than ``on`` or the empty text refuses shared memory, for writing and reading."""
KEY_VARIABLE = "BATON_SHARED_ARRAYS_KEY"
"""Processes with different values refuse each other's segments."""

_PREFIX = "baton-arrays-"
_NAME = re.compile(r"/?baton-arrays-([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{16})")
_SECRET_BYTES = 32
_BLOCK_BYTES = 512  # the unit of st_blocks
_PRIVATE = 0o600
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SharedArrays(threading.local):
    """Arrays of one message in shared memory, at most ``MAX_SHARED_BYTES`` in total.

    A codec has one instance; each thread counts its own messages. ``allowed``: False refuses to
    read.
    """

    def __init__(self, *, allowed: bool = True) -> None:
        self._allowed = allowed
        self._left = 0

    def begin(self) -> None:
        """Start a message."""
        self._left = MAX_SHARED_BYTES

    def put(self, data: npt.NDArray[np.generic]) -> str | None:
        """Write C-ordered ``data`` to a new segment. Returns its name, or None if not possible."""
        if data.nbytes > self._left or not _switched_on():
            return None
        store = process_store()
        name = None if store is None else store.put(data)
        if name is not None:
            self._left -= data.nbytes
        return name

    def open(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic], *, copy: bool
    ) -> npt.NDArray[np.generic]:
        """Return the non-empty array of a segment; read-only unless copied.

        Raises LimitExceeded if the message names too many bytes, and DecodeFailed as
        :func:`open_segment`.
        """
        if not self._allowed:
            raise DecodeFailed("arrays in shared memory are refused by this decoder")
        if not _switched_on():
            raise DecodeFailed(f"arrays in shared memory are refused: {SWITCH_VARIABLE} is not on")
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self._left:
            raise LimitExceeded(
                f"a message names more than {MAX_SHARED_BYTES} bytes of shared memory"
            )
        self._left -= nbytes
        return open_segment(name, shape, dtype, nbytes, copy=copy)


def _switched_on() -> bool:
    return os.environ.get(SWITCH_VARIABLE, "on") in ("", "on")


class SegmentStore:
    """The segments of this process. Thread-safe."""

    def __init__(self, folder: Path = FOLDER, lease_s: float = LEASE_S) -> None:
        self._folder = folder
        self._lease_s = lease_s
        self._leases: dict[str, float] = {}  # in order of their ends
        self._mutex = threading.Lock()
        self._timer: threading.Timer | None = None
        self.pid = os.getpid()
        sweep_dead_owners(folder)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._token, self._lock = _own_lock(folder)
        os.write(self._lock, self._secret)

    def put(self, data: npt.NDArray[np.generic]) -> str | None:
        """Write C-ordered ``data`` to a new segment. Returns its name, or None without room."""
        free = os.statvfs(self._folder)
        if not 0 < data.nbytes < free.f_bavail * free.f_frsize * WATERMARK:
            return None
        number = secrets.token_hex(8)
        seal = _seal(self._secret, self._token, number, data.nbytes)
        name = f"{_PREFIX}{self._token}-{number}-{seal}"
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
        """Remove all segments. Has no effect in a child forked from the owner."""
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
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
        try:
            os.posix_fallocate(
                file, 0, data.nbytes
            )  # raises without room; a write would be killed by SIGBUS
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
        """Start a timer for the end of the oldest lease."""
        with self._mutex:
            if self._timer is None and self._leases:
                wait = next(iter(self._leases.values())) - time.monotonic()
                self._timer = threading.Timer(max(0.0, wait), self.expire)
                self._timer.daemon = True
                self._timer.start()


_store: SegmentStore | None = None
_store_mutex = threading.Lock()


def process_store() -> SegmentStore | None:
    """Return the store of this process, made at first use; None without shared memory."""
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
    """Return the array of a segment, read-only or copied; ``nbytes``: its size, not 0.

    Raises DecodeFailed after the lease, or if no encoder of this user and key made the segment.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise DecodeFailed(f"{name[:40]!r} is not the name of a shared array")
    owner, number, seal = match.groups()
    if not hmac.compare_digest(seal, _seal(_secret_of(owner), owner, number, nbytes)):
        raise DecodeFailed(f"no encoder of this user and cluster made {name!r} of {nbytes} bytes")
    file = _open_private(FOLDER / name.removeprefix("/"), nbytes)
    try:
        return _read(file, shape, dtype, nbytes, copy=copy)
    finally:
        os.close(file)


def _seal(secret: bytes, owner: str, number: str, nbytes: int) -> str:
    key = blake2b(secret + os.fsencode(os.environ.get(KEY_VARIABLE, ""))).digest()
    return blake2b(f"{owner}-{number}-{nbytes}".encode(), key=key, digest_size=8).hexdigest()


def _secret_of(owner: str) -> bytes:
    file = _open_private(FOLDER / f"{_PREFIX}{owner}.owner", _SECRET_BYTES)
    try:
        return os.pread(file, _SECRET_BYTES, 0)
    finally:
        os.close(file)


def _open_private(path: Path, nbytes: int) -> int:
    """Open a file of ``nbytes`` that only this user can access; raises DecodeFailed otherwise."""
    try:
        file = os.open(path, _READ)
    except OSError as error:
        reason = error.strerror or "error"
        raise DecodeFailed(f"shared memory {path.name!r} cannot be opened: {reason}") from None
    found = os.fstat(file)
    private = found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == _PRIVATE
    if not stat.S_ISREG(found.st_mode) or not private:
        os.close(file)
        raise DecodeFailed(f"shared memory {path.name!r} is not a private file of this user")
    # Reading a sparse file would allocate its memory, possibly more than is free.
    if found.st_size != nbytes or found.st_blocks * _BLOCK_BYTES < nbytes:
        os.close(file)
        raise DecodeFailed(f"shared memory of {found.st_size} bytes instead of {nbytes}")
    return file


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
    """Remove the segments of dead owners. Returns the number of segments."""
    removed = 0
    for lock in folder.glob(_PREFIX + "*.owner"):
        try:
            file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or just removed
            continue
        try:
            if os.fstat(file).st_uid != os.geteuid():  # root can open the files of others
                continue
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
    """Make a token for this owner's names, and the descriptor of its locked owner file."""
    while True:
        token = secrets.token_hex(8)
        path = folder / f"{_PREFIX}{token}.owner"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                return token, file
        except BlockingIOError:  # a sweeper came between the two calls and removes it
            pass
        os.close(file)
