"""Serves the application with uvicorn on an event loop of uvloop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

from baton.client.async_client import AsyncClient
from baton.proto.errors import ConfigError
from baton.runtime.metrics.families import Family
from baton.runtime.metrics.listener import MAX_CONNECTIONS as METRICS_CONNECTIONS
from baton.runtime.metrics.listener import MetricsListener
from baton.runtime.metrics.vllm import vllm_families
from baton.runtime.net.descriptors import open_files
from baton.runtime.process.bursts import Burst
from baton.runtime.process.garbage import collect_rarely
from baton.runtime.process.log import get_logger
from baton.runtime.process.main import SIGN_EVERY_S, favor_event_loop, say_alive
from baton.runtime.small_files import check_file

from .acceptor import Acceptor
from .app import make_app
from .chat_plan import ChatPlanner
from .config import MAX_CONNECTIONS, GatewayConfig
from .connections import Connections, Place, places_for
from .exchange import WriteBatch
from .http import FIRST_REQUEST_S, LimitedHttp
from .image_fetch import MAX_FETCHES, ImageFetcher
from .metrics import GatewayMetrics
from .served import Served
from .tracing import make_tracing

_BACKLOG = 2048
_ENDS_LATER_S = 30.0
"""Seconds that a gateway which is replaced may need in addition to its grace."""
_BURST = 512
"""Connections above which a gateway takes memory that it can give back: each takes 10 to 30 KB."""
_ROUTER_FILES = 8
"""Descriptors of the sockets to one router."""
_SPARE_FILES = 20
"""Descriptors of helper processes, of pipes while one starts, of files that are read, and more."""
_log = get_logger()


class Server(uvicorn.Server):
    """A server whose stop by a signal is a normal end: the exit code is 0.

    ``places``: of its connections.
    """

    def __init__(self, config: uvicorn.Config, places: Connections | None = None) -> None:
        super().__init__(config)
        if places is None:
            places = Connections(*places_for(open_files(), 0, MAX_CONNECTIONS))
        self.places = places
        self._burst = Burst(_BURST)
        self._acceptors: list[Acceptor] = []

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
        """Listen."""
        self.servers = []
        self._acceptors = [Acceptor(one, self.places, self._connect) for one in sockets or ()]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; first take the connections that the kernel has accepted for this process."""
        for acceptor in self._acceptors:
            acceptor.stop()
        for acceptor in self._acceptors:
            await acceptor.connected(FIRST_REQUEST_S)
        await super().shutdown(sockets)

    async def _connect(self, connection: socket.socket, place: Place) -> None:
        """Serve a connection. A TLS handshake has as long as a request's head."""
        self._burst.count(len(self.places))
        protocol = LimitedHttp(self.config, self.server_state, self.lifespan.state)
        protocol.take(place, self._freed)
        tls = self.config.ssl
        limit = LimitedHttp.head_timeout_s if tls is not None else None
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=limit
        )

    def tidy(self) -> None:
        """Give memory back if a burst of connections has ended."""
        self._burst.tidy(len(self.places))

    def _freed(self, place: Place) -> None:
        self.places.closed(place)
        self._burst.count(len(self.places))
        for acceptor in self._acceptors:
            acceptor.resume()


def server_config(
    app: ASGIApp, *, grace_s: float, certfile: str = "", keyfile: str = ""
) -> uvicorn.Config:
    """Return the settings of a server. ``grace_s``: of its stop."""
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
        check_file(config.ssl_certfile)
        check_file(config.ssl_keyfile)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # ssl.SSLError is one
        files = f"{config.ssl_certfile} and {config.ssl_keyfile}"
        raise ConfigError(f"the certificate {files} cannot be used: {error.strerror}") from None


def _listen(config: GatewayConfig) -> socket.socket:
    host = config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server(
            (host, config.port), family=family, backlog=_BACKLOG, reuse_port=config.share_port
        )
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {config.host}:{config.port}: {error.strerror}"
        ) from None
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
        strict_parameters=config.strict_parameters,
        vllm_metrics=config.metrics_compat == "vllm", router_clients=_router_clients(config),
        writes=writes,
    )  # fmt: skip
    tracing = make_tracing(config.otlp_endpoint, config.name)
    app = make_app(
        served, config.api_keys, counts, tracing, config.allowed_hosts, config.allowed_origins
    )
    listener = _metrics_listener(config, counts)
    LimitedHttp.head_timeout_s = config.head_timeout_s
    settings = server_config(
        app, grace_s=config.grace_s, certfile=config.ssl_certfile, keyfile=config.ssl_keyfile
    )
    server = Server(settings, _connections(config))
    counts.connections = server.places
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
        clock = _Life(server)
        try:
            await server.serve(sockets=sockets)
        finally:
            clock.stop()
            for one in served.router_clients:
                await one.close()
            if tracing is not None:
                tracing.close()
            if listener is not None:
                listener.close()


def _connections(config: GatewayConfig) -> Connections:
    """Return the connections that the limit on open files allows. Raises ConfigError."""
    _log.prepare()
    needed = (
        sum(1 for _ in Path("/proc/self/fd").iterdir())
        + _SPARE_FILES
        + _ROUTER_FILES * len(config.routers)
    )
    if config.image_hosts:
        needed += MAX_FETCHES
    if config.metrics_ports:
        needed += METRICS_CONNECTIONS + 1
    return Connections(*places_for(open_files(), needed, config.max_connections))


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
        config.api_keys, config.grace_s + _ENDS_LATER_S, config.allowed_hosts,
    )  # fmt: skip
    listener.start()
    return listener


class _Life:
    """Shows the supervisor every second that the loop runs; a gateway has no other timers.

    After a burst of connections it gives memory back.
    """

    def __init__(self, server: Server) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = server
        self._turns = 0
        self._timer = self._loop.call_soon(self._turn)

    def stop(self) -> None:
        """Stop; the gateway ends."""
        self._timer.cancel()

    def _turn(self) -> None:
        self._timer = self._loop.call_later(SIGN_EVERY_S, self._turn)
        self._turns += 1
        say_alive(self._turns)
        self._server.tidy()
