"""The limit on open files, and queries about connections by descriptor."""

from __future__ import annotations

import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .admissions import Stage

GREETING_BYTES = 64
"""Length of a ZMTP 3 greeting. A server that has sent more has answered a HELLO."""
_TCP_INFO_BYTES, _TCP_INFO_COUNTS_AT = 136, 120
_TCP_INFO_COUNTS = struct.Struct("=QQ")
"""Bytes sent and acknowledged, bytes received: ``tcpi_bytes_acked``, ``tcpi_bytes_received``."""


def raise_open_files() -> None:
    """Raise the soft limit on open files (usually 1,024) to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems refuse the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files() -> int:
    """Return the limit on open files of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def remote_address(fd: int) -> str:
    """Return the IP address of a connection's peer; empty if it is closed."""
    try:
        with _borrowed(fd) as connection:
            return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return ""


def handshake_stage(fd: int) -> Stage:
    """Return the handshake stage of a connection, from the kernel's byte counters."""
    try:
        with _borrowed(fd) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        acknowledged, received = _TCP_INFO_COUNTS.unpack_from(info, _TCP_INFO_COUNTS_AT)
    except (OSError, struct.error):  # closed, or a kernel without these counters
        return Stage.SILENT
    if acknowledged > GREETING_BYTES:
        return Stage.ANSWERED
    return Stage.SPOKEN if received else Stage.SILENT


def received_bytes(fd: int) -> int | None:
    """Return the bytes that the kernel received for a TCP connection; None if it is closed."""
    try:
        with _borrowed(fd) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(_TCP_INFO_COUNTS.unpack_from(info, _TCP_INFO_COUNTS_AT)[1])
    except (OSError, struct.error):
        return None


def shut_down(fd: int) -> None:
    """Shut down a connection; the owner of its descriptor then closes it."""
    with suppress(OSError), _borrowed(fd) as connection:
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Wrap a descriptor as a socket without owning it; duplicating it could exceed the limit."""
    # With a family and a type, Python does not ask the kernel for them.
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()
