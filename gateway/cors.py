"""Cross-origin resource sharing: which web pages of other sites may read answers.

Starlette's middleware decides. Routes that write by an :class:`~.exchange.Exchange` send no message
that it could change, so its headers are added to every answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .served_by import HEADERS

Lines = list[tuple[bytes, bytes]]


class Cors:
    """The rules for pages of ``origins``; ``*`` allows all."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._rules = CORSMiddleware(
            _no_app,
            allow_origins=tuple(origins),
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After", *HEADERS),
            allow_private_network=True,  # asked for by a browser whose page comes from the internet
        )

    def preflight(self, scope: Scope) -> Response | None:
        """Return the answer if a browser asks whether a page may send a request, else None."""
        headers = Headers(scope=scope)
        return (
            self._rules.preflight_response(request_headers=headers)
            if _asks(headers, scope)
            else None
        )

    async def headers(self, scope: Scope) -> Lines:
        """Return the headers that an answer has besides its own.

        A preflight's own are complete: browsers refuse an answer that names its origin twice.
        """
        headers = Headers(scope=scope)
        if _asks(headers, scope):
            return []
        found: Lines = []

        async def take(message: Message) -> None:
            found.extend(message["headers"])

        start: dict[str, Any] = {"type": "http.response.start", "headers": []}
        await self._rules.send(start, take, request_headers=headers)
        return found


def _asks(headers: Headers, scope: Scope) -> bool:
    """True for a preflight."""
    asks = "origin" in headers and "access-control-request-method" in headers
    return scope["method"] == "OPTIONS" and asks


async def _no_app(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """The middleware passes no request on."""
