"""KV memory shared with other processes of this host: the owner's side and the readers' side.

The engine maps GPU memory, from a :class:`DeviceTicket`. The rest of this page is about host
memory.

Host memory is a memfd. It has no name in any file system and disappears with the last process
that maps it, even after a crash. Invariants: the memfd is sealed against shrinking, so a read
cannot fault. Readers map it read-only, and only after they found the owner's random mark in it:
the same process id can mean another process in another container.

This module does not protect the content of blocks. A sender holds the blocks of a handoff until
the handoff ends, and a checksum shows whether the reader read them in time.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from baton.proto.layout import KVLayout
from baton.proto.wire.messages import DeviceTicket, PoolTicket

Bytes = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

HEAD_BYTES = mmap.PAGESIZE
"""Bytes before the first block. The owner's mark is at the start of the memory."""
MARK_BYTES = 16
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)


class PoolOwner:
    """Allocates a pool that other processes can map; send them ``ticket``."""

    def __init__(self) -> None:
        self.ticket: PoolTicket | None = None
        self._fd = -1

    def allocate(self, nbytes: int) -> Bytes:
        """Return zeroed, page-aligned memory. Call it once.

        Raises OSError if memfd is not supported or memory is short.
        """
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, HEAD_BYTES + nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            memory = mmap.mmap(fd, HEAD_BYTES + nbytes)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # only a hint; the system may not allow huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        mark = secrets.token_bytes(MARK_BYTES)
        memory[:MARK_BYTES] = mark
        pool = np.frombuffer(memory, np.uint8, nbytes, HEAD_BYTES)
        self.ticket = PoolTicket(os.getpid(), self._fd, nbytes, mark)
        return pool


def can_share() -> bool:
    """True if this system supports sealed memfds."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def map_pool(ticket: PoolTicket, layout: KVLayout) -> F32:
    """Map another process's pool ``[L, NB, 2, Hk, BS, E]`` in the layout's type, read-only.

    The pool stays mapped while the array or a view of it lives. Raises OSError if the memory
    cannot be reached (another host or user, or the owner has ended), and ValueError if the memory
    does not match the ticket.
    """
    return _as_pool(_map(ticket, layout), layout)


def _map(ticket: PoolTicket, layout: KVLayout) -> mmap.mmap:
    block = layout.num_layers * layout.block_bytes
    if ticket.nbytes < block or ticket.nbytes % block:
        # A ticket comes from another process: check the size before anything is opened.
        raise ValueError(f"pool size {ticket.nbytes} is not a multiple of block size {block}")
    fd = _open_memory(ticket)
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("the memory is not sealed: it could shrink while it is read")
        if os.fstat(fd).st_size != HEAD_BYTES + ticket.nbytes:
            raise ValueError("the size of the memory differs from its ticket")
        memory = mmap.mmap(fd, HEAD_BYTES + ticket.nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if memory[:MARK_BYTES] != ticket.mark:
        raise ValueError("the memory does not carry the owner's mark")
    return memory


def _as_pool(memory: mmap.mmap, layout: KVLayout) -> F32:
    content = np.frombuffer(memory, np.uint8, offset=HEAD_BYTES)
    return cast(F32, layout.blocks_of(content, layout.num_layers))


def unmap(memory: Mapping) -> None:
    """Unmap the memory. Takes about 0.1 s per GiB for the last mapping, without the GIL.

    If arrays still use the mapping, it is unmapped with the last of them.
    """
    with contextlib.suppress(BufferError):
        memory.close()


def _open_memory(ticket: PoolTicket) -> int:
    """Open the ticket's memory after checking that it is a memfd.

    In another container the ticket's numbers may name a pipe, which blocks the opener, or a
    device, which may react to being opened. So the link is read before the file is opened.
    """
    place = os.open(f"/proc/{ticket.pid}/fd/{ticket.fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        link = f"/proc/self/fd/{place}"
        if not str(Path(link).readlink()).startswith("/memfd:"):
            raise ValueError("the ticket does not name shared memory")
        return os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(place)


class Mapping(Protocol):
    """Mapped memory of another process. Reading it after the close is undefined."""

    def close(self) -> None:
        """Unmap the memory. Raises BufferError while arrays on it live."""
        ...


OpenDevicePool = Callable[[DeviceTicket, KVLayout], tuple[Mapping, Any]]
"""Maps a pool on a GPU. Returns the mapping, and the pool as a device array."""


def _open_nowhere(_ticket: DeviceTicket, _layout: KVLayout) -> tuple[Mapping, Any]:
    raise ValueError("this worker has no GPU")


class MappedPools:
    """The pools a reader has mapped, by the owner's incarnation.

    Invariants: a connection holds at most one pool; an incarnation has one pool, named by its
    first ticket. A pool is unmapped with its last connection: ``release`` receives its mapping.
    ``open_device`` maps the pool of a :class:`DeviceTicket`.
    """

    def __init__(
        self,
        layout: KVLayout,
        release: Callable[[Mapping], object] = unmap,
        open_device: OpenDevicePool = _open_nowhere,
    ) -> None:
        self._layout = layout
        self._release = release
        self._open_device = open_device
        self._pools: dict[int, tuple[PoolTicket | DeviceTicket, Mapping, F32]] = {}
        self._owners: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._pools)

    def open(self, peer: bytes, incarnation: int, ticket: PoolTicket | DeviceTicket) -> str:
        """Map the pool of ``peer`` and release the pool it had under another incarnation.

        Returns an empty string, or the reason why the pool cannot be mapped.
        """
        if self._owners.get(peer) != incarnation:
            self.close(peer)
        known = self._pools.get(incarnation)
        if known is not None and known[0] != ticket:
            return "another pool is already mapped for this incarnation"
        if known is None:
            try:
                memory, pool = self._mapped(ticket)
            except (OSError, ValueError, OverflowError) as error:
                return str(error) or type(error).__name__
            self._pools[incarnation] = ticket, memory, pool
        self._owners[peer] = incarnation
        return ""

    def _mapped(self, ticket: PoolTicket | DeviceTicket) -> tuple[Mapping, F32]:
        if isinstance(ticket, DeviceTicket):
            return self._open_device(ticket, self._layout)
        memory = _map(ticket, self._layout)
        return memory, _as_pool(memory, self._layout)

    def get(self, incarnation: int) -> F32 | None:
        """Return the pool of an incarnation, ``[L, NB, 2, Hk, BS, E]``, or None."""
        known = self._pools.get(incarnation)
        return None if known is None else known[2]

    def close(self, peer: bytes) -> None:
        """Release the pool of a closed connection, if the connection held one."""
        incarnation = self._owners.pop(peer, None)
        if incarnation is not None and incarnation not in self._owners.values():
            memory = self._pools.pop(incarnation)[1]  # drops the array too, so unmapping can work
            self._release(memory)

    def close_all(self) -> None:
        """Release the pools of all connections."""
        for peer in list(self._owners):
            self.close(peer)
