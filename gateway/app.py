"""The ASGI application: routes, API keys, request ids, errors in OpenAI's shape."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..proto.errors import BatonError, InternalError
from ..runtime.process.log import get_logger
from . import routes, text_routes
from .errors import KeyInvalid, MethodNotAllowed, RouteNotFound, content_of, headers_of, status_of
from .served import Served

_log = get_logger()
MAX_REQUEST_ID = 128

ROUTES = [
    Route("/v1/chat/completions", text_routes.chat, methods=["POST"]),
    Route("/v1/completions", text_routes.completions, methods=["POST"]),
    Route("/v1/embeddings", routes.embeddings, methods=["POST"]),
    Route("/v1/models", routes.models, methods=["GET"]),
    Route("/v1/models/{name:path}", routes.model, methods=["GET"]),
    Route("/v1/audio/speech", routes.not_served, methods=["POST"]),
    Route("/v1/images/generations", routes.not_served, methods=["POST"]),
    Route("/tokenize", routes.tokenize, methods=["POST"]),
    Route("/detokenize", routes.detokenize, methods=["POST"]),
    Route("/health", routes.ready, methods=["GET"]),
    Route("/ready", routes.ready, methods=["GET"]),
    Route("/live", routes.live, methods=["GET"]),
    Route("/version", routes.build, methods=["GET"]),
]


def make_app(served: Served, key_digests: Iterable[bytes] = ()) -> ASGIApp:
    """Return the application. ``key_digests``: of the API keys; none: no key is asked for."""
    app = Starlette(
        routes=ROUTES,
        exception_handlers={BatonError: _failed, HTTPException: _no_route, Exception: _bug},
    )
    app.state.served = served
    return Door(app, tuple(key_digests))


def digest_of(key: str) -> bytes:
    """Return the digest of an API key; keys themselves are not kept."""
    return hashlib.sha256(key.encode()).digest()


class Door:
    """Asks for the API key before any route, and gives every response its request id."""

    def __init__(self, app: ASGIApp, key_digests: tuple[bytes, ...]) -> None:
        self._app = app
        self._digests = key_digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = _request_id(headers)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
            await send(message)

        if self._digests and not self._knows(headers.get(b"authorization", b"")):
            refused = response_of(KeyInvalid("the API key is missing or unknown"))
            await refused(scope, receive, send_named)
            return
        await self._app(scope, receive, send_named)

    def _knows(self, authorization: bytes) -> bool:
        kind, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return kind.lower() == b"bearer" and any(matches)


def _request_id(headers: dict[bytes, bytes]) -> bytes:
    """The client's id as far as it is printable, else a random one."""
    own = headers.get(b"x-request-id", b"")[:MAX_REQUEST_ID]
    return own if own and own.isascii() and own.decode().isprintable() else _random_id()


def _random_id() -> bytes:
    return secrets.token_hex(16).encode()


def response_of(error: BatonError) -> Response:
    """Return the response of an error."""
    return Response(
        content_of(error), status_of(error), headers_of(error), media_type="application/json"
    )


async def _failed(request: Request, error: Exception) -> Response:
    if not isinstance(error, BatonError):
        return await _bug(request, error)
    return response_of(error)


async def _no_route(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        response = response_of(MethodNotAllowed(f"{request.url.path} has no {request.method}"))
        response.headers.update(error.headers or {})
        return response
    return response_of(RouteNotFound(f"there is no route {request.url.path[:200]}"))


async def _bug(request: Request, error: Exception) -> Response:
    _log.error("http.failed", path=request.url.path, error=repr(error))
    return response_of(InternalError("an internal error; the gateway's log has its cause"))
