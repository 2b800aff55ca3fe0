"""Spans of a real cluster and gateway at an OTLP receiver that decodes with opentelemetry-proto.

The tests install the packages of the extra ``otel`` into a temporary folder.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from baton.proto.sampling import SamplingParams

from .conftest import wait_until
from .http import Gateway

pytestmark = [pytest.mark.cluster, pytest.mark.long]
PARENT = f"00-{'4b' * 16}-{'5c' * 8}-01"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


class Receiver:
    """An OTLP receiver: decodes what arrives at ``/v1/traces``."""

    def __init__(self) -> None:
        service = importlib.import_module(
            "opentelemetry.proto.collector.trace.v1.trace_service_pb2"
        )
        spans: dict[str, dict[str, Any]] = {}
        self.spans = spans
        """By span id: the fields of each span, with its resource's service and instance."""

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = importlib.import_module("gzip").decompress(body)
                message = service.ExportTraceServiceRequest.FromString(body)
                assert self.path == "/v1/traces"
                for part in message.resource_spans:
                    resource = values(part.resource.attributes)
                    for scope in part.scope_spans:
                        for span in scope.spans:
                            spans[span.span_id.hex()] = {
                                "name": span.name,
                                "trace": span.trace_id.hex(),
                                "id": span.span_id.hex(),
                                "parent": span.parent_span_id.hex(),
                                "start": span.start_time_unix_nano,
                                "end": span.end_time_unix_nano,
                                "attributes": values(span.attributes),
                                "status": span.status.code,
                                "service": resource["service.name"],
                                "instance": resource["service.instance.id"],
                            }
                self.send_response(200)
                self.end_headers()
                self.wfile.write(service.ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def of_trace(self, trace: str) -> list[dict[str, Any]]:
        """Spans of one trace, earliest first."""
        found = [one for one in list(self.spans.values()) if one["trace"] == trace]
        return sorted(found, key=lambda one: one["start"])

    def end(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    found = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        if kind == "array_value":
            value = [item.string_value for item in value.values]
        found[pair.key] = value
    return found


@pytest.fixture(scope="module")
def extra(tmp_path_factory) -> Iterator[None]:
    """The packages of the extra, for this process and for its children."""
    folder = tmp_path_factory.mktemp("otel")
    wanted = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["otel"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *wanted]
    subprocess.run(command, check=True, timeout=240)
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def receiver(extra) -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.end()


@pytest.fixture(scope="module")
def pools(receiver, shared_cluster):
    return shared_cluster(prefill=1, decode=2, otlp_endpoint=receiver.url)


def check_links(spans: list[dict[str, Any]], parent: str) -> None:
    """Parent ids link, and each span lies in its parent's time."""
    known = {one["id"]: one for one in spans}
    roots = [one for one in spans if one["parent"] not in known]
    assert [one["parent"] for one in roots] == [parent]
    for one in spans:
        around = known.get(one["parent"])
        if around is not None:
            # The gateway and the router read the same clock, but at different moments.
            slack = 5_000_000 if around["service"] == "baton-gateway" else 0
            assert around["start"] - slack <= one["start"] <= one["end"] <= around["end"] + slack


def test_a_traced_http_request_has_spans_of_every_process(pools, receiver, tmp_path):
    gateway = Gateway(pools, tmp_path, f"--otlp-endpoint={receiver.url}").wait_ready()
    body = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8}
    body["ignore_eos"] = True
    status, _, _ = gateway.ask("POST", "/v1/chat/completions", body, {"traceparent": PARENT})
    assert status == 200

    def spans() -> list[dict[str, Any]]:
        return receiver.of_trace("4b" * 16)

    wait_until(lambda: {"transfer", "decode"} <= {one["name"] for one in spans()}, what="spans")
    assert gateway.end() == 0, gateway.text()  # sends what waits
    wait_until(lambda: any(one["service"] == "baton-gateway" for one in spans()), what="its span")
    found = spans()
    check_links(found, "5c" * 8)
    services = {one["service"] for one in found}
    assert services == {"baton-gateway", "baton-router", "baton-prefill", "baton-decode"}
    first = next(one for one in found if one["service"] == "baton-gateway")
    assert first["attributes"]["http.response.status_code"] == 200
    assert first["attributes"]["gen_ai.operation.name"] == "chat"
    request = next(one for one in found if one["name"] == "request")
    assert request["parent"] == first["id"]
    assert request["attributes"]["gen_ai.usage.output_tokens"] == 8
    assert request["attributes"]["gen_ai.response.finish_reasons"] == ["length"]
    transfer = next(one for one in found if one["name"] == "transfer")
    assert transfer["attributes"]["baton.bytes_sent"] > 0


def test_a_replayed_request_has_worker_spans_of_both_attempts(pools, receiver):
    trace = f"00-{'6d' * 16}-{'7e' * 8}-01"
    with pools.client() as client:
        params = SamplingParams(max_new_tokens=1500, ignore_eos=True)
        stream = client.generate("Once upon", params, traceparent=trace, request_id="replayed-1")
        next(stream)

        def served() -> str:
            (story,) = client.status(request="replayed-1")["requests"]
            return story["attempts"][-1]["handoff"] and story["attempts"][-1]["decode"]

        victim = wait_until(served, what="the handoff")
        os.kill(pools.workers()[victim]["pid"], signal.SIGKILL)
        tokens = [token for output in stream for token in output.tokens]
        assert len(tokens) > 1000

    def spans() -> list[dict[str, Any]]:
        return receiver.of_trace("6d" * 16)

    wait_until(lambda: [one for one in spans() if one["name"] == "attempt 2"], what="spans")
    found = spans()
    check_links(found, "7e" * 8)
    assert [one["service"] for one in found if one["name"] == "prefill"] == ["baton-prefill"] * 2
    decodes = [one for one in found if one["name"] == "decode"]
    assert decodes[0]["instance"] == victim
    assert len(decodes) == 2
    assert [one["status"] for one in decodes] == [2, 0]  # ERROR, UNSET
