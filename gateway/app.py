"""The ASGI application: routes, API keys, request ids, errors in OpenAI's shape."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.proto.errors import BatonError, CapacityError, InputError, InternalError
from baton.runtime.keys.allowed_names import FOREIGN, AllowedNames, parse_origins
from baton.runtime.keys.api_keys import ApiKeys

from . import dashboard, routes, text_routes
from .cors import Cors
from .errors import (
    ForeignHost,
    KeyInvalid,
    MethodNotAllowed,
    RouteNotFound,
    error_json,
    headers_of,
    status_of,
)
from .exchange import Exchange
from .images_route import images
from .metrics import CLIENT_GONE, Clock, GatewayMetrics, current_clock
from .openapi import encoded, openapi
from .responses_route import responses
from .served import TARGET_HEADER, Served, header_of, random_name
from .speech_route import speech
from .streams import EVENTS
from .tracing import Tracing

MAX_REQUEST_ID = 128
_NO_KEY = "the API key is missing or unknown; send the header Authorization: Bearer KEY"

ROUTES = [
    Route("/v1/chat/completions", text_routes.chat, methods=["POST"]),
    Route("/v1/completions", text_routes.completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/embeddings", routes.embeddings, methods=["POST"]),
    Route("/v1/models", routes.models, methods=["GET"]),
    Route("/v1/models/{name:path}", routes.model, methods=["GET"]),
    Route("/v1/audio/speech", speech, methods=["POST"]),
    Route("/v1/images/generations", images, methods=["POST"]),
    Route("/tokenize", routes.tokenize, methods=["POST"]),
    Route("/detokenize", routes.detokenize, methods=["POST"]),
    Route("/health", routes.ready, methods=["GET"]),
    Route("/ready", routes.ready, methods=["GET"]),
    Route("/live", routes.live, methods=["GET"]),
    Route("/", routes.root, methods=["GET"]),
    Route("/openapi.json", openapi, methods=["GET"]),
    Route("/version", routes.build, methods=["GET"]),
    Route("/metrics", routes.metrics, methods=["GET"]),
    Route("/dashboard", dashboard.page, methods=["GET"]),
    Route("/dashboard/events", dashboard.events, methods=["GET"]),
]

_PATHS = frozenset(route.path for route in ROUTES)
_GENERATING = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings",
     "/v1/audio/speech", "/v1/images/generations")
)  # fmt: skip
"""Paths whose requests the router admits or refuses."""
_OPEN = frozenset(("/live", "/ready", "/health", "/"))
"""Paths that need no key: load balancers ask them, or browsers that will be asked for it."""
_ENTRY = "baton.entry"
"""In the scope of a request that :meth:`Door.refuses` has passed on."""
_SHED = "the cluster is full: it refused most of the latest requests"


class Routes(Starlette):
    """All routes. ``served``: their cluster. Not in ``state``, which takes longer to read."""

    served: Served


def make_app(
    served: Served,
    key_digests: Iterable[str] = (),
    counts: GatewayMetrics | None = None,
    tracing: Tracing | None = None,
    allowed_hosts: Iterable[str] = (),
    allowed_origins: Iterable[str] = (),
) -> ASGIApp:
    """Return the application. ``key_digests``: of the API keys; none: no key is asked for.

    ``allowed_hosts``: what requests without a key may name as their host, besides this machine.
    ``allowed_origins``: web pages of other sites that may send requests and read the answers.
    """
    counts = counts or GatewayMetrics()
    app = Routes(
        routes=ROUTES,
        exception_handlers={BatonError: _failed, HTTPException: _no_route, Exception: _bug},
    )
    app.served = served
    app.state.openapi = encoded(ROUTES)
    app.state.metrics = counts
    app.state.feed = dashboard.Feed(counts)
    app.state.readiness = routes.Readiness()
    origins = parse_origins(allowed_origins)
    names = AllowedNames(allowed_hosts, origins)
    cors = Cors(origins) if origins else None
    return Door(Direct(app), ApiKeys(key_digests), counts, tracing, names, cors)


class Direct:
    """Calls the endpoint of a path without parameters itself, and leaves other paths to Starlette.

    Starlette's middlewares around a route take longer than the rest of a streamed event.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._endpoints = {
            (method, route.path): route.endpoint
            for route in ROUTES
            for method in route.methods or ()
            if not route.param_convertors
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
            if response is None:  # it has answered by the request's Exchange
                return
        except Exception as error:
            response = await _failed(request, error)
            exchange = Exchange.find(scope)
            _forget_frames(error)
            if exchange is not None and exchange.status:  # the response has begun
                try:
                    exchange.failed(bytes(response.body))
                except Exception as second:
                    _own_error(request, second)
                return
        try:
            await response(scope, receive, send)
        except Exception as error:
            await _bug(request, error)  # logs it; the response has begun, so uvicorn ends it
            raise


class _Entry:
    """A request that was named and checked. ``refusal``: its answer if no route gets it."""

    __slots__ = ("clock", "exchange", "headers", "name", "refusal")

    def __init__(
        self,
        headers: dict[bytes, bytes],
        name: bytes,
        clock: Clock,
        exchange: Exchange | None,
        refusal: Response | None,
    ) -> None:
        self.headers = headers
        self.name = name
        self.clock = clock
        self.exchange = exchange
        self.refusal = refusal


class Door:
    """Checks a request before any route, gives every response its request id, and counts it.

    A request needs an API key, except a probe, whose answer is then the status alone. Without
    keys, it must name this machine as its host and origin: any web page can send requests to
    loopback, and the name of its site may resolve to loopback.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        metrics: GatewayMetrics,
        tracing: Tracing | None = None,
        names: AllowedNames | None = None,
        cors: Cors | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._tracing = tracing
        self._names = names or AllowedNames()
        self._cors = cors
        self._shedding = metrics.shedding

    def refuses(self, scope: Scope) -> bool:
        """Answer a request that no route gets, by its exchange, if that takes no coroutine.

        False: the request was not answered and must be passed to this application.
        """
        if self._cors is not None or scope["method"] != "POST":
            return False
        try:
            entry = self._enter(scope)
        except Exception:
            return False  # the request's task meets it too, and logs it
        exchange = entry.exchange
        if entry.refusal is None or exchange is None:
            scope[_ENTRY] = entry
            return False
        exchange.refuse(entry.refusal)
        self._leave(scope, entry, exchange.status if exchange.is_complete else CLIENT_GONE)
        return True

    def _enter(self, scope: Scope) -> _Entry:
        """Name and check a request, whose time begins now."""
        headers, name, repeated = _named(scope)
        exchange = Exchange.find(scope)
        if exchange is not None:
            exchange.fields = headers
            exchange.headers = b"x-request-id: %b\r\n" % name
        refusal = self._refusal(scope, headers, repeated, exchange)
        return _Entry(headers, name, self._metrics.begin(), exchange, refusal)

    def _leave(self, scope: Scope, entry: _Entry, status: int) -> None:
        Exchange.end(scope)
        entry.clock.ended(_route_of(scope["path"]), status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry: _Entry = scope.pop(_ENTRY, None) or self._enter(scope)
        clock, exchange, status = entry.clock, entry.exchange, CLIENT_GONE
        current_clock.set(clock)
        answer = 0
        added = [(b"x-request-id", entry.name)]
        if self._cors is not None:
            added += await self._cors.headers(scope)
            if exchange is not None:
                exchange.headers = b"".join([b"%b: %b\r\n" % pair for pair in added])

        async def send_named(message: Message) -> None:
            nonlocal status, answer
            if message["type"] == "http.response.start":
                answer = message["status"]
                clock.streams = (b"content-type", EVENTS) in message["headers"]
                message["headers"] = [*message["headers"], *added]
            elif not message.get("more_body"):
                status = answer  # the whole answer was sent
            if exchange is not None:
                exchange.frame(message)
            await send(message)

        tracing, span = self._tracing, None
        try:
            if entry.refusal is not None:
                await entry.refusal(scope, receive, send_named)
                return
            if tracing is not None and routes.STATUS_ONLY not in scope:
                span = tracing.begin(scope, entry.headers, entry.name.decode())
            await self._app(scope, receive, send_named)
        finally:
            if exchange is not None and exchange.status:
                answer = exchange.status
                status = answer if exchange.is_complete else CLIENT_GONE
            self._leave(scope, entry, status)
            if tracing is not None and span is not None:
                tracing.end(span, answer)

    def _refusal(
        self, scope: Scope, headers: dict[bytes, bytes], repeated: str, exchange: Exchange | None
    ) -> Response | None:
        """Return the answer to a request that no route gets, else None.

        ``repeated``: the header that may occur only once.
        """
        path, seen = scope["path"], _is_page(scope["path"])
        if not self._keys and not self._names.admit(scope["headers"]):
            return response_of(ForeignHost(FOREIGN))
        preflight = None if self._cors is None else self._cors.preflight(scope)
        if preflight is not None:  # browsers send it without the key
            return preflight
        if not self._keys.admit(headers.get(b"authorization", b""), basic=seen):
            if path in _OPEN and scope["method"] in ("GET", "HEAD"):
                # The exchange is not admitted: such a connection may be closed for another one.
                scope[routes.STATUS_ONLY] = True
                return None
            refused = response_of(KeyInvalid(_NO_KEY))
            if seen:  # the browser asks for it and sends it with the page's events too
                refused.headers["www-authenticate"] = 'Basic realm="the API key as password"'
            return refused
        if repeated:
            return response_of(InputError(f"the header {repeated} occurs more than once"))
        if exchange is not None:
            exchange.admitted()
        # A named worker may be full while the others have room.
        may_shed = path in _GENERATING and TARGET_HEADER not in headers
        if may_shed and not self._shedding.admits(time.monotonic(), random.random()):  # noqa: S311 -- no secret
            return response_of(CapacityError(_SHED, retry_after=self._shedding.retry_after))
        return None


def _named(scope: Scope) -> tuple[dict[bytes, bytes], bytes, str]:
    """Give a request an id in its headers; return the headers, the id, and a repeated header."""
    headers = dict(scope["headers"])
    repeated = ""
    if len(headers) < len(scope["headers"]):
        headers, repeated = _without_repeated(scope)
    name = _request_id(headers)
    given = headers.get(b"x-request-id")
    if given != name:  # routes put it into the native request's id
        others = scope["headers"]
        if given is not None:
            others = [pair for pair in others if pair[0] != b"x-request-id"]
        scope["headers"] = [*others, (b"x-request-id", name)]
        headers[b"x-request-id"] = name
    return headers, name, repeated


def _is_page(path: str) -> bool:
    return path == "/dashboard" or path.startswith("/dashboard/")


def _route_of(path: str) -> str:
    """The route of a path, as a label with few values."""
    if path in _PATHS:
        return path
    return "/v1/models" if path.startswith("/v1/models/") else "other"


def _without_repeated(scope: Scope) -> tuple[dict[bytes, bytes], str]:
    """Drop a request id and a trace that occur more than once, and return the other headers.

    Readers of the headers differ in which of several values counts: the first or the last. An
    answer without these two is the same. A chosen worker is not: if it occurs more than once, its
    header is returned too, and the request must be refused.
    """
    names = [name for name, _ in scope["headers"]]
    repeated = {name for name in (b"x-request-id", b"traceparent") if names.count(name) > 1}
    scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in repeated]
    refused = "X-Target-Endpoint" if names.count(TARGET_HEADER) > 1 else ""
    return dict(scope["headers"]), refused


def _request_id(headers: dict[bytes, bytes]) -> bytes:
    """The client's id as far as it is printable, else a random one."""
    own = headers.get(b"x-request-id", b"")[:MAX_REQUEST_ID]
    if own and own.isascii() and own.decode().isprintable():
        return own
    return random_name(32).encode()


def response_of(error: BatonError) -> Response:
    """Return the response of an error."""
    return Response(
        error_json(error), status_of(error), headers_of(error), media_type="application/json"
    )


async def _failed(request: Request, error: Exception) -> Response:
    if not isinstance(error, BatonError):
        return await _bug(request, error)
    if type(error) is CapacityError and not header_of(request, TARGET_HEADER):
        request.app.state.metrics.shedding.refused(error.retry_after)
    return response_of(error)


def _forget_frames(error: BaseException | None) -> None:
    """Free what an answered error refers to: all frames that it has passed, and their variables.

    Some of these refer to the error, so only the garbage collector would free them. Under overload
    that is 50 KB for each refused request.
    """
    while error is not None:
        error.__traceback__ = None
        error.__context__, error = None, error.__context__


async def _no_route(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        headers = error.headers or {}
        methods = headers.get("Allow", "other methods")
        said = f"{request.url.path} does not take {request.method}; use {methods}"
        response = response_of(MethodNotAllowed(said))
        response.headers.update(headers)
        return response
    return response_of(RouteNotFound(f"there is no route {request.url.path[:200]}"))


async def _bug(request: Request, error: Exception) -> Response:
    return response_of(_own_error(request, error))


def _own_error(request: Request, error: Exception) -> InternalError:
    """Log and count an exception of our own code; return the error that the client gets."""
    metrics: GatewayMetrics = request.app.state.metrics
    request_id = header_of(request, b"x-request-id")
    return InternalError(metrics.own_error(error, request.url.path, request_id))
