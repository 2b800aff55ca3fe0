"""A small HTTP listener for scrapes: ``GET /metrics`` beside a process's own sockets.

It runs on the process's event loop. The text is made on a separate thread, so a scrape delays
the loop by the time it takes to copy the numbers. Bounds: connections, size and time of a request's
head. A connection serves one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from ..keys.allowed_names import FOREIGN, AllowedNames
from ..keys.api_keys import ApiKeys
from ..process.log import get_logger
from .families import Family

MAX_CONNECTIONS = 32
MAX_HEAD_BYTES = 8 << 10
TIMEOUT_S = 10.0
"""Seconds from connecting until the end of the answer."""
RETRY_S = 1.0
"""Seconds until the next try to listen, if all ports are in use."""
_log = get_logger()

Families = Callable[[], list[Family]]


class MetricsListener:
    """Listens at ``host`` and answers with the text of ``families()``.

    ``ports``: tried in order; the first free one is taken. Processes that replace each other have
    the same ports, so that a scraper finds them at the same addresses. ``patience_s``: seconds for
    which a predecessor may keep all ports; after that a warning names them. ``allowed_hosts``: what
    requests may name as their host, besides this machine.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: str,
        ports: Sequence[int],
        families: Families,
        key_digests: tuple[str, ...],
        patience_s: float = 0.0,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        self._loop = loop
        self._host, self._ports = host.strip("[]"), tuple(ports)
        self._families = families
        self._keys = ApiKeys(key_digests)
        self._names = AllowedNames(allowed_hosts)
        self._patience_s = patience_s
        self._threads = ThreadPoolExecutor(1, "metrics")
        self._server: asyncio.AbstractServer | None = None
        self.port = 0
        """The port once connections are accepted, else 0."""
        self._open: set[_Connection] = set()
        self._closed = False

    def start(self) -> None:
        """Listen as soon as the loop runs. If all ports are in use, try again every second."""
        self._task = self._loop.create_task(self._listen())

    def close(self) -> None:
        """Close the listener and all connections; call before the loop is closed."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._open):
            connection.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _listen(self) -> None:
        warned, warn_at = False, self._loop.time() + self._patience_s
        while not self._closed:
            error = ""
            for port in self._ports:
                try:
                    self._server = await self._loop.create_server(
                        lambda: _Connection(self), self._host, port
                    )
                except OSError as problem:
                    error = str(problem)
                    continue
                self.port = port
                _log.info("metrics.listening", host=self._host, port=port)
                return
            if not warned and self._loop.time() >= warn_at:
                warned = True
                ports = list(self._ports)
                _log.warning("metrics.not_listening", host=self._host, ports=ports, error=error)
            await asyncio.sleep(RETRY_S)

    # ------------------------------------------------------------------ of a connection

    def opened(self, connection: _Connection) -> bool:
        """Note a connection; return False if there are too many."""
        if len(self._open) >= MAX_CONNECTIONS:
            return False
        self._open.add(connection)
        return True

    def lost(self, connection: _Connection) -> None:
        """Note the end of a connection."""
        self._open.discard(connection)

    def answer(self, head: bytes, connection: _Connection) -> None:
        """Answer the request with this head, now or when the text is made."""
        line, *fields = head.split(b"\r\n")
        method, _, rest = line.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        pairs = [
            (name.strip().lower(), value.strip())
            for name, mark, value in (field.partition(b":") for field in fields)
            if mark
        ]
        headers = dict(pairs)
        if not self._keys and not self._names.admit(pairs):
            connection.send(b"403 Forbidden", FOREIGN.encode() + b"\n")
        elif not self._keys.admit(headers.get(b"authorization", b"")):
            connection.send(b"401 Unauthorized", b"the API key is missing or unknown\n")
        elif path != b"/metrics":
            connection.send(b"404 Not Found", b"only /metrics is here\n")
        elif method != b"GET":
            connection.send(b"405 Method Not Allowed", b"only GET\n")
        else:
            self._loop.create_task(self._scrape(connection))

    async def _scrape(self, connection: _Connection) -> None:
        try:
            families = self._families()
            loop = asyncio.get_running_loop()
            text = await loop.run_in_executor(self._threads, _exposition, families)
        except Exception:
            _log.exception("metrics.failed")
            connection.send(b"500 Internal Server Error", b"the process's log has the cause\n")
        else:
            connection.send(b"200 OK", text, b"text/plain; version=0.0.4; charset=utf-8")


def _exposition(families: list[Family]) -> bytes:
    from .exposition import exposition  # 0.1 s to import, which nothing but a scrape needs

    return exposition(families)


class _Connection(asyncio.Protocol):
    def __init__(self, listener: MetricsListener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head = b""
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        if not self._listener.opened(self):
            self._transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(TIMEOUT_S, self.end)

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return
        self._head += data
        head, mark, _ = self._head.partition(b"\r\n\r\n")
        if len(head) > MAX_HEAD_BYTES:
            self._answered = True
            self.send(b"431 Request Header Fields Too Large", b"the request's head is too long\n")
        elif mark:
            self._answered = True
            self._listener.answer(head, self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._listener.lost(self)
        if self._timer is not None:
            self._timer.cancel()

    def send(self, status: bytes, body: bytes, kind: bytes = b"text/plain; charset=utf-8") -> None:
        """Send the answer and close the connection."""
        if self._transport is None:
            return
        head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self._transport.write(head % (status, kind, len(body)) + body)
        self._transport.close()

    def end(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()
