"""Packed weights in memory that all workers of one model on a host map read-only.

The memory is a memfd that the supervisor holds and passes on. It has no name in a file system, so
only the supervisor's workers can reach it, and it disappears with the last of these processes, even
if all are killed. The first worker packs its weights into it, under a lock, and seals it.
Invariant: only sealed memory is read, and sealed memory cannot change. A worker that ends while it
packs leaves memory without seals, which the next one overwrites.

The head of the memory names what it holds; a worker that wants anything else keeps a private copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from .backend import U8
from .memory import CACHE_LINE, Arena, Holder

HEAD_BYTES = mmap.PAGESIZE
"""Bytes before the first weights."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_F_SEAL_FUTURE_WRITE = 0x10
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class OtherWeights(Exception):
    """The memory holds other weights than this worker packs."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory holds: ``key`` of the model and kernels, and the bytes of the weights."""

    key: str
    nbytes: int


def has_huge_pages(path: Path = HUGE_PAGES) -> bool:
    """Return whether shared memory can have huge pages, without which reading it is slower."""
    try:
        text = path.read_text()
    except OSError:
        return False
    return not any(f"[{word}]" in text for word in ("never", "deny"))


def new_memory() -> int:
    """Return the descriptor of empty memory for weights. Raises OSError if not supported."""
    fd = os.memfd_create("baton-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    return fd


class SharedArena(Arena):
    """Weights in the shared memory: packed there by the first worker, read by the others.

    ``filled``: the weights are there, so :meth:`zeros` returns read-only memory with weights.
    """

    def __init__(self, memory: int, filled: int, limit: int) -> None:
        super().__init__()
        self.filled = bool(filled)
        self.used = 0
        self._holders: list[tuple[Holder, int]] = []
        self._memory, self._limit = memory, filled or limit
        if not filled:
            os.ftruncate(memory, HEAD_BYTES + limit)
        self._bytes = _map(memory, self._limit, write=not filled)

    def zeros(self, nbytes: int) -> U8:
        """Return the next bytes, which start on a cache line.

        Raises OtherWeights if the memory cannot hold them.
        """
        start = self.used
        self.used += -(-nbytes // CACHE_LINE) * CACHE_LINE
        if self.used > self._limit:
            raise OtherWeights
        return self._bytes[start : start + nbytes]

    def keep(self, holder: Holder) -> None:
        """Record who holds the bytes that :meth:`zeros` returned last."""
        self._holders.append((holder, self.used))

    def finish(self, key: str) -> None:
        """End the load. The first worker seals the memory, and reads it only from now on.

        Raises OtherWeights if the memory holds more weights than were taken.
        """
        if self.filled:
            if self.used != self._limit:
                raise OtherWeights
            return
        head = msgspec.json.encode(Head(key=key, nbytes=self.used))
        if len(head) > HEAD_BYTES:
            raise OtherWeights
        os.pwrite(self._memory, head.ljust(HEAD_BYTES), 0)
        os.ftruncate(self._memory, HEAD_BYTES + self.used)
        weights = _map(self._memory, self.used, write=False)
        start = 0
        for holder, end in self._holders:
            holder.panels = weights[start : start + holder.panels.nbytes]
            start = end
        self._bytes = weights
        _fix(self._memory)


def _fix(memory: int) -> None:
    """Let nobody change the memory any more."""
    try:
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _FIXED | fcntl.F_SEAL_WRITE)
    except OSError:  # this process still has it mapped to write: let nobody else
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _FIXED | _F_SEAL_FUTURE_WRITE)


@contextmanager
def opened(memory: int, key: str) -> Iterator[tuple[int, int]]:
    """Yield a descriptor of the memory and the bytes of weights in it, 0 if it is empty.

    While it is empty the caller alone may fill it. Raises OtherWeights for another content, OSError
    for memory that is no memfd of this user.
    """
    own = os.open(f"/proc/self/fd/{memory}", os.O_RDWR)  # for a lock of this process alone
    try:
        found = os.fstat(own)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink:
            raise OSError(f"descriptor {memory} is not memory of this user")
        fcntl.flock(own, fcntl.LOCK_EX)
        seals = fcntl.fcntl(own, fcntl.F_GET_SEALS)
        if not seals & _FIXED:
            os.ftruncate(own, 0)  # of a worker that ended while it packed
            yield own, 0
            return
        fcntl.flock(own, fcntl.LOCK_UN)
        yield own, _checked(own, seals, key)
    finally:
        os.close(own)


def _checked(memory: int, seals: int, key: str) -> int:
    """Return the bytes of sealed weights with this key. Raises OtherWeights."""
    unchanging = seals & _FIXED == _FIXED and seals & (fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE)
    try:
        head = msgspec.json.decode(os.pread(memory, HEAD_BYTES, 0), type=Head)
    except msgspec.DecodeError:
        raise OtherWeights from None
    if not unchanging or head.key != key or os.fstat(memory).st_size != HEAD_BYTES + head.nbytes:
        raise OtherWeights
    return head.nbytes


def _map(memory: int, nbytes: int, *, write: bool) -> U8:
    """Map the weights. A descriptor that can only read keeps the mapping read-only for good."""
    if not nbytes:
        return np.empty(0, np.uint8)
    fd = memory if write else os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
    try:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        mapped = mmap.mmap(fd, HEAD_BYTES + nbytes, prot=access)
    finally:
        if not write:
            os.close(fd)
    with contextlib.suppress(OSError):  # only a hint; the system may not allow huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8, nbytes, HEAD_BYTES)
