"""The gateway's span of an HTTP request: parent, attributes, and the traceparent handed on."""

from __future__ import annotations

import asyncio

import pytest

from baton.gateway.app import Door
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.tracing import Tracing
from baton.proto.trace_context import parse_traceparent
from baton.runtime.keys.api_keys import ApiKeys

TRACE, SPAN = "4b" * 16, "5c" * 8
CHAT = "/v1/chat/completions"


class Kept:
    """An exporter that keeps its items."""

    def __init__(self) -> None:
        self.spans = []

    def put(self, span) -> None:
        self.spans.append(span)


@pytest.fixture
def exporter():
    return Kept()


def serve(exporter, status=200, path=CHAT, headers=(), *, fails=False) -> str:
    """Let the gateway's door pass one request; return the traceparent that the route saw."""
    seen = []

    async def app(scope, _receive, send) -> None:
        seen.append(dict(scope["headers"]).get(b"traceparent", b"").decode())
        if fails:
            raise ConnectionResetError
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def send(_message) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    door = Door(app, ApiKeys(()), GatewayMetrics(), Tracing(exporter, "gateway-1"))
    asyncio.run(door(scope, None, send))
    return seen[0]


def test_a_request_is_a_child_of_the_callers_span_and_parent_of_the_native_ones(exporter):
    given = f"00-{TRACE}-{SPAN}-01".encode()
    seen = serve(exporter, headers=[(b"traceparent", given), (b"x-request-id", b"mine")])
    (span,) = exporter.spans
    assert f"{span.trace_id:032x}" == TRACE
    assert f"{span.parent_id:016x}" == SPAN
    assert seen == f"00-{TRACE}-{span.span_id:016x}-01"
    assert (span.name, span.service, span.instance) == (
        f"POST {CHAT}",
        "baton-gateway",
        "gateway-1",
    )
    assert span.is_server
    assert 0 < span.start_ns <= span.end_ns
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "baton",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": CHAT,
        "baton.request_id": "mine",
    }
    assert not span.error


def test_without_a_trace_the_gateway_begins_one(exporter):
    for headers in ((), [(b"traceparent", b"nonsense")]):
        seen = parse_traceparent(serve(exporter, headers=headers))
        span = exporter.spans[-1]
        assert (seen.trace_id, seen.span_id) == (span.trace_id, span.span_id)
        assert span.parent_id == 0
    assert exporter.spans[0].trace_id != exporter.spans[1].trace_id


def test_other_routes_and_traces_that_are_not_sampled_have_no_span(exporter):
    given = f"00-{TRACE}-{SPAN}-00"
    assert serve(exporter, headers=[(b"traceparent", given.encode())]) == given
    assert serve(exporter, path="/v1/models") == ""
    assert exporter.spans == []


def test_failures_are_errors(exporter):
    serve(exporter, status=503)
    serve(exporter, status=404)
    with pytest.raises(ConnectionResetError):
        serve(exporter, fails=True)
    assert [span.error for span in exporter.spans] == [
        "status 503", "", "the client has closed its connection",
    ]  # fmt: skip
