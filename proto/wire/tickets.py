"""How a decode worker gets KV blocks, and tickets to the sender's memory on the same host."""

from __future__ import annotations

import msgspec

from .bounds import Binary, Count, Name, Word

STREAMED, SHARED, DEVICE = "zmq", "shm", "cuda_ipc"
"""Transports of KV blocks: over ZeroMQ, or read by a process of the same host from the sender's
memory, host memory or a GPU's."""
READ_IN_PLACE = frozenset((SHARED, DEVICE))


class PoolTicket(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Location of the sender's KV memory for a process of the same host: ``/proc/PID/fd/FD``.

    ``mark``: the first bytes there, which a reader compares: the pid may belong to another
    process by then.
    """

    pid: Count
    fd: Count
    nbytes: Word
    mark: Binary


class DeviceTicket(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Location of the sender's KV memory on a GPU for a process of the same host.

    ``handle``: CUDA IPC handle of an allocation. ``host``: boot id of the kernel on which the
    handle is valid. ``offset``: bytes from the start of the allocation to the pool of ``nbytes``.
    ``gpu``: UUID of the GPU; empty from senders that do not name it.
    """

    host: Name
    handle: Binary
    offset: Word
    nbytes: Word
    gpu: Name = ""
