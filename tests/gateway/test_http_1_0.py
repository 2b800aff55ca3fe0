"""Answers to HTTP/1.0, which has no chunks: the end of the connection ends a stream."""

from __future__ import annotations

import asyncio

import pytest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from tests.gateway.test_crowds import serving

from baton.gateway.app import Door
from baton.gateway.exchange import Exchange
from baton.gateway.metrics import GatewayMetrics
from baton.runtime.keys.api_keys import ApiKeys


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/asgi":
        await StreamingResponse(iter([b"one,", b"two,", b"", b"three"]))(scope, receive, send)
    elif scope["path"] == "/whole":
        await Response(b"one,two,three")(scope, receive, send)
    elif scope["path"] == "/json":
        Exchange.of(scope).respond(b"one,two,three")
    else:
        exchange = Exchange.of(scope)
        exchange.event(b"one,")
        exchange.next_event(b"t", b"wo", b",")
        exchange.last_event(b"three")


async def answer(request: bytes) -> tuple[bytes, bytes]:
    door = Door(app, ApiKeys(()), GatewayMetrics())
    async with serving(door) as (connect, _):
        reader, writer = await connect()
        writer.write(request)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return head.lower(), body


@pytest.mark.parametrize("path", ["/events", "/asgi", "/whole", "/json"])
@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n"])
def test_no_answer_to_http_1_0_has_chunks(path, more):
    request = b"GET %b HTTP/1.0\r\n%b\r\n" % (path.encode(), more)
    head, body = asyncio.run(asyncio.wait_for(answer(request), 60))
    assert b" 200 ok" in head
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"one,two,three"


def test_a_head_request_of_http_1_0_gets_no_body():
    head, body = asyncio.run(asyncio.wait_for(answer(b"HEAD /asgi HTTP/1.0\r\n\r\n"), 60))
    assert (b" 200 ok" in head, body) == (True, b"")
