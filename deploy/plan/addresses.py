"""Addresses of a cluster on this machine: the default for each user, free ports, early checks.

The checks only give quick and clear errors for common mistakes. The real test is the later bind.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import random
import socket
from pathlib import Path

from baton.client.routers import separated
from baton.proto.errors import ConfigError, InputError
from baton.proto.wire.endpoints import MAX_IPC_PATH_BYTES, check_endpoint
from baton.runtime.keys.curve import check_bind
from baton.runtime.net.user_address import (
    check_folder,
    default_address,
    make_folder,
    private_folder,
)

from ..config import ANY_HTTP_PORT, HTTP_PORT, ServeSettings
from ..local.run_folder import socket_in_use

_THIS_MACHINE = ("0.0.0.0", "127.0.0.1", "localhost", "*", "[::]", "[::1]")  # noqa: S104 -- compared


class HttpPort:
    """A TCP port that is reserved for the gateways of this user, until :meth:`close`.

    The gateways listen there with SO_REUSEPORT, and the kernel deals connections out to them. This
    socket is bound and never listens: the port stays the cluster's while a gateway restarts.
    """

    def __init__(self, host: str, port: int, *, gateways_listen: bool = False) -> None:
        """Reserve ``port``, or a free one for 0. Raises OSError.

        ``gateways_listen``: the cluster's gateways may listen there already.
        """
        bare = host.strip("[]")
        self._socket = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET)
        option = self._socket.setsockopt
        try:
            # Closed connections of the previous gateways must not count as use of the port.
            option(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            option(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(gateways_listen))
            self._socket.bind((bare, port))
            # Else only after the bind: it must fail at a port that another cluster has reserved.
            option(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            option(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except BaseException:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    @classmethod
    def of(cls, settings: ServeSettings, *, gateways_listen: bool = False) -> HttpPort | None:
        """Reserve the port of the settings; None without gateways.

        If the default port is in use, another one is reserved. ``gateways_listen``: as of the
        constructor. Raises ConfigError.
        """
        if not settings.gateways:
            return None
        host, port = settings.http_host, settings.http_port
        try:
            try:
                number = HTTP_PORT if port == ANY_HTTP_PORT else port
                return cls(host, number, gateways_listen=gateways_listen)
            except OSError as problem:
                if port != ANY_HTTP_PORT or problem.errno != errno.EADDRINUSE:
                    raise
                return cls(host, 0)
        except OSError as problem:
            raise _cannot_listen("http", host, port, problem) from None

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


def check_metrics_ports(settings: ServeSettings) -> None:
    """Raise ConfigError if a port of ``--metrics-port`` is in use, as of ``--http-port``.

    Later a port may be in use: the process that replaces another waits for it.
    """
    host, first = settings.metrics_host, settings.metrics_port
    count = settings.routers + settings.gateways if first else 0
    for port in range(first, first + count):
        try:
            _try_port(host, port)
        except OSError as problem:
            raise _cannot_listen("metrics", host, port, problem) from None


def _cannot_listen(prefix: str, host: str, port: int, problem: OSError) -> ConfigError:
    """Return the error about the settings ``PREFIX_host`` and ``PREFIX_port``."""
    if problem.errno == errno.EADDRINUSE:
        return ConfigError(f"{prefix}_port {port} of {host} is in use; give another")
    why = problem.strerror or problem
    return ConfigError(f"{prefix}_host {host}, {prefix}_port {port}: {why}")


def _try_port(host: str, port: int) -> None:
    """Bind a TCP port and close it again. Raises OSError."""
    bare = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections
        trial.bind((bare, port))


def ipc_path(address: str) -> Path | None:
    """Return the socket file of an ipc address, or None for tcp."""
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def client_address(wanted: str, *, claim: bool = True, keyed: bool = False) -> str:
    """Return the checked address to serve at: ``wanted`` or the default. Port 0: a free port.

    ``claim``: the address will be used, so create the default folder and check that it is free.
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
        if wanted and not path.parent.is_dir():
            raise ConfigError(f"the folder {path.absolute().parent} of the address does not exist")
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
    return f"ipc://{private_folder() / digest}.admin"


def claim_admin(address: str) -> None:
    """Create the folder of an admin address if needed. Raises ConfigError if it is not private."""
    path = ipc_path(address)
    if path is not None and path.parent == private_folder():
        make_folder(path.parent)


def _make_private_folder() -> None:
    """Create or check the folder of the default address. Raises ConfigError."""
    folder = Path(default_address().removeprefix("ipc://")).parent
    if folder == private_folder():
        make_folder(folder)
    else:
        check_folder(folder)


def _check_free(address: str) -> None:
    path = ipc_path(address)
    in_use = (
        f"{address} is in use by another process; give another --address, "
        "or end its cluster with baton down"
    )
    if path is None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        try:
            _try_port(host, int(port))
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE:
                raise ConfigError(in_use) from problem
            raise ConfigError(f"cannot listen on {address}: {problem.strerror}") from problem
        return
    if path.exists() and not path.is_socket():
        raise ConfigError(f"{path} exists and is not a socket; give another --address")
    if path.exists() and socket_in_use(path):
        raise ConfigError(in_use)


_FIRST_PORT = 20_000
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Return different TCP ports of 127.0.0.1 that are free now.

    They are below the kernel's ports for outgoing connections, if there is room: such a connection
    could take a port before its process starts.
    """
    try:
        end = int(_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = 0
    choices = range(_FIRST_PORT, end)
    with contextlib.ExitStack() as stack:
        trials = [
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            for _ in range(count)
        ]
        for trial in trials:
            _bind_to_any(trial, choices)
        return [trial.getsockname()[1] for trial in trials]


def _bind_to_any(trial: socket.socket, choices: range) -> None:
    for port in random.SystemRandom().sample(choices, min(20, len(choices))):
        with contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return
    trial.bind(("127.0.0.1", 0))
