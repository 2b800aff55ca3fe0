"""Who may reach a socket: loopback and ipc freely, everyone else only with CURVE keys."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import msgspec
import zmq

from ..proto.endpoints import check_endpoint
from ..proto.errors import ConfigError, InputError


class CurveKeys(msgspec.Struct, frozen=True, kw_only=True):
    """A process's CURVE pair in z85 (40 bytes each), and whose public key to connect to.

    Of several server keys the next is tried when a handshake fails.
    """

    public: bytes
    secret: bytes
    server: bytes | tuple[bytes, ...] | None = None

    def __repr__(self) -> str:
        """Without the secret, which must not reach a log."""
        return f"CurveKeys(public={self.public!r}, server={self.server!r})"

    @property
    def servers(self) -> tuple[bytes, ...]:
        """The server keys, in the order to try them."""
        if self.server is None:
            return ()
        return (self.server,) if isinstance(self.server, bytes) else self.server


def apply_server_keys(socket: zmq.Socket[bytes], keys: CurveKeys | None) -> None:
    """Make ``socket`` demand CURVE of everyone who connects."""
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def apply_client_keys(socket: zmq.Socket[bytes], keys: CurveKeys | None) -> None:
    """Make ``socket`` speak CURVE to the server whose key it knows."""
    if keys is None:
        return
    if not keys.servers:
        raise ConfigError("CURVE keys for a connection need the server's public key")
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.servers[0])
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach it: ipc, inproc, 127.0.0.0/8, ::1, localhost."""
    if not endpoint.startswith("tcp://"):
        return endpoint.startswith(("ipc://", "inproc://"))
    try:
        host = urlsplit(endpoint).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a wildcard, an interface or a host name


def check_address(endpoint: str) -> None:
    """Raise ConfigError unless ``endpoint`` is an address; port 0 stands for any free one."""
    any_port = isinstance(endpoint, str) and endpoint.endswith(":0")
    try:
        check_endpoint(f"{endpoint[:-2]}:1" if any_port else endpoint)
    except InputError as error:
        raise ConfigError(str(error)) from None


def check_bind(endpoint: str, keys: CurveKeys | None) -> None:
    """Refuse to listen where strangers could connect without keys."""
    check_address(endpoint)
    if keys is None and not is_local(endpoint):
        raise ConfigError(
            f"refusing to listen on {endpoint} without CURVE keys: use 127.0.0.1 or ipc://, "
            "or give keys"
        )
