"""One span per HTTP request, the parent of the spans that the routers make of its native requests.

Pure but for the exporter that the caller passes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import MutableMapping
from typing import Any

from baton.proto.trace_context import TraceContext, parse_traceparent
from baton.runtime.process.otlp import OtlpSender, Span, SpanExporter

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""OpenTelemetry's GenAI operation of each route that makes native requests."""
Scope = MutableMapping[str, Any]


class Tracing:
    """Makes the spans of one gateway. ``instance``: its name."""

    def __init__(self, exporter: SpanExporter[Span], instance: str) -> None:
        self._exporter = exporter
        self._instance = instance

    def begin(self, scope: Scope, headers: dict[bytes, bytes], request_id: str) -> Span | None:
        """Return the span of a request, and name it as parent in the request's ``traceparent``.

        None for a route without native requests, and if the client's trace is not sampled.
        """
        path = scope["path"]
        operation = _OPERATIONS.get(path)
        if operation is None:
            return None
        given = parse_traceparent(headers.get(b"traceparent", b"").decode("latin-1"))
        if given is not None and not given.sampled:
            return None
        own = TraceContext(
            given.trace_id if given else secrets.randbits(128) or 1, secrets.randbits(64) or 1
        )
        others = (pair for pair in scope["headers"] if pair[0] != b"traceparent")
        scope["headers"] = [*others, (b"traceparent", own.traceparent.encode())]
        span = Span(
            name=f"{scope['method']} {path}",
            service="baton-gateway",
            instance=self._instance,
            trace_id=own.trace_id,
            span_id=own.span_id,
            parent_id=given.span_id if given else 0,
            start_ns=time.time_ns(),
            end_ns=0,
            is_server=True,
        )
        span.attributes |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "baton",
            "http.request.method": scope["method"],
            "url.path": path,
            "baton.request_id": request_id,
        }
        return span

    def end(self, span: Span, status: int) -> None:
        """Export the span of a request that was answered with ``status``; 0: not at all."""
        span.end_ns = time.time_ns()
        if status:
            span.attributes["http.response.status_code"] = status
        if status >= 500 or not status:
            span.error = f"status {status}" if status else "the client has closed its connection"
        self._exporter.put(span)

    def close(self) -> None:
        """Send the spans that wait, for a limited time."""
        self._exporter.close()


def make_tracing(endpoint: str, instance: str) -> Tracing | None:
    """Start to export spans to a collector; None without an endpoint. Raises ConfigError."""
    if not endpoint:
        return None
    exporter: SpanExporter[Span] = SpanExporter(lambda span: (span,), OtlpSender(endpoint))
    exporter.start()
    return Tracing(exporter, instance)
