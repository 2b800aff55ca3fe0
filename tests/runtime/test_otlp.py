"""The exporter's thread: bounded, never blocking, counting lost spans. No packages needed."""

from __future__ import annotations

import threading

import pytest

from baton.proto.errors import ConfigError
from baton.runtime.process import otlp
from baton.runtime.process.otlp import BATCH_SPANS, Span, SpanExporter, check_installed, traces_url


def span(name: str = "x") -> Span:
    return Span(name, "baton-router", "router", 1, 2, 0, 0, 1)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(otlp, "INTERVAL_S", 0.001)


def test_spans_arrive_in_batches_and_are_counted():
    sent: list[list[Span]] = []
    exporter = SpanExporter(
        lambda count: [span() for _ in range(count)], lambda b: not sent.append(list(b))
    )
    exporter.start()
    for _ in range(3):
        exporter.put(BATCH_SPANS)
    exporter.close()
    assert sum(map(len, sent)) == exporter.sent == 3 * BATCH_SPANS
    assert max(map(len, sent)) <= 2 * BATCH_SPANS
    assert exporter.dropped == 0


def test_a_collector_that_blocks_does_not_block_the_caller(monkeypatch):
    monkeypatch.setattr(otlp, "MAX_WAITING", 5)
    blocked, leave = threading.Event(), threading.Event()

    def send(batch):
        blocked.set()
        return leave.wait(60)

    exporter = SpanExporter(lambda one: [one], send)
    exporter.start()
    exporter.put(span())
    assert blocked.wait(60)
    for _ in range(9):
        exporter.put(span())
    assert exporter.dropped == 4
    exporter.close(timeout=0.0)  # returns although the thread is blocked
    leave.set()
    exporter._thread.join(60)
    assert exporter.sent == 6


def test_failures_and_bugs_are_counted_and_the_thread_goes_on():
    answers = iter([False, True])

    def send(batch):
        if len(batch) == 1:
            raise OSError("no collector")
        return next(answers)

    exporter = SpanExporter(lambda count: [span() for _ in range(10 // count)], send)
    exporter.start()
    exporter.put(10)  # one span: raises
    exporter.put(0)  # the conversion raises
    while exporter._waiting:
        pass
    exporter.close()
    assert exporter.sent + exporter.dropped == 2
    assert exporter.sent == 0


def test_a_failing_collector_is_logged_once_until_it_takes_spans_again(capfd):
    answers = iter([False, False, True, False])
    exporter = SpanExporter(lambda one: [one] * BATCH_SPANS, lambda _: next(answers))
    for _ in range(4):
        exporter.put(span())
    exporter.start()
    exporter.close(60)
    assert exporter.sent == BATCH_SPANS
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("spans.not_sent" in line and str(BATCH_SPANS) in line for line in lines)


def test_urls():
    for endpoint in ("http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"):
        assert traces_url(endpoint) == "http://c:4318/v1/traces"


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setattr(otlp, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"otlp_endpoint needs .*baton-serve\[otel\]"):
        check_installed("otlp_endpoint")
