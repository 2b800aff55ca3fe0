"""Serves the application with uvicorn on an event loop of uvloop.

Limits of a connection: its first bytes, each request's head, and the rest of a request that was
answered early must arrive within a time, and heads and trailers have a maximum size
(:class:`LimitedHttp`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..client.async_client import AsyncClient
from ..proto.errors import ConfigError
from ..runtime.metrics.families import Family
from ..runtime.metrics.listener import MetricsListener
from ..runtime.metrics.vllm import vllm_families
from ..runtime.process.log import get_logger
from ..runtime.process.main import SIGN_EVERY_S, collect_rarely, favor_event_loop, say_alive
from .app import make_app
from .chat_plan import ChatPlanner
from .config import GatewayConfig
from .exchange import Exchange, WriteBatch
from .image_fetch import ImageFetcher
from .metrics import GatewayMetrics
from .served import Served
from .tracing import make_tracing

MAX_HEAD_BYTES = 16 << 10
_LONG_HEAD = "the request's head is too long"
_CODING = "the only transfer coding that this server knows is chunked"
_BACKLOG = 2048
_FIRST_REQUEST_S = 1.0
"""Seconds that a new connection has for its first request when the server stops."""
_UNREAD_S = 60.0
"""Seconds after which a connection ends whose client does not read its answer."""
_ENDS_LATER_S = 30.0
"""Seconds that a gateway which is replaced may need in addition to its grace."""
_log = get_logger()


class LimitedHttp(HttpToolsProtocol):
    """HTTP/1.1 whose request heads are limited in size and time, and whose trailers in size.

    A request that continues after its answer is limited in time: the routes limit a body only while
    they read it.
    """

    head_timeout_s = 10.0
    _head_bytes = 0
    _idle_bytes = 0  # since the head or the last part of the body: of trailers and chunk headers
    _codings = b""  # of the request's transfer
    _in_head = True
    _timer: asyncio.TimerHandle | None = None
    _exchange: Exchange | None = None  # the last exchange that began
    _blocked: asyncio.TimerHandle | None = None  # runs while the client does not read
    _idle_timer: asyncio.TimerHandle | None = None
    _idle_since = 0.0  # the end of the last answer
    _leaves = False  # the server stops: the first request on this connection is its last

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request's head."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._timer = self.loop.call_later(self.head_timeout_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_timer()
        for timer in (self._blocked, self._idle_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        if self._exchange is not None:
            self._exchange.gone()

    def data_received(self, data: bytes) -> None:
        """Count the bytes of the head and of trailers; too many end the connection."""
        if self._in_head:
            self._head_bytes += len(data)
        else:
            # The parser keeps an unfinished trailer: dropping finished ones does not bound memory.
            self._idle_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        size = self._head_bytes if self._in_head else self._idle_bytes
        if size > MAX_HEAD_BYTES:
            text = _LONG_HEAD if self._in_head else "the request's end is too long"
            self._refuse("431 Request Header Fields Too Large", text)
        elif self._in_head and self._head_bytes and self._timer is None:
            # A part of a further head on a kept connection. Most heads arrive as a whole.
            self._timer = self.loop.call_later(self.head_timeout_s, self._late)

    def on_url(self, url: bytes) -> None:
        """Limit the path like the rest of the head."""
        super().on_url(url)
        if len(self.url) > MAX_HEAD_BYTES:
            raise ValueError(_LONG_HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; ignore a trailer. Raises ValueError for an unknown transfer coding."""
        if not self._in_head:
            return
        name = name.lower()
        if name == b"transfer-encoding":
            # The parser accepts any list that ends with chunked, and removes this coding alone.
            self._codings += value.lower()
            if self._codings != b"chunked":
                raise ValueError(_CODING)
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, which the routes limit."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Begin the request. Raises ValueError if its head has arrived at once and is too long."""
        if self._head_bytes > MAX_HEAD_BYTES:  # or a part of the body has arrived with the head
            head = sum(len(name) + len(value) + 4 for name, value in self.headers)
            if len(self.url) + head > MAX_HEAD_BYTES:
                raise ValueError(_LONG_HEAD)
        self._in_head = False
        self._head_bytes = self._idle_bytes = 0
        self._codings = b""
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next head."""
        self._in_head = True
        self._stop_timer()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Answer a request. A pipelined one comes here after the answer before it."""
        if self._leaves:
            cycle.keep_alive = False
        self._exchange = Exchange.begin(cycle)
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        """Limit the time in which the client does not read its answer."""
        super().pause_writing()
        if self._blocked is None:
            self._blocked = self.loop.call_later(_UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue a stream whose client has read again."""
        if self._blocked is not None:
            self._blocked.cancel()
            self._blocked = None
        super().resume_writing()
        if self._exchange is not None:
            self._exchange.has_room()

    def on_response_complete(self) -> None:
        """Start the next request, or limit the time until it arrives.

        Also limit the time of what still arrives of an answered request.
        """
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._idle_since = self.loop.time()
            if self._idle_timer is None:
                self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._idle)
        cycle = self.cycle  # of the request that arrives now; a pipelined one has no answer yet
        unfinished = not self._in_head and cycle is not None and cycle.response_complete
        if unfinished and self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.head_timeout_s, self._late)

    def _idle(self) -> None:
        """Close a connection that is idle since its last answer; wait on if it is not.

        One timer runs on from request to request: uvicorn's, which each answer sets and each
        request cancels, takes several microseconds of a request.
        """
        self._idle_timer = None
        if self.transport.is_closing() or not self.cycle.response_complete:
            return  # the end of the running request sets the timer
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if self._head_bytes or not self._in_head:  # limited by the other timer
            left = self.timeout_keep_alive
        if left > 0:
            self._idle_timer = self.loop.call_later(left, self._idle)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """End the connection after its running request, or after the first one if it is new.

        The client of a new connection has sent its request, or is about to, and would be reset.
        """
        if self.cycle is None and not self._leaves:
            self._leaves = True
            self._stop_timer()
            self._timer = self.loop.call_later(_FIRST_REQUEST_S, self.transport.close)
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser does not accept. It does not pass on why the head was refused."""
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse("431 Request Header Fields Too Large", _LONG_HEAD)
        elif self._codings not in (b"", b"chunked"):
            self._refuse("501 Not Implemented", _CODING)
        else:
            self._refuse("400 Bad Request", "the request is not valid HTTP/1.1")

    def _late(self) -> None:
        self._timer = None
        if not self._in_head:  # the request was answered long ago
            self.transport.close()
            return
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
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. A TLS handshake has as long as a request's head, not a minute as by default."""
        if self.config.ssl is None or sockets is None:
            await super().startup(sockets)
            return
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self._make_protocol, sock=one, ssl=self.config.ssl, backlog=self.config.backlog,
                ssl_handshake_timeout=LimitedHttp.head_timeout_s,
            )
            for one in sockets
        ]  # fmt: skip
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; first take the connections that the kernel has accepted for this process.

        Another gateway may listen at the same port, but the kernel moves none of them to it.
        """
        loop, taken = asyncio.get_running_loop(), list[socket.socket]()
        for listener in sockets or ():
            with suppress(OSError):  # no more is waiting
                listener.settimeout(0.0)
                while len(taken) < _BACKLOG:
                    taken.append(listener.accept()[0])
                    taken[-1].settimeout(0.0)
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            with suppress(OSError):  # closed already
                listener.shutdown(socket.SHUT_RD)  # uvloop closes it only at the end of its turn
        tls = self.config.ssl
        limit = _FIRST_REQUEST_S if tls is not None else None
        connecting = (
            loop.connect_accepted_socket(
                self._make_protocol, one, ssl=tls, ssl_handshake_timeout=limit
            )
            for one in taken
        )
        await asyncio.gather(*connecting, return_exceptions=True)  # a peer may have gone
        await super().shutdown(sockets)

    def _make_protocol(self) -> LimitedHttp:
        return LimitedHttp(self.config, self.server_state, self.lifespan.state)


def server_config(
    app: ASGIApp, *, most: int | None = None, grace_s: float, certfile: str = "", keyfile: str = ""
) -> uvicorn.Config:
    """Return the settings of a server. ``most``: connections; ``grace_s``: of its stop."""
    return uvicorn.Config(
        cast(Any, app),
        http=LimitedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        limit_concurrency=most,
        timeout_graceful_shutdown=max(1, int(grace_s)),
        ssl_certfile=certfile or None,
        ssl_keyfile=keyfile or None,
    )


Announce = Callable[[str, str, bool], object]


def serve(config: GatewayConfig, on_listening: Announce | None = None) -> int:
    """Run a gateway until a stop signal and return the exit code.

    ``on_listening``: called with the URL, the model's name and whether a key is required.
    """
    _check_certificate(config)
    sockets = [_listen(config)]
    collect_rarely()
    if config.metrics_ports or config.otlp_endpoint:
        favor_event_loop()
    uvloop.run(_serve(config, sockets, on_listening))
    return 0


def _check_certificate(config: GatewayConfig) -> None:
    """Raise ConfigError for files that uvicorn would fail on after the start."""
    if not config.ssl_certfile:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # ssl.SSLError is one
        files = f"{config.ssl_certfile} and {config.ssl_keyfile}"
        raise ConfigError(f"the certificate {files} cannot be used: {error}") from None


def _listen(config: GatewayConfig) -> socket.socket:
    host = config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server(
            (host, config.port), family=family, backlog=_BACKLOG, reuse_port=config.share_port
        )
    except OSError as error:
        raise ConfigError(f"cannot listen at {config.host}:{config.port}: {error}") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    return listener


async def _serve(
    config: GatewayConfig, sockets: list[socket.socket], on_listening: Announce | None
) -> None:
    keys, folder = config.keys or None, config.model_folder
    counts = GatewayMetrics()
    writes = WriteBatch(counts)
    client = AsyncClient(
        list(config.routers),
        keys=keys,
        connect_timeout=config.worker_grace_s,
        model_folder=folder,
        batch=writes,
    )
    planner = ChatPlanner(config.tool_call_parser, config.reasoning_parser)
    served = Served(
        client, config.model_names, config.max_body_bytes, config.name,
        planner=planner, fetcher=ImageFetcher(config.image_hosts),
        vllm_metrics=config.metrics_compat == "vllm", router_clients=_router_clients(config),
        writes=writes,
    )  # fmt: skip
    tracing = make_tracing(config.otlp_endpoint, config.name)
    app = make_app(served, config.api_keys, counts, tracing)
    listener = _metrics_listener(config, counts)
    LimitedHttp.head_timeout_s = config.head_timeout_s
    server = Server(
        server_config(
            app,
            most=config.max_connections,
            grace_s=config.grace_s,
            certfile=config.ssl_certfile,
            keyfile=config.ssl_keyfile,
        )
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    host, port = sockets[0].getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    shown = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{shown}:{port}/v1"
    _log.info("gateway.listening", url=url)
    async with client:
        if on_listening is not None:
            await served.model()
            on_listening(url, served.name, bool(config.api_keys))
        alive = asyncio.ensure_future(_show_life())
        try:
            await server.serve(sockets=sockets)
        finally:
            alive.cancel()
            for one in served.router_clients:
                await one.close()
            if tracing is not None:
                tracing.close()
            if listener is not None:
                listener.close()


def _router_clients(config: GatewayConfig) -> tuple[AsyncClient, ...]:
    """Return a client for each router, if there are several. They connect on first use."""
    if len(config.routers) < 2:
        return ()
    keys = config.keys or None
    return tuple(AsyncClient(one, keys=keys, connect_timeout=1.0) for one in config.routers)


def _metrics_listener(config: GatewayConfig, counts: GatewayMetrics) -> MetricsListener | None:
    """Serve this gateway's metrics at a separate port, if one is set."""
    if not config.metrics_ports:
        return None

    def families() -> list[Family]:
        own = counts.families()
        return [*own, *vllm_families(own)] if config.metrics_compat else own

    listener = MetricsListener(
        asyncio.get_running_loop(), config.metrics_host, config.metrics_ports, families,
        config.api_keys, config.grace_s + _ENDS_LATER_S,
    )  # fmt: skip
    listener.start()
    return listener


async def _show_life() -> None:
    """Show the supervisor every second that the loop runs."""
    while True:
        say_alive()
        await asyncio.sleep(SIGN_EVERY_S)
