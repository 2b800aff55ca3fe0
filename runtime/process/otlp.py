"""Spans to an OpenTelemetry collector, over OTLP and HTTP, from a background thread.

The packages of the extra ``otel`` are imported when the first :class:`SpanExporter` is made.

Invariants: :meth:`SpanExporter.put` never blocks; at most :data:`MAX_WAITING` items wait, and
items above that are dropped and counted; spans that the collector does not take are counted too.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from baton.proto.errors import ConfigError

from .log import get_logger

T = TypeVar("T")
MAX_WAITING = 4096
"""Items that wait for the thread; about 12 spans each."""
BATCH_SPANS = 128
"""Spans of one HTTP request; small, since encoding them holds the interpreter's lock."""
INTERVAL_S = 1.0
"""Seconds between two looks at the queue. The reports of late handoffs arrive in that time."""
SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 3.0
TRACES_PATH = "/v1/traces"
EXTRA = "otel"
SPAN_SCOPE = "baton"

AttributeValue = str | int | float | bool | list[str]


@dataclass(slots=True)
class Span:
    """One span. Times are Unix nanoseconds; ``parent_id`` 0: the trace begins with it.

    ``service``, ``instance``: kind and id of the process that spent the time, such as
    ``baton-prefill`` and ``prefill-0``. ``is_server``: it answers a request from outside.
    ``error``: why it failed, or empty.
    """

    name: str
    service: str
    instance: str
    trace_id: int
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    is_server: bool = False
    error: str = ""


Send = Callable[[Sequence[Span]], bool]
"""Sends spans; returns whether the collector took them. May block."""


class SpanExporter(Generic[T]):
    """Converts items to spans and sends them. ``convert`` and ``send`` run in the thread."""

    def __init__(self, convert: Callable[[T], Iterable[Span]], send: Send) -> None:
        self._convert = convert
        self._send = send
        self._waiting: deque[T] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._failing = False
        self.sent = 0
        self.dropped = 0
        """Items that had no room in the queue, and spans that the collector did not take."""
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: T) -> None:
        """Queue an item, or drop and count it if the queue is full."""
        if len(self._waiting) < MAX_WAITING and not self._closing:
            self._waiting.append(item)
        else:
            self.dropped += 1

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Send what waits, for at most ``timeout`` seconds; the process may end after that."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            closing = self._closing
            self._flush()
            if closing:
                return
            self._wake.wait(INTERVAL_S)

    def _flush(self) -> None:
        """Send everything that waits, batch by batch."""
        batch: list[Span] = []
        for _ in range(len(self._waiting)):
            item = self._waiting.popleft()
            try:
                batch += self._convert(item)
            except Exception:  # a bug in the conversion must not end the thread
                self.dropped += 1
                get_logger().exception("spans.failed")
            if len(batch) >= BATCH_SPANS:
                self._deliver(batch)
                batch = []
        if batch:
            self._deliver(batch)

    def _deliver(self, batch: list[Span]) -> None:
        try:
            taken, problem = self._send(batch), ""
        except Exception as error:
            taken, problem = False, repr(error)
        if taken:
            self.sent += len(batch)
        else:
            self.dropped += len(batch)
            if not self._failing:
                get_logger().warning("spans.not_sent", spans=len(batch), error=problem)
        self._failing = not taken


def is_installed() -> bool:
    """Whether the packages of the extra are installed."""
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def check_installed(setting: str) -> None:
    """Raise ConfigError, with the name of the ``setting``, if the extra is not installed."""
    if not is_installed():
        raise ConfigError(f"{setting} needs OpenTelemetry: pip install 'baton-serve[{EXTRA}]'")


def traces_url(endpoint: str) -> str:
    """Return the URL for spans of a collector; ``endpoint``: with or without its path."""
    base = endpoint.rstrip("/")
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


class OtlpSender:
    """Sends spans with OpenTelemetry's exporter. Raises ConfigError without the extra."""

    def __init__(self, endpoint: str) -> None:
        check_installed("otlp_endpoint")
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # failures are logged here
        self._trace = importlib.import_module("opentelemetry.trace")
        self._sdk = importlib.import_module("opentelemetry.sdk.trace")
        self._resource = importlib.import_module("opentelemetry.sdk.resources").Resource
        scope = importlib.import_module("opentelemetry.sdk.util.instrumentation")
        self._scope = scope.InstrumentationScope(SPAN_SCOPE)
        http = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        result = importlib.import_module("opentelemetry.sdk.trace.export").SpanExportResult
        self._taken = result.SUCCESS
        self._exporter = http.OTLPSpanExporter(
            endpoint=traces_url(endpoint), timeout=int(SEND_TIMEOUT_S)
        )
        self._resources: dict[tuple[str, str], Any] = {}

    def __call__(self, spans: Sequence[Span]) -> bool:
        """Send the spans; return whether the collector took them."""
        return bool(self._exporter.export([self._made(span) for span in spans]) == self._taken)

    def _made(self, span: Span) -> Any:
        trace = self._trace
        kind = trace.SpanKind.SERVER if span.is_server else trace.SpanKind.INTERNAL
        status = trace.Status(trace.StatusCode.ERROR, span.error) if span.error else trace.Status()
        parent = self._context(span.trace_id, span.parent_id) if span.parent_id else None
        return self._sdk.ReadableSpan(
            name=span.name,
            context=self._context(span.trace_id, span.span_id),
            parent=parent,
            resource=self._resource_of(span),
            attributes=span.attributes,
            kind=kind,
            status=status,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    def _context(self, trace_id: int, span_id: int) -> Any:
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        return self._trace.SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)

    def _resource_of(self, span: Span) -> Any:
        key = (span.service, span.instance)
        known = self._resources.get(key)
        if known is None:
            if len(self._resources) > MAX_WAITING:  # names of workers come and go
                self._resources.clear()
            known = self._resources[key] = self._resource(
                {"service.name": span.service, "service.instance.id": span.instance}
            )
        return known
