"""Who may reach a socket: loopback and ipc freely, everyone else only with CURVE keys."""

from __future__ import annotations

import ipaddress

import zmq

from ..proto.endpoints import check_endpoint
from ..proto.errors import ConfigError, InputError


class CurveKeys:
    """A process's CURVE pair in z85 (40 bytes each), and whose public key to connect to.

    Of several server keys the next is tried when a handshake fails. A plain class: structs and
    dataclasses are written to a log field by field, this one as its ``repr``.
    """

    __slots__ = ("public", "secret", "server")

    def __init__(
        self,
        *,
        public: bytes,
        secret: bytes,
        server: bytes | tuple[bytes, ...] | None = None,
    ) -> None:
        self.public = public
        self.secret = secret
        self.server = server

    def __repr__(self) -> str:
        """Without the secret, which must not reach a log."""
        return f"CurveKeys(public={self.public!r}, server={self.server!r})"

    @property
    def servers(self) -> tuple[bytes, ...]:
        """The server keys, in the order to try them."""
        if self.server is None:
            return ()
        return (self.server,) if isinstance(self.server, bytes) else self.server


def is_tcp(endpoint: str) -> bool:
    """Whether it is of the kind that keys are for."""
    return endpoint.startswith("tcp://")


def apply_server_keys(socket: zmq.Socket[bytes], keys: CurveKeys, domain: bytes) -> None:
    """Make ``socket`` demand CURVE of everyone who connects, and ask ZAP about their keys.

    Without the two ZAP options it would encrypt, and let anyone in while nobody answers.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def apply_client_keys(socket: zmq.Socket[bytes], keys: CurveKeys | None, turn: int = 0) -> None:
    """Make ``socket`` speak CURVE to the server whose key it knows; of several, in turn."""
    if keys is None:
        return
    if not keys.servers:
        raise ConfigError("CURVE keys for a connection need the server's public key")
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.servers[turn % len(keys.servers)])
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach it: ipc, inproc, 127.0.0.0/8, ::1, localhost."""
    if not endpoint.startswith("tcp://"):
        return endpoint.startswith(("ipc://", "inproc://"))
    # As libzmq reads it: whatever stands before the last colon names the host.
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if host == "localhost":  # bound as 127.0.0.1, whatever this machine resolves it to
        return True
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        return ipaddress.ip_address(host[1:-1] if bracketed else host).is_loopback
    except ValueError:
        return False  # a wildcard, an interface or a host name


def check_address(endpoint: str) -> None:
    """Raise ConfigError unless ``endpoint`` is an address; port 0 stands for any free one."""
    any_port = isinstance(endpoint, str) and endpoint.endswith(":0")
    try:
        check_endpoint(f"{endpoint[:-2]}:1" if any_port else endpoint)
    except InputError as error:
        raise ConfigError(str(error)) from None


def check_bind(endpoint: str, *, keyed: bool) -> None:
    """Refuse to listen where strangers could connect without keys."""
    check_address(endpoint)
    if endpoint.startswith("ipc://@"):  # no file, so no mode: Linux lets every user connect
        raise ConfigError(f"{endpoint} is no file; give ipc://PATH")
    if not keyed and not is_local(endpoint):
        raise ConfigError(
            f"refusing to listen on {endpoint} without CURVE keys: use 127.0.0.1 or ipc://, "
            "or make keys with baton keygen FOLDER and give --keys FOLDER"
        )
