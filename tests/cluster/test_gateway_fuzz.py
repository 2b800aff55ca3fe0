"""Mutated bodies: typed errors only, no 5xx, and the gateway's memory stays bounded.

``FUZZED_BODIES=N`` sets the number of bodies of the long form.
"""

import http.client
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.gateway.openapi import BODIES

from ..clients.mutations import mutated
from ..clients.recorder import read_recording
from .http import resident_bytes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

RECORDINGS = Path(__file__).resolve().parents[1] / "data" / "http"
LONG = int(os.environ.get("FUZZED_BODIES", "100000"))
CONNECTIONS = 4
MORE = [
    ("/v1/embeddings", b'{"input": ["text", "more"], "encoding_format": "base64"}'),
    ("/tokenize", b'{"prompt": "text", "return_token_strs": true, "add_special_tokens": false}'),
    ("/tokenize", b'{"messages": [{"role": "user", "content": "text"}]}'),
    ("/detokenize", b'{"tokens": [1, 2, 3]}'),
]


@pytest.fixture(scope="module")
def pools(shared_cluster):
    """A context so short that no answer is long."""
    return shared_cluster(prefill=1, decode=1, max_model_len=96)


def bodies() -> list[tuple[str, bytes]]:
    """Paths and bodies of recorded requests, and of routes that no recording has."""
    found = list(MORE)
    for path in sorted(RECORDINGS.glob("*.http")):
        for status, request in read_recording(path):
            line, _, rest = request.partition(b" HTTP/1.1\r\n")
            if status == 200 and line.startswith(b"POST ") and line[5:].decode() in BODIES:
                found.append((line[5:].decode(), rest.partition(b"\r\n\r\n")[2]))
    return found


def ask_mutated(port: int, seed: int, count: int) -> dict[int, int]:
    """Send ``count`` mutated bodies over one connection; returns the answers by status."""
    draw, templates = random.Random(seed), bodies()
    names = {path: list(kind.__struct_fields__) for path, kind in BODIES.items()}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    statuses: dict[int, int] = {}
    for _ in range(count):
        path, body = draw.choice(templates)
        sent = mutated(body, names[path], draw)
        connection.request("POST", path, sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        statuses[response.status] = statuses.get(response.status, 0) + 1
        assert response.status == 200 or 400 <= response.status < 500, (path, sent, content)
        if response.status != 200:
            assert json.loads(content)["error"]["code"], (path, sent, content)
        elif b"text/event-stream" in response.headers["content-type"].encode():
            assert b'"code":"internal"' not in content, (path, sent, content)
    connection.close()
    return statuses


@pytest.mark.parametrize(
    "count", [200, pytest.param(LONG, marks=pytest.mark.long, id="FUZZED_BODIES")]
)
def test_mutated_bodies_get_typed_errors(gateway, pools, count):
    ask_mutated(gateway.port, 0, 50)
    before = resident_bytes(gateway)
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        work = [
            threads.submit(ask_mutated, gateway.port, seed, count // CONNECTIONS)
            for seed in range(1, CONNECTIONS + 1)
        ]
        found = [one.result() for one in work]
    total = {status: sum(one.get(status, 0) for one in found) for status in (200, 400)}
    assert min(total.values()) > count // 50, total
    assert resident_bytes(gateway) - before < 64 << 20
    assert gateway.ask("GET", "/ready")[0] == 200
    pools.wait_idle()
    assert '"level": "error"' not in gateway.text()
    print(total, (resident_bytes(gateway) - before) >> 10, "KiB more")
