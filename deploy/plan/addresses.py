"""Addresses of a cluster on this machine: the default for each user, free ports, early checks.

The checks only give quick and clear errors for common mistakes. The real test is the later bind.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import stat
import tempfile
from pathlib import Path

from ...client.routers import separated
from ...proto.errors import ConfigError, InputError
from ...proto.wire.endpoints import MAX_IPC_PATH_BYTES, check_endpoint
from ...runtime.keys.curve import check_bind
from ..local.run_folder import socket_in_use

_THIS_MACHINE = ("0.0.0.0", "127.0.0.1", "localhost", "*", "[::]", "[::1]")  # noqa: S104 -- compared


def default_address() -> str:
    """Return this user's ipc address, the default of ``serve`` and of the other commands."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime_dir and Path(runtime_dir).is_dir():
        return f"ipc://{Path(runtime_dir) / 'baton.sock'}"
    return f"ipc://{_private_folder() / 'serve.sock'}"


def _private_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


def ipc_path(address: str) -> Path | None:
    """Return the socket file of an ipc address, or None for tcp."""
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def client_address(wanted: str, *, claim: bool = True, keyed: bool = False) -> str:
    """Return the checked address to serve at: ``wanted`` or the default. Port 0: a free port.

    ``claim``: the address will be used, so create its folder and check that it is free.
    ``keyed``: sockets have keys, so other hosts may reach them. Raises ConfigError if the address
    is malformed, in use, unsafe without keys, or in a missing folder.
    """
    address = wanted or default_address()
    if not wanted and claim:
        _make_private_folder()
    if address.startswith("tcp://*:"):  # clients cannot connect to the name "*"
        address = f"tcp://0.0.0.0:{address.rpartition(':')[2]}"
    if address.startswith("tcp://") and address.rpartition(":")[2] in ("0", "*"):
        address = f"{address.rpartition(':')[0]}:{free_ports(1)[0]}"
    try:
        check_endpoint(address)
    except InputError as problem:
        raise ConfigError(f"address: {problem}") from problem
    if address.startswith("inproc://"):
        raise ConfigError("address must start with ipc:// or tcp://")
    path = ipc_path(address)
    if path is not None:
        if path.name.startswith("@") or path.name == "*":  # abstract: any user could connect
            raise ConfigError(f"{address} is not a file; give ipc://PATH")
        address = f"ipc://{path.absolute()}"  # other commands may run in other folders
    check_bind(address, keyed=keyed)
    if claim:
        _check_free(address)
    return address


def client_addresses(
    wanted: str, names: list[str], *, claim: bool = True, keyed: bool = False
) -> dict[str, str]:
    """Return the client address of each router by name; see :func:`client_address`.

    ``wanted``: one address per router, separated by commas; or a single address, from which the
    others are derived by a number after the path or by the next ports.
    """
    given = separated(wanted)
    if len(given) not in (1, len(names)):
        raise ConfigError(f"address names {len(given)} routers, routers is {len(names)}")
    if len(given) == 1:
        first = client_address(given[0], claim=claim, keyed=keyed)
        given = [first, *(_further(first, number) for number in range(1, len(names)))]
        chosen = [
            first,
            *(client_address(address, claim=claim, keyed=keyed) for address in given[1:]),
        ]
    else:
        chosen = [client_address(address, claim=claim, keyed=keyed) for address in given]
    if len(set(chosen)) < len(chosen):
        raise ConfigError("address: two routers have the same address")
    return dict(zip(names, chosen, strict=True))


def _further(address: str, number: int) -> str:
    if not address.startswith("tcp://"):
        return f"{address}.{number}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number}"


def admin_address(client: str) -> str:
    """Return the controller's address for the cluster with this client address.

    The admin socket is beside the first client socket. For tcp, and if that path is too long, the
    socket is in this user's private folder. All addresses of this machine, such as ``0.0.0.0`` and
    ``127.0.0.1``, give the same result.
    """
    first = separated(client)[0] or default_address()
    if first.startswith("tcp://"):
        host, _, port = first.removeprefix("tcp://").rpartition(":")
        first = f"tcp://127.0.0.1:{port}" if host in _THIS_MACHINE else first
    path = ipc_path(first)
    if path is not None:
        beside = f"{path.absolute()}.admin"
        if len(beside.encode()) <= MAX_IPC_PATH_BYTES:
            return f"ipc://{beside}"
    digest = hashlib.blake2b(first.encode(), digest_size=8).hexdigest()
    return f"ipc://{_private_folder() / digest}.admin"


def claim_admin(address: str) -> None:
    """Create the folder of an admin address if needed. Raises ConfigError if it is not private."""
    path = ipc_path(address)
    if path is not None and path.parent == _private_folder():
        _make_folder(path.parent)


def _make_private_folder() -> None:
    """Create or check the folder of the default address. Raises ConfigError."""
    folder = Path(default_address().removeprefix("ipc://")).parent
    if folder == _private_folder():
        _make_folder(folder)
    else:
        check_folder(folder)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # check_folder below reports a path that is not a folder
    except OSError as problem:
        raise ConfigError(f"cannot make {folder}: {problem.strerror}") from problem
    check_folder(folder)


def trusted_default_address() -> str:
    """Like :func:`default_address`, but ConfigError if another user could listen there."""
    address = default_address()
    folder = Path(address.removeprefix("ipc://")).parent
    if folder.exists():  # else connecting fails with a better message
        check_folder(folder)
    return address


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless only this user can create sockets in ``folder``."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user; give --address")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"other users may write to {folder}; set its mode to 0700 or give --address"
        )


def _check_free(address: str) -> None:
    path = ipc_path(address)
    if path is None:
        _check_port_free(address)
        return
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} of the address does not exist")
    if path.exists() and not path.is_socket():
        raise ConfigError(f"{path} exists and is not a socket; give another --address")
    if path.exists() and socket_in_use(path):
        raise ConfigError(f"{address} is in use by another process; give another --address")


def _check_port_free(address: str) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, int(port)))
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"{address} is in use by another process; give another --address"
                ) from problem
            raise ConfigError(f"cannot listen on {address}: {problem.strerror}") from problem


def free_ports(count: int) -> list[int]:
    """Return different TCP ports of 127.0.0.1 that are free now."""
    with contextlib.ExitStack() as stack:
        trials = [
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            for _ in range(count)
        ]
        for trial in trials:
            trial.bind(("127.0.0.1", 0))
        return [trial.getsockname()[1] for trial in trials]
