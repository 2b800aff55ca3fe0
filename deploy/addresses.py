"""Where a cluster on this machine listens: the per-user default, free ports, early refusals.

The checks here only make the common mistakes quick and clear; whoever binds has the last word.
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

from ..client.routers import separated
from ..proto.endpoints import MAX_IPC_PATH_BYTES, check_endpoint
from ..proto.errors import ConfigError, InputError
from ..runtime.security import check_bind
from .run_folder import socket_in_use

_THIS_MACHINE = ("0.0.0.0", "127.0.0.1", "localhost", "*", "[::]", "[::1]")  # noqa: S104 -- compared


def default_address() -> str:
    """The per-user ipc address where ``serve`` listens and the other verbs look."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime_dir and Path(runtime_dir).is_dir():
        return f"ipc://{Path(runtime_dir) / 'baton.sock'}"
    return f"ipc://{_private_folder() / 'serve.sock'}"


def _private_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


def ipc_path(address: str) -> Path | None:
    """The socket file of an ipc address."""
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def client_address(wanted: str, *, claim: bool = True, keyed: bool = False) -> str:
    """The address to serve at: ``wanted`` or the default; a port of 0 becomes a free one.

    ConfigError when it is malformed, in use, reachable by strangers or its folder is missing.
    Without ``claim`` nothing is made, and it may be in use: nobody is going to listen there.
    ``keyed``: sockets have keys, so strangers may reach them.
    """
    address = wanted or default_address()
    if not wanted and claim:
        _make_private_folder()
    if address.startswith("tcp://*:"):  # nobody can connect to that name
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
        if path.name.startswith("@") or path.name == "*":  # Linux lets everybody connect there
            raise ConfigError(f"{address} is no file; give ipc://PATH")
        address = f"ipc://{path.absolute()}"  # the other verbs run in other folders
    check_bind(address, keyed=keyed)
    if claim:
        _check_free(address)
    return address


def client_addresses(
    wanted: str, names: list[str], *, claim: bool = True, keyed: bool = False
) -> dict[str, str]:
    """Where each router listens for clients, by name; see :func:`client_address`.

    ``wanted``: a list with commas, one for each; or one address, from which the others follow: a
    number behind the path, the next ports.
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
        raise ConfigError("address: every router needs one of its own")
    return dict(zip(names, chosen, strict=True))


def _further(address: str, number: int) -> str:
    if not address.startswith("tcp://"):
        return f"{address}.{number}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number}"


def admin_address(client: str) -> str:
    """Where the controller of the cluster with this client address listens for verbs.

    Beside the (first) client socket; for tcp, and where that path is too long, in the private
    folder of this user. A cluster that listens at every address of this machine is found by its
    loopback address.
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
    """See to it that the folder of an admin address of this user is there and ours alone."""
    path = ipc_path(address)
    if path is not None and path.parent == _private_folder():
        _make_folder(path.parent)


def _make_private_folder() -> None:
    """The default's folder: ours alone, or not used."""
    folder = Path(default_address().removeprefix("ipc://")).parent
    if folder == _private_folder():
        _make_folder(folder)
    else:
        check_folder(folder)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # no folder: said below
    except OSError as problem:
        raise ConfigError(f"cannot make {folder}: {problem.strerror}") from problem
    check_folder(folder)


def trusted_default_address() -> str:
    """:func:`default_address` for a client; ConfigError when a stranger could listen there."""
    address = default_address()
    folder = Path(address.removeprefix("ipc://")).parent
    if folder.exists():  # else nobody listens, which connecting says best
        check_folder(folder)
    return address


def check_folder(folder: Path) -> None:
    """ConfigError unless only this user can put sockets into ``folder``."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to somebody else; give --address")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"others may write to {folder}; make it mode 0700 or give --address")


def _check_free(address: str) -> None:
    path = ipc_path(address)
    if path is None:
        _check_port_free(address)
        return
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} of the address does not exist")
    if path.exists() and not path.is_socket():
        raise ConfigError(f"{path} exists and is no socket; give another --address")
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
    """TCP ports of 127.0.0.1 that were free just now, all different."""
    with contextlib.ExitStack() as stack:
        trials = [
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            for _ in range(count)
        ]
        for trial in trials:
            trial.bind(("127.0.0.1", 0))
        return [trial.getsockname()[1] for trial in trials]
