"""Requests as real clients sent them, byte for byte, answered as when they were recorded.

``make test-clients RECORD=1`` records them (``test_clients.py``).
"""

import http.client
import json
import re
import socket
from pathlib import Path

import pytest

from ..clients.conformance import ignored_in, rows_of
from ..clients.recorder import body_of, read_recording

pytestmark = pytest.mark.cluster

RECORDINGS = sorted((Path(__file__).resolve().parents[1] / "data" / "http").glob("*.http"))


@pytest.fixture(scope="module")
def pools(lasting_cluster):
    return lasting_cluster(prefill=1, decode=2)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_requests_get_their_answers(gateway, path):
    records = list(read_recording(path))
    assert records
    for status, request in records:
        line = request.partition(b"\r\n")[0]
        found, kind, body = exchange(gateway.port, request)
        assert found == status, (line, body)
        if found == 200 and line.startswith(b"POST"):
            check_warnings(line, request, body.decode())
        if "event-stream" in kind:
            check_stream(line, body)
        elif found == 200 and b"/v1/" in line:
            assert json.loads(body)["object"], line
        elif found != 200:
            assert json.loads(body)["error"]["message"], line


def check_stream(line: bytes, body: bytes) -> None:
    events = body.decode().strip().split("\n\n")
    contents = [event.rpartition("data: ")[2] for event in events]
    if contents[-1] == "[DONE]":
        contents.pop()
    assert all("error" not in json.loads(data) for data in contents), line
    assert len(contents) > 1, line


def check_warnings(line: bytes, request: bytes, body: str) -> None:
    """The answer names the fields that docs/http.md lists as ignored, and no other."""
    route = line.split(b" ")[1].decode()
    if rows_of(route) is None:
        return
    first = body if body.startswith("{") else body.partition("data: ")[2].partition("\n")[0]
    answer = json.loads(first)
    warnings = answer.get("warnings") or answer.get("response", {}).get("warnings") or []
    named = {one.partition(" is ignored")[0] for one in warnings}
    own = {name for name in named if not re.search(r"[.\[ ]", name)}
    assert own == ignored_in(route, body_of(request)), (line, warnings)


def exchange(port: int, request: bytes) -> tuple[int, str, bytes]:
    """Send a request's bytes; returns status, content type and body."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        response = http.client.HTTPResponse(connection, method=request.split(b" ")[0].decode())
        response.begin()
        body = response.read()
        return response.status, response.headers.get("content-type", ""), body
