"""Open files of this process: how many there may be, and connections by their descriptors."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import suppress


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
        with socket.socket(fileno=os.dup(fd)) as connection:
            return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return ""


def shut_down(fd: int) -> None:
    """End a connection whose descriptor somebody else owns, who then closes it."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
