"""Access to sockets: loopback and ipc without keys, other addresses only with CURVE keys."""

from __future__ import annotations

import ipaddress

import zmq

from baton.proto.errors import ConfigError, InputError
from baton.proto.wire.endpoints import check_endpoint


class CurveKeys:
    """A process's CURVE key pair and the expected public keys of a server, each 40 bytes of z85.

    With several server keys, the next one is tried after a failed handshake. This is a plain class
    because logging a struct or dataclass would write every field, and with it the secret.
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

    def expecting(self, server: bytes) -> CurveKeys:
        """Return the pair for a server with this key. Raises ConfigError if it is not expected."""
        if server not in self.servers:
            raise ConfigError(f"the list has no key {server.decode('ascii', 'replace')}")
        return CurveKeys(public=self.public, secret=self.secret, server=server)

    @property
    def servers(self) -> tuple[bytes, ...]:
        """The server keys in the order of attempts."""
        if self.server is None:
            return ()
        return (self.server,) if isinstance(self.server, bytes) else self.server


def is_tcp(endpoint: str) -> bool:
    """Whether ``endpoint`` uses tcp, the only transport with keys."""
    return endpoint.startswith("tcp://")


def apply_server_keys(socket: zmq.Socket[bytes], keys: CurveKeys, domain: bytes) -> None:
    """Make ``socket`` require CURVE from every peer and verify their keys by ZAP.

    Without the two ZAP options it would encrypt, but accept every key while no ZAP handler runs.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def apply_client_keys(socket: zmq.Socket[bytes], keys: CurveKeys | None, turn: int = 0) -> None:
    """Make ``socket`` use CURVE, with server key number ``turn`` modulo the number of keys.

    Raises ConfigError for keys without a server key.
    """
    if keys is None:
        return
    if not keys.servers:
        raise ConfigError("CURVE keys for a connection need the server's public key")
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.servers[turn % len(keys.servers)])
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def is_local(endpoint: str) -> bool:
    """Whether only this machine can connect: ipc, inproc, 127.0.0.0/8, ::1, localhost."""
    if not endpoint.startswith("tcp://"):
        return endpoint.startswith(("ipc://", "inproc://"))
    # As in libzmq, the host is the part before the last colon.
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if host == "localhost":  # bind() always uses 127.0.0.1 for it
        return True
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        return ipaddress.ip_address(host[1:-1] if bracketed else host).is_loopback
    except ValueError:
        return False  # a wildcard, an interface or a host name


def check_address(endpoint: str) -> None:
    """Raise ConfigError for an invalid address; port 0 means any free port."""
    any_port = isinstance(endpoint, str) and endpoint.endswith(":0")
    try:
        check_endpoint(f"{endpoint[:-2]}:1" if any_port else endpoint)
    except InputError as error:
        raise ConfigError(str(error)) from None


def check_bind(endpoint: str, *, keyed: bool) -> None:
    """Raise ConfigError for an address that others could connect to without keys."""
    check_address(endpoint)
    if endpoint.startswith("ipc://@"):  # abstract, without a file mode: any user could connect
        raise ConfigError(f"{endpoint} is not a file; give ipc://PATH")
    if not keyed and not is_local(endpoint):
        raise ConfigError(
            f"refusing to listen on {endpoint} without CURVE keys: use 127.0.0.1 or ipc://, "
            "or create keys with baton keygen FOLDER and give --keys FOLDER"
        )
