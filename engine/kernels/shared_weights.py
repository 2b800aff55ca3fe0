"""Packed weights in memory that all workers of one model on a host map read-only.

The memory is a memfd that the supervisor holds and passes on. It has no name in a file system, so
only the supervisor's workers can reach it, and it disappears with the last of these processes, even
if all are killed. The first worker packs its weights into it, under a lock, and seals it.
Invariant: only sealed memory is read, and sealed memory cannot change. A worker that ends while it
packs leaves memory without seals, which the next one overwrites.

The head of the memory names what it holds; a worker that wants anything else keeps a private copy.

Weights are read from beginning to end for every token, so the memory has huge pages if the kernel
gives them. Most systems forbid huge pages of shared memory to page faults (``shmem_enabled``), but
Linux 6.1 and newer make them on demand (``MADV_COLLAPSE``).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .backend import U8
from .memory import CACHE_LINE, Arena, Holder

HEAD_BYTES = mmap.PAGESIZE
"""Bytes before the first weights."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
HUGE_PAGE = 2 << 20
"""Bytes of a huge page on x86, and of its usual size on ARM."""
_STRETCH = 8 * HUGE_PAGE  # each call of MADV_COLLAPSE costs a message to all processors
_MADV_COLLAPSE = 25
_F_SEAL_FUTURE_WRITE = 0x10
_MAP_FIXED = 0x10
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *3 * (ctypes.c_int,), ctypes.c_long)
_MAP_FAILED = ctypes.c_void_p(-1).value
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class OtherWeights(Exception):
    """The memory holds other weights than this worker packs."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory holds: ``key`` of the model and kernels, and the bytes of the weights."""

    key: str
    nbytes: int


def has_huge_pages() -> bool:
    """Return whether shared memory can have huge pages, without which reading it is slower."""
    return faults_give_huge_pages() or _collapses()


def faults_give_huge_pages(path: Path = HUGE_PAGES) -> bool:
    """Return whether the system gives shared memory huge pages when it is touched."""
    try:
        text = path.read_text()
    except OSError:
        return False
    return not any(f"[{word}]" in text for word in ("never", "deny"))


def _collapses() -> bool:
    """Return whether a huge page of shared memory can be made on demand."""
    try:
        memory = new_memory()
    except (OSError, AttributeError):  # a sandbox, or a system without memfd
        return False
    try:
        os.ftruncate(memory, HUGE_PAGE)
        return _Mapping(memory, HUGE_PAGE, write=True).collapse(0, HUGE_PAGE)
    except OSError:
        return False
    finally:
        os.close(memory)


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
        self._huge = not filled  # until the kernel refuses one
        self._collapsed = 0
        if not filled:
            os.ftruncate(memory, HEAD_BYTES + limit)
        self._bytes = self._map(write=not filled)

    def zeros(self, nbytes: int) -> U8:
        """Return the next bytes, which start on a cache line.

        Raises OtherWeights if the memory cannot hold them.
        """
        start = self.used
        self.used += -(-nbytes // CACHE_LINE) * CACHE_LINE
        if self.used > self._limit:
            raise OtherWeights
        self._make_huge()
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
        self._limit = self.used
        weights = self._map(write=False)
        start = 0
        for holder, end in self._holders:
            holder.panels = weights[start : start + holder.panels.nbytes]
            start = end
        self._bytes = weights
        _fix(self._memory)

    def _map(self, *, write: bool) -> U8:
        """Map the weights."""
        self._mapping = _Mapping(self._memory, HEAD_BYTES + self._limit, write=write)
        return np.asarray(self._mapping)[HEAD_BYTES:]

    def _make_huge(self) -> None:
        """Make huge pages of all memory that is used, before weights are written there.

        Small pages that were written would be copied into a huge one.
        """
        size = HEAD_BYTES + self._limit
        while self._huge and self._collapsed < HEAD_BYTES + self.used:
            end = min(self._collapsed + _STRETCH, size // HUGE_PAGE * HUGE_PAGE)
            self._huge = end > self._collapsed and self._mapping.collapse(self._collapsed, end)
            self._collapsed = end


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


class _Mapping:
    """A mapping of memory that begins at a multiple of a huge page; NumPy takes it as bytes.

    One that is not to be written uses a descriptor that can only read, so it stays read-only.
    """

    def __init__(self, memory: int, nbytes: int, *, write: bool) -> None:
        # Python cannot map at a place of its choice: the memory replaces a part of this room.
        room_bytes = nbytes + HUGE_PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._room = mmap.mmap(-1, room_bytes, flags=flags, prot=mmap.PROT_READ)
        start = np.frombuffer(self._room, np.uint8).ctypes.data
        self._skip = -start % HUGE_PAGE
        fd = memory if write else os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
        try:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
            fixed = mmap.MAP_SHARED | _MAP_FIXED
            if _mmap(start + self._skip, nbytes, access, fixed, fd, 0) == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), "mmap")
        finally:
            if not write:
                os.close(fd)
        with contextlib.suppress(OSError):  # only a hint; the system may not allow huge pages
            self._room.madvise(mmap.MADV_HUGEPAGE, self._skip, nbytes)
        self.__array_interface__: dict[str, Any] = {
            "data": (start + self._skip, not write),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def collapse(self, start: int, end: int) -> bool:
        """Make huge pages of a range that is not used yet; return whether the kernel did.

        A huge page needs one page that is there.
        """
        np.asarray(self)[start:end:HUGE_PAGE] = 0
        try:
            self._room.madvise(_MADV_COLLAPSE, self._skip + start, end - start)
        except OSError:
            return False
        return True
