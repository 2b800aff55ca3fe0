"""Open files of this process: how many there may be, and connections by their descriptors."""

from __future__ import annotations

import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .admissions import Stage

GREETING_BYTES = 64
"""Of ZMTP 3, from either end; what a server sends after it answers a HELLO."""
_TCP_INFO_BYTES, _TCP_INFO_COUNTS_AT = 136, 120
_TCP_INFO_COUNTS = struct.Struct("=QQ")
"""Bytes sent and acknowledged, bytes received: ``tcpi_bytes_acked``, ``tcpi_bytes_received``."""


def raise_open_files() -> None:
    """Allow as many open files as the system does; the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # where the hard limit cannot be reached
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files() -> int:
    """How many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def remote_address(fd: int) -> str:
    """Where a connection comes from; empty for one that is gone."""
    try:
        with _borrowed(fd) as connection:
            return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return ""


def handshake_stage(fd: int) -> Stage:
    """How far the handshake of a connection is, by what the kernel says of its bytes."""
    try:
        with _borrowed(fd) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        acknowledged, received = _TCP_INFO_COUNTS.unpack_from(info, _TCP_INFO_COUNTS_AT)
    except (OSError, struct.error):  # gone, or a kernel that does not count
        return Stage.SILENT
    if acknowledged > GREETING_BYTES:
        return Stage.ANSWERED
    return Stage.SPOKEN if received else Stage.SILENT


def shut_down(fd: int) -> None:
    """End a connection whose descriptor somebody else owns, who then closes it."""
    with suppress(OSError), _borrowed(fd) as connection:
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A descriptor somebody else owns, as a socket; without a copy, for which none may be left."""
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()
