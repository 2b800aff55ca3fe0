"""Accepts the connections of a listener, as many as the gateway can keep.

The event loop's own servers accept whatever arrives, and reset it when no descriptor is left. A
connection counts from here on, before its TLS handshake.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from baton.runtime.process.log import get_logger

from .connections import Connections, Place, address_of

_TURN = 32
"""Connections that are accepted in one turn of the event loop."""
_PAUSE_S = 0.02
"""Seconds without accepting while no more connections can be taken."""
_log = get_logger()

Connect = Callable[[socket.socket, Place], Awaitable[object]]
"""Makes the transport of an accepted connection, which then reports its end."""


class Acceptor:
    """Accepts at ``listener`` while ``connections`` takes more."""

    def __init__(self, listener: socket.socket, connections: Connections, connect: Connect) -> None:
        self._listener = listener
        self._connections = connections
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._warned = self._stopped = False
        listener.settimeout(0.0)
        self._resume()

    def stop(self) -> None:
        """Stop accepting; first take what the kernel has accepted for this process.

        Another gateway may listen at the same port, but the kernel moves none of them to it.
        """
        if self._stopped:
            return
        self._wait()
        self._stopped = True
        while self._connections.takes_more(self._loop.time()) and self._accept():
            pass
        self._listener.close()

    async def connected(self, timeout: float) -> None:
        """Wait for the handshakes that have begun, and end them after ``timeout`` seconds."""
        if self._connecting:
            for late in (await asyncio.wait(self._connecting, timeout=timeout))[1]:
                late.cancel()

    def resume(self) -> None:
        """Accept again if no more could be taken: a connection has ended."""
        if self._pause is not None and not self._stopped:
            self._pause.cancel()
            self._resume()

    def _resume(self) -> None:
        self._pause = None
        if not self._stopped:
            self._loop.add_reader(self._listener, self._readable)

    def _readable(self) -> None:
        for _ in range(_TURN):
            if not self._connections.takes_more(self._loop.time()):
                self._wait()
                return
            if not self._accept():
                return

    def _accept(self) -> bool:
        """Accept one connection; return False if there was none."""
        try:
            connection, peer = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                return False  # the peer has gone; the listener stays readable if there are others
            if not self._warned:
                self._warned = True
                _log.warning("gateway.no_descriptors", error=str(error))
            self._wait()
            return False
        connection.settimeout(0.0)
        address = address_of(str(peer[0])) if peer else ""
        place, ended = self._connections.opened(address, self._loop.time())
        for one in ended:
            one.end()
        place.end = partial(_shut_down, connection)
        task = self._loop.create_task(self._make(connection, place))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return True

    async def _make(self, connection: socket.socket, place: Place) -> None:
        try:
            await self._connect(connection, place)
        except BaseException as error:
            connection.close()
            self._connections.closed(place)
            self.resume()
            if not isinstance(error, OSError):  # the handshake failed, or the peer has gone
                raise

    def _wait(self) -> None:
        if self._pause is None and not self._stopped:
            self._loop.remove_reader(self._listener)
            self._pause = self._loop.call_later(_PAUSE_S, self._resume)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # the peer has gone
        connection.shutdown(socket.SHUT_RDWR)
