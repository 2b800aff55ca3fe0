"""Binding of listening sockets: refuses used addresses, makes ipc files private to the user."""

from __future__ import annotations

import errno
import os
import socket as posix
from pathlib import Path
from typing import cast

import zmq

from ...proto.errors import ConfigError


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind ``socket``; return the address to connect to, with the chosen port for ``:0``.

    Raises ConfigError if the address is in use or cannot be bound.
    """
    path = ipc_path(endpoint)
    if path is not None:
        _check_ipc_path(endpoint, path)
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    mask = os.umask(0o177)  # create an ipc file with access for this user only
    try:
        socket.bind(endpoint.replace("tcp://localhost:", "tcp://127.0.0.1:"))
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"address in use: {endpoint}") from error
        raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}") from error
    finally:
        os.umask(mask)
    if path is not None:
        return endpoint
    return cast("bytes", socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def ipc_path(endpoint: str) -> Path | None:
    """Return the file of an ipc endpoint; None for tcp and for abstract names."""
    name = endpoint.removeprefix("ipc://")
    return None if name == endpoint or name.startswith("@") else Path(name)


def _check_ipc_path(endpoint: str, path: Path) -> None:
    """Raise ConfigError if ``path`` is in use: libzmq would silently take it over."""
    if not path.parent.is_dir():
        raise ConfigError(f"cannot listen on {endpoint}: no folder {path.parent}")
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"cannot listen on {endpoint}: {path} is a file of another kind")
    with posix.socket(posix.AF_UNIX, posix.SOCK_STREAM) as trial:
        try:
            trial.connect(str(path))
        except OSError:
            return  # stale socket file of a dead process
    raise ConfigError(f"address in use: {endpoint}")
