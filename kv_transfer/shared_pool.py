"""KV memory that other processes of this host may read: the owner's side and the readers'.

Memory of a GPU is mapped by the engine, from a :class:`DeviceTicket`; what follows is about memory
of the host.

The memory is a memfd, so it has no name in any file system and is gone when the last process
that maps it has ended, however it ended. Invariants: it is sealed against shrinking, so no read
can fault; a reader believes a ticket only after it found the owner's mark behind it, since
process ids mean something else in another container; readers map it read-only.

What readers see in a block is the owner's business: a sender holds the blocks of a handoff until
it ends, and a checksum tells whether they were read in time.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..proto.layout import KVLayout
from ..proto.messages import DeviceTicket, PoolTicket

Bytes = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

HEAD_BYTES = mmap.PAGESIZE
"""The owner's mark stands at the front; blocks start behind this."""
MARK_BYTES = 16
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)


class PoolOwner:
    """Allocates a pool that can be shown to readers; ``ticket`` is what to send them."""

    def __init__(self) -> None:
        self.ticket: PoolTicket | None = None
        self._fd = -1

    def allocate(self, nbytes: int) -> Bytes:
        """Zeroed memory, aligned to pages; called once.

        Raises OSError where the system has no such memory or not enough of it.
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
            with contextlib.suppress(OSError):  # a wish, which the system may be set to hear
                memory.madvise(mmap.MADV_HUGEPAGE)
        mark = secrets.token_bytes(MARK_BYTES)
        memory[:MARK_BYTES] = mark
        pool = np.frombuffer(memory, np.uint8, nbytes, HEAD_BYTES)
        self.ticket = PoolTicket(os.getpid(), self._fd, nbytes, mark)
        return pool


def can_share() -> bool:
    """Whether this system has memory that can be shared so."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def map_pool(ticket: PoolTicket, layout: KVLayout) -> F32:
    """Another process's pool, float32 ``[L, NB, 2, Hk, BS, D]``, read-only.

    It stays mapped for as long as the array, or a view of it, lives. Raises OSError when it
    cannot be reached (another host or user, or the owner has ended) and ValueError when what is
    there is not what the ticket says.
    """
    return _as_pool(_map(ticket, layout), layout)


def _map(ticket: PoolTicket, layout: KVLayout) -> mmap.mmap:
    block = layout.num_layers * layout.block_bytes
    if ticket.nbytes < block or ticket.nbytes % block:
        raise ValueError(f"a pool of {ticket.nbytes} bytes is not made of blocks of {block}")
    fd = _open_memory(ticket)
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("the memory could shrink while it is read")
        if os.fstat(fd).st_size != HEAD_BYTES + ticket.nbytes:
            raise ValueError("the memory has another size than its ticket says")
        memory = mmap.mmap(fd, HEAD_BYTES + ticket.nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if memory[:MARK_BYTES] != ticket.mark:
        raise ValueError("the memory is not its owner's")
    return memory


def _as_pool(memory: mmap.mmap, layout: KVLayout) -> F32:
    blocks = (len(memory) - HEAD_BYTES) // (layout.num_layers * layout.block_bytes)
    shape = (layout.num_layers, blocks, *layout.block_shape)
    return np.frombuffer(memory, np.float32, math.prod(shape), HEAD_BYTES).reshape(shape)


def unmap(memory: Mapping) -> None:
    """Give a mapping back, a tenth of a second per GiB when it was the last, without the GIL.

    A mapping that somebody still looks at goes with the last array on it.
    """
    with contextlib.suppress(BufferError):
        memory.close()


def _open_memory(ticket: PoolTicket) -> int:
    """A descriptor of what the ticket names, once that is known to be a memfd.

    In another container its numbers may mean a pipe, which blocks who opens it, or a device,
    to which that does something; so it is looked at before it is opened.
    """
    place = os.open(f"/proc/{ticket.pid}/fd/{ticket.fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        link = f"/proc/self/fd/{place}"
        if not str(Path(link).readlink()).startswith("/memfd:"):
            raise ValueError("what the ticket names is no shared memory")
        return os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(place)


class Mapping(Protocol):
    """Memory of another process, mapped; reading it after the close is undefined."""

    def close(self) -> None:
        """Give it back; BufferError while arrays on it live."""
        ...


OpenDevicePool = Callable[[DeviceTicket, KVLayout], tuple[Mapping, Any]]
"""Maps a pool on a GPU: the mapping, and the pool as an array of the device."""


def _open_nowhere(_ticket: DeviceTicket, _layout: KVLayout) -> tuple[Mapping, Any]:
    raise ValueError("this worker has no GPU")


class MappedPools:
    """The pools a reader has mapped, by the owner's incarnation; gone with its last connection.

    Invariants: a connection holds at most one pool; an incarnation has one pool, the one its
    first ticket names. ``release`` is given what nobody needs any more, to :func:`unmap` it.
    ``open_device``: maps what a :class:`DeviceTicket` names.
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
        """Map the pool of ``peer``, and let go of another one it had.

        Returns why it cannot be, or an empty string.
        """
        if self._owners.get(peer) != incarnation:
            self.close(peer)
        known = self._pools.get(incarnation)
        if known is not None and known[0] != ticket:
            return "another pool is mapped for this incarnation"
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
        """The pool of an incarnation, float32 ``[L, NB, 2, Hk, BS, D]``."""
        known = self._pools.get(incarnation)
        return None if known is None else known[2]

    def close(self, peer: bytes) -> None:
        """A connection is gone; harmless for one that mapped nothing."""
        incarnation = self._owners.pop(peer, None)
        if incarnation is not None and incarnation not in self._owners.values():
            memory = self._pools.pop(incarnation)[1]  # the array goes here, so it can be closed
            self._release(memory)

    def close_all(self) -> None:
        """All connections are gone."""
        for peer in list(self._owners):
            self.close(peer)
