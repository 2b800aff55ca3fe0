"""Serves the application with uvicorn on an event loop of uvloop.

Limits of a connection: its first bytes and each request's head must arrive within a time, and a
head has a maximum size (:class:`LimitedHttp`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..client.async_client import AsyncClient
from ..proto.errors import ConfigError
from ..runtime.process.log import get_logger
from ..runtime.process.main import SIGN_EVERY_S, say_alive
from .app import make_app
from .config import GatewayConfig
from .served import Served

MAX_HEAD_BYTES = 16 << 10
_BACKLOG = 2048
_GRACE_S = 10
"""Seconds that open requests may take when the gateway ends."""
_log = get_logger()


class LimitedHttp(HttpToolsProtocol):
    """HTTP/1.1 whose request heads are limited in size and time."""

    head_timeout_s = 10.0
    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request's head."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._timer = self.loop.call_later(self.head_timeout_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the head's bytes; a head that is too long or too slow ends the connection."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._timer is None:  # a further request on a kept connection
                self._timer = self.loop.call_later(self.head_timeout_s, self._late)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse("431 Request Header Fields Too Large", "the request's head is too long")

    def on_url(self, url: bytes) -> None:
        """Limit the path like the rest of the head."""
        super().on_url(url)
        if len(self.url) > MAX_HEAD_BYTES:
            raise ValueError("the path is too long")

    def on_headers_complete(self) -> None:
        """Begin the request."""
        self._in_head = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next head."""
        self._in_head = True
        super().on_message_complete()

    def _late(self) -> None:
        self._timer = None
        if self._in_head and self._head_bytes and not self.transport.is_closing():
            self._refuse("408 Request Timeout", "the request's head did not arrive in time")
        elif not self._head_bytes and self.cycle is None:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: str, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "head"}
        body = msgspec.json.encode({"error": error})
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """A server whose stop by a signal is a normal end: the exit code is 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGTERM and SIGINT; a second SIGINT does not wait for open requests."""
        loop, signals = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
        for one in signals:
            loop.add_signal_handler(one, self.handle_exit, one, None)
        try:
            yield
        finally:
            for one in signals:
                loop.remove_signal_handler(one)


Announce = Callable[[str, str, bool], object]


def serve(config: GatewayConfig, on_listening: Announce | None = None) -> int:
    """Run a gateway until a stop signal and return the exit code.

    ``on_listening``: called with the URL, the model's name and whether a key is required.
    """
    sockets = [_listen(config)]
    uvloop.run(_serve(config, sockets, on_listening))
    return 0


def _listen(config: GatewayConfig) -> socket.socket:
    host = config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, config.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen at {config.host}:{config.port}: {error}") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    return listener


async def _serve(
    config: GatewayConfig, sockets: list[socket.socket], on_listening: Announce | None
) -> None:
    client = AsyncClient(list(config.routers), keys=config.keys or None)
    served = Served(client, config.model_names, config.max_body_bytes)
    app = make_app(served, [bytes.fromhex(digest) for digest in config.api_keys])
    LimitedHttp.head_timeout_s = config.head_timeout_s
    server = Server(
        uvicorn.Config(
            cast(Any, app),
            http=LimitedHttp,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=config.max_connections,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=config.ssl_certfile or None,
            ssl_keyfile=config.ssl_keyfile or None,
        )
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    host, port = sockets[0].getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    shown = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{shown}:{port}/v1"
    _log.info("gateway.listening", url=url)
    alive = asyncio.ensure_future(_show_life())
    try:
        async with client:
            if on_listening is not None:
                await served.model()
                on_listening(url, served.name, bool(config.api_keys))
            await server.serve(sockets=sockets)
    finally:
        alive.cancel()


async def _show_life() -> None:
    """Show the supervisor every second that the loop runs."""
    while True:
        say_alive()
        await asyncio.sleep(SIGN_EVERY_S)
