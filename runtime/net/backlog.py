"""Limit on the bytes of a connection that ZeroMQ has read and this process has not.

ZeroMQ's own limit, ``RCVHWM``, is not used: libzmq 4.3.5 aborts the process if a peer leaves more
messages than that and then closes its connection (docs/decisions/0045). So ZeroMQ reads without a
limit, and the owner of the socket closes connections that are too far ahead.

The backlog of a connection is the kernel's count of received bytes minus the bytes of its messages
that were taken from the socket. Pings and handshakes are never taken, so the difference grows
slowly. After the socket was empty, everything received before is taken, which corrects it.

Invariant: the estimated backlog is never below the real one by more than what arrives between two
calls of :meth:`Backlog.excessive`.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

FRAME_BYTES = 2
"""Bytes of a small frame on the wire beside its content; larger ones have 9."""
KEYED_FRAME_BYTES = 35
"""The same with CURVE: name, nonce, authenticator and flags."""


class _Connection(msgspec.Struct):
    """Bytes since a connection was opened."""

    received: int = 0  # at the last look
    taken: int = 0
    spoken: bool = False  # its messages reach this process, so an empty socket has none of it


class Backlog:
    """The connections of one socket by descriptor.

    ``limit``: maximum backlog of one connection in bytes. ``received_of(fd)``: bytes received by
    the kernel, None if the descriptor is not a connection any more.
    """

    def __init__(self, limit: int, received_of: Callable[[int], int | None]) -> None:
        self._limit = limit
        self._received_of = received_of
        self._connections: dict[int, _Connection] = {}
        self.drained = True
        """Set by the owner when no message was waiting."""

    def opened(self, fd: int) -> None:
        """Add a new connection; the descriptor number may be reused."""
        self._connections[fd] = _Connection()

    def closed(self, fd: int) -> None:
        """Remove a connection."""
        self._connections.pop(fd, None)

    def taken(self, fd: int, nbytes: int) -> None:
        """Count a message that was taken from the socket."""
        connection = self._connections.get(fd)
        if connection is not None:
            connection.taken += nbytes
            connection.spoken = True

    def excessive(self) -> list[int]:
        """Return the connections whose backlog exceeds the limit; call it again and again."""
        drained, self.drained = self.drained, False
        found = []
        for fd, connection in tuple(self._connections.items()):
            received = self._received_of(fd)
            if received is None:
                continue  # closed; the report of it comes
            backlog = received - connection.taken
            if drained and connection.spoken:
                backlog = min(backlog, received - connection.received)
            backlog = max(0, backlog)
            connection.received = received
            connection.taken = received - backlog
            if backlog > self._limit:
                found.append(fd)
        return found
