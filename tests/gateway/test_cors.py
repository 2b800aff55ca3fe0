"""Web pages of other sites: preflights without a key, and answers that they may read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from tests.gateway.test_crowds import serving

from baton.gateway.app import Door, make_app
from baton.gateway.config import GatewayConfig
from baton.gateway.cors import Cors
from baton.gateway.exchange import Exchange
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.served import Served
from baton.proto.errors import ConfigError
from baton.runtime.keys.allowed_names import AllowedNames
from baton.runtime.keys.api_keys import ApiKeys, digest_of

PAGE = "https://chat.example"
DIGESTS = [digest_of("key")]


def ask(app: Any, method: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    """The status and headers of one answer. ``headers``: with ``_`` for ``-``."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": b"/",
        "query_string": b"", "scheme": "http", "server": None, "client": None, "root_path": "",
        "headers": [(n.replace("_", "-").encode(), v.encode()) for n, v in headers.items()],
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    pairs = [(name.decode().lower(), value.decode()) for name, value in sent[0]["headers"]]
    found = dict(pairs)
    assert len(found) == len(pairs), pairs  # browsers refuse an origin that is named twice
    return sent[0]["status"], found


def preflight(app: Any, origin: str, **headers: str) -> tuple[int, dict[str, str]]:
    return ask(
        app, "OPTIONS", "/v1/chat/completions", **headers, origin=origin,
        access_control_request_method="POST",
        access_control_request_headers="authorization,content-type",
    )  # fmt: skip


@pytest.mark.parametrize("digests", [DIGESTS, []])
def test_a_preflight_needs_no_key(digests):
    app = make_app(Served(None), digests, allowed_origins=[PAGE])  # type: ignore[arg-type]
    status, found = preflight(app, PAGE)
    assert (status, found["access-control-allow-origin"]) == (200, PAGE)
    assert "POST" in found["access-control-allow-methods"]
    assert "authorization" in found["access-control-allow-headers"]
    status, found = preflight(app, PAGE, access_control_request_private_network="true")
    assert (status, found["access-control-allow-private-network"]) == (200, "true")
    status, found = preflight(app, "https://evil.example")
    assert (status, "access-control-allow-origin" in found) == (400 if digests else 403, False)


def test_answers_and_errors_name_an_allowed_origin_alone():
    app = make_app(Served(None), DIGESTS, allowed_origins=[PAGE])  # type: ignore[arg-type]
    for key, wanted in (("key", 200), ("wrong", 401)):
        for origin in (PAGE, "https://evil.example"):
            status, found = ask(
                app, "GET", "/version", origin=origin, authorization=f"Bearer {key}"
            )
            allowed = found.get("access-control-allow-origin")
            assert (status, allowed) == (wanted, PAGE if origin == PAGE else None)
            assert "Origin" in found["vary"]
    assert (
        "x-request-id"
        in ask(app, "GET", "/live", origin=PAGE)[1]["access-control-expose-headers"].lower()
    )


def test_by_default_no_origin_is_allowed():
    app = make_app(Served(None), DIGESTS)  # type: ignore[arg-type]
    assert preflight(app, PAGE)[0] == 401
    _, found = ask(app, "GET", "/version", origin=PAGE, authorization="Bearer key")
    assert not any(name.startswith("access-control") for name in found)


def test_an_allowed_origin_and_host_need_no_key():
    app = make_app(
        Served(None),  # type: ignore[arg-type]
        allowed_hosts=["host.docker.internal", "fd00::1"],
        allowed_origins=[PAGE],
    )
    assert ask(app, "GET", "/version", origin=PAGE, host="localhost:8000")[0] == 200
    for host in ("host.docker.internal:8000", "HOST.docker.internal", "[fd00::1]:8000"):
        assert ask(app, "GET", "/version", host=host)[0] == 200
        assert ask(app, "GET", "/version", host=host, origin=f"http://{host}")[0] == 200
    for headers in (
        {"host": "host.docker.internal.evil.example"},
        {"host": "hostxdocker.internal"},
        {"host": "localhost", "origin": f"{PAGE}.evil.example"},
        {"host": "localhost", "origin": f"{PAGE}:81"},
    ):
        assert ask(app, "GET", "/version", **headers)[0] == 403, headers


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("by_asgi", [False, True])
def test_answers_of_every_way_have_the_headers(streams, by_asgi):
    """Routes with much traffic write past ASGI's messages."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if by_asgi:
            await StreamingResponse(iter([b"x"]))(scope, receive, send)
        elif streams:
            Exchange.of(scope).last_event(b"data: x\n\n")
        else:
            Exchange.of(scope).respond(b"{}")

    door = Door(app, ApiKeys(()), GatewayMetrics(), None, AllowedNames((), [PAGE]), Cors([PAGE]))

    async def run() -> None:
        async with serving(door) as (connect, _):
            reader, writer = await connect()
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\norigin: %b\r\n\r\n" % PAGE.encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"access-control-allow-origin: " + PAGE.encode() in head.lower()
            assert b"x-request-id: " in head

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_hosts", "x:80"), ("allowed_hosts", "http://x"), ("allowed_hosts", "*"),
        ("allowed_origins", "chat.example"), ("allowed_origins", "https://chat.example/path"),
        ("allowed_origins", "*"), ("allowed_origins", "null"),
    ],
)  # fmt: skip
def test_wrong_names_are_refused(field, value):
    with pytest.raises(ConfigError, match=field.replace("_", "[ -]")):
        GatewayConfig(routers=("ipc:///x",), **{field: (value,)})


def test_all_origins_are_allowed_with_a_key():
    GatewayConfig(routers=("ipc:///x",), api_keys=tuple(DIGESTS), allowed_origins=("*",))
    app = make_app(Served(None), DIGESTS, allowed_origins=["*"])  # type: ignore[arg-type]
    assert preflight(app, PAGE)[1]["access-control-allow-origin"] == "*"
