"""ZAP: the answer to "may this key connect?", given on the process's own loop.

libzmq asks at ``inproc://zeromq.zap.01``, once per handshake and context, and waits; pyzmq's
authenticator would answer from a thread of its own and let in every domain it was not told of.
Here a socket has a domain, a domain has roles, and what has neither is refused: with
ZAP_ENFORCE_DOMAIN also while nobody answers (docs/decisions/0016-keys-and-zap.md).

Invariant: only a listed key of one of the domain's roles gets 200, and the User-Id of its
messages is that key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from .callers import Callers
from .keyring import REREAD_S, KeyRing
from .log import get_logger
from .loop import Loop, Timer
from .security import CurveKeys

ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_FIELDS = 9
"""Routing id, empty delimiter, version, request id, domain, address, identity, mechanism, key."""
_KEY_BYTES = 32
_log = get_logger()

Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What a listening socket needs: our pair, its ZAP domain, and who its peers are."""

    pair: CurveKeys
    domain: bytes
    callers: Callers
    watch: Callable[[Callable[[], object]], object]
    """Registers what is to be called after the list has changed."""


def door(doors: Doorkeeper | None, name: str, *roles: str) -> ServerKeys | None:
    """:meth:`Doorkeeper.door` of a process that may have no keys."""
    return None if doors is None else doors.door(name, *roles)


def answer(frames: Sequence[bytes], domains: dict[bytes, Callers]) -> list[bytes] | None:
    """The reply to a ZAP request, routing id first; None for what is no request of version 1.0."""
    if len(frames) < 4 or frames[1] or frames[2] != _VERSION:
        return None
    user = _user(frames, domains)
    status, text = (b"200", b"OK") if user else (b"400", b"this key is not let in here")
    return [frames[0], b"", _VERSION, frames[3], status, text, user, b""]


def _user(frames: Sequence[bytes], domains: dict[bytes, Callers]) -> bytes:
    """The key in z85 if it may connect, else empty."""
    if len(frames) != _FIELDS or frames[7] != b"CURVE" or len(frames[8]) != _KEY_BYTES:
        return b""
    callers = domains.get(frames[4])
    key: bytes = z85.encode(frames[8])
    return key if callers is not None and callers.admits(key) is not None else b""


class Doorkeeper:
    """Answers for all listening sockets of a context, and reads the list again when it changes.

    Make it before the sockets; :meth:`attach` before anyone is to be let in.
    """

    def __init__(self, context: Context, ring: KeyRing) -> None:
        self.ring = ring
        self._domains: dict[bytes, Callers] = {}
        self._watchers: list[Callable[[], object]] = []
        self._loop: Loop | None = None
        self._timer: Timer | None = None
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ADDRESS)

    def door(self, name: str, *roles: str) -> ServerKeys:
        """Keys for a listening socket that these roles may use; each socket has its own name."""
        domain = name.encode()
        callers = Callers(lambda: self.ring.allowed, frozenset(roles))
        self._domains[domain] = callers
        return ServerKeys(self.ring.pair, domain, callers, self._watchers.append)

    def attach(self, loop: Loop) -> None:
        """Answer from now on."""
        self._loop = loop
        loop.add_socket(self._socket, self._pump)
        self._look()

    def close(self) -> None:
        """Let nobody in any more."""
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
        """Notice a changed list, and tell the sockets, whose peers it may concern."""
        if self.ring.refresh():
            for watcher in self._watchers:
                watcher()
        if self._loop is not None:
            self._timer = self._loop.call_later(REREAD_S, self._look)
