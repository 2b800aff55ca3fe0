"""ZAP handler: decides on the process's loop whether a key may connect.

libzmq sends one request per handshake to ``inproc://zeromq.zap.01`` and waits for the reply. The
authenticator of pyzmq is not used: it runs a thread and accepts every domain without a rule.
Here each socket has a domain and each domain a set of roles; everything else is refused. With
ZAP_ENFORCE_DOMAIN, connections are also refused while no handler runs
(docs/decisions/0016-curve-keys-checked-by-zap-in-the-process.md).

Invariant: only a listed key with one of the domain's roles gets status 200, and its messages carry
the key as User-Id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from ..net.loop import Loop, Periodic
from ..process.log import get_logger
from .curve import CurveKeys
from .identity_owners import Callers
from .keyring import REREAD_S, KeyRing

ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_FIELDS = 9
"""Routing id, empty delimiter, version, request id, domain, address, identity, mechanism, key."""
_KEY_BYTES = 32
_log = get_logger()

Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Keys of a listening socket: our pair, the ZAP domain, and the keys of its peers."""

    pair: CurveKeys
    domain: bytes
    callers: Callers
    watch: Callable[[Callable[[], object]], object]
    """Registers a function to be called after the key list changed."""


def door(doors: Doorkeeper | None, name: str, *roles: str) -> ServerKeys | None:
    """Return :meth:`Doorkeeper.door`, or None for a process without keys."""
    return None if doors is None else doors.door(name, *roles)


def answer(frames: Sequence[bytes], domains: dict[bytes, Callers]) -> list[bytes] | None:
    """Return the reply to a ZAP request, routing id first; None if it is not version 1.0."""
    if len(frames) < 4 or frames[1] or frames[2] != _VERSION:
        return None
    user = _user(frames, domains)
    status, text = (b"200", b"OK") if user else (b"400", b"this key is not let in here")
    return [frames[0], b"", _VERSION, frames[3], status, text, user, b""]


def _user(frames: Sequence[bytes], domains: dict[bytes, Callers]) -> bytes:
    """Return the z85 key if it may connect, else ``b""``."""
    if len(frames) != _FIELDS or frames[7] != b"CURVE" or len(frames[8]) != _KEY_BYTES:
        return b""
    callers = domains.get(frames[4])
    key: bytes = z85.encode(frames[8])
    return key if callers is not None and callers.admits(key) is not None else b""


class Doorkeeper:
    """ZAP handler for all listening sockets of a context; reloads the key list when it changes.

    Create it before the sockets. Peers can connect only after :meth:`attach`.
    """

    def __init__(self, context: Context, ring: KeyRing) -> None:
        self.ring = ring
        self._domains: dict[bytes, Callers] = {}
        self._watchers: list[Callable[[], object]] = []
        self._loop: Loop | None = None
        self._timer: Periodic | None = None
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ADDRESS)

    def door(self, name: str, *roles: str) -> ServerKeys:
        """Return keys for a listening socket that allows ``roles``; ``name`` must be unique."""
        domain = name.encode()
        callers = Callers(lambda: self.ring.allowed, frozenset(roles))
        self._domains[domain] = callers
        return ServerKeys(self.ring.pair, domain, callers, self._watchers.append)

    def attach(self, loop: Loop) -> None:
        """Answer ZAP requests on ``loop``, and check the key list for changes."""
        self._loop = loop
        loop.add_socket(self._socket, self._pump)
        self._look()
        self._timer = loop.every(REREAD_S, self._look)

    def close(self) -> None:
        """Stop answering; new connections are refused."""
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._loop.remove_socket(self._socket)
            self._loop = None
        self._socket.close()

    def _pump(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        reply = answer(frames, self._domains)
        if reply is not None:
            self._socket.send_multipart(reply, zmq.NOBLOCK)
        return True

    def _look(self) -> None:
        """Reload a changed list and notify the sockets, since peers may have lost access."""
        if self._loop is not None and self.ring.refresh():
            for watcher in self._watchers:
                self._loop.guarded(watcher)
