"""Which requests a gateway refuses without asking the router."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from tests.gateway.test_connections import Peer
from uvicorn.server import ServerState

from baton.gateway.app import make_app
from baton.gateway.http import LimitedHttp
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.served import Served
from baton.gateway.server import server_config
from baton.gateway.shedding import FLOOR, Shedding


def run(
    shedding: Shedding, rate: float, capacity: float, begin: float, seconds: float, delay: float
) -> tuple[float, float]:
    """Return the rates passed on and accepted in the last half of the time.

    The router accepts ``capacity`` requests per second and refuses others ``delay`` seconds later.
    """
    draw, answers = random.Random(7), deque[float]()
    passed = accepted = 0
    room, last, half = 1.0, begin, begin + seconds / 2
    for number in range(int(rate * seconds)):
        now = begin + number / rate
        while answers and answers[0] <= now:
            answers.popleft()
            shedding.refused(0.5)
        room, last = min(8.0, room + (now - last) * capacity), now
        if not shedding.admits(now, draw.random()):
            continue
        passed += now >= half
        if room >= 1.0:
            room -= 1.0
            accepted += now >= half
        else:
            answers.append(now + delay)
    return passed / seconds * 2, accepted / seconds * 2


@pytest.mark.parametrize("delay", [0.01, 0.5])
@pytest.mark.parametrize("times", [1.5, 4, 10, 50])
def test_the_router_gets_enough_and_not_much_more(times, delay):
    capacity = 300.0
    passed, accepted = run(Shedding(), capacity * times, capacity, 100.0, 20.0, delay)
    assert accepted >= 0.98 * capacity
    assert passed <= 2.6 * capacity + FLOOR


def test_what_the_router_accepts_is_never_refused_here():
    shedding = Shedding()
    run(shedding, 5000.0, 1e9, 100.0, 5.0, 0.1)
    assert shedding.shed == 0


def test_few_requests_are_always_passed_on():
    shedding = Shedding()
    run(shedding, FLOOR * 0.9, 0.0, 100.0, 20.0, 0.1)
    assert shedding.shed == 0


def test_a_cluster_that_has_room_again_gets_all_requests_soon():
    shedding = Shedding()
    run(shedding, 1000.0, 0.0, 100.0, 20.0, 0.1)
    assert shedding.shed
    passed, _ = run(shedding, 1000.0, 1e9, 120.0, 20.0, 0.1)
    assert passed >= 999
    assert shedding.retry_after == 0.5


class Full(Shedding):
    """Passes no request on."""

    def admits(self, now: float, draw: float) -> bool:
        self.shed += 1
        return False


_HEAD = b"POST /v1/completions HTTP/%b\r\nhost: localhost\r\nx-request-id: a\r\n"
_ASK = _HEAD + b"content-length: 14\r\n\r\n" + b'{"prompt":"x"}'


def shed(version: bytes, origins: tuple[str, ...] = ()) -> tuple[Peer, int, GatewayMetrics]:
    """Send a request to a full gateway; return the answer, the tasks it took, and the metrics."""

    async def run() -> tuple[Peer, int]:
        client: Any = SimpleNamespace()
        app = make_app(Served(client), counts=metrics, allowed_origins=origins)
        config = server_config(app, grace_s=1.0)
        config.load()
        protocol, peer = LimitedHttp(config, ServerState(), {}), Peer()
        protocol.connection_made(peer)
        protocol.data_received(_ASK % version)
        tasks = len(protocol.tasks)
        while not protocol.cycle.response_complete:
            await asyncio.sleep(0)
        if not peer.closed:
            protocol.data_received(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            while not protocol.cycle.response_complete:
                await asyncio.sleep(0)
        protocol.connection_lost(None)
        return peer, tasks

    metrics = GatewayMetrics()
    metrics.shedding = Full()
    return *asyncio.run(run()), metrics


def test_a_refused_request_takes_no_task_and_keeps_its_connection():
    peer, tasks, metrics = shed(b"1.1")
    head, _, rest = peer.out.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert b"\r\nretry-after: 1\r\n" in head
    assert head.endswith(b"\r\nx-request-id: a")
    body, second, _ = rest.partition(b"HTTP/1.1 200 OK")
    assert second
    assert json.loads(body)["error"]["code"] == "overloaded"
    assert b"content-length: %d\r\n" % len(body) in head
    assert (tasks, metrics.running, metrics.shedding.shed) == (0, 0, 1)
    assert metrics.requests == {("/v1/completions", "429"): 1, ("/live", "200"): 1}


def test_a_refused_request_of_http_1_0_ends_its_connection():
    peer, _, _ = shed(b"1.0")
    assert b"\r\nconnection: close\r\n" in peer.out
    assert peer.closed


def test_a_refusal_with_headers_for_web_pages_is_the_same():
    plain, paged = shed(b"1.1")[0].out, shed(b"1.1", ("https://page.example",))[0].out
    assert paged.count(b"429 Too Many Requests") == plain.count(b"429 Too Many Requests") == 1


def test_pipelined_requests_are_refused_in_turn():
    """Each answer to a request that waits would begin the next one, a thousand calls deep."""

    async def run() -> bytes:
        metrics = GatewayMetrics()
        metrics.shedding = Full()
        app = make_app(Served(SimpleNamespace()), counts=metrics)  # type: ignore[arg-type]
        config = server_config(app, grace_s=1.0)
        config.load()
        protocol, peer = LimitedHttp(config, ServerState(), {}), Peer()
        protocol.connection_made(peer)
        live = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
        protocol.data_received(live + _ASK % b"1.1" * 1000)
        while peer.out.count(b"HTTP/1.1 429") < 1000:
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        return peer.out

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200 OK")


def test_an_own_error_before_the_task_is_an_internal_error_not_a_wrong_request(caplog):
    class Wrong(Shedding):
        def admits(self, now: float, draw: float) -> bool:
            raise RuntimeError("a bug")

    async def run() -> bytes:
        metrics = GatewayMetrics()
        metrics.shedding = Wrong()
        app = make_app(Served(SimpleNamespace()), counts=metrics)  # type: ignore[arg-type]
        config = server_config(app, grace_s=1.0)
        config.load()
        protocol, peer = LimitedHttp(config, ServerState(), {}), Peer()
        protocol.connection_made(peer)
        protocol.data_received(_ASK % b"1.1")
        while not protocol.cycle.response_complete:
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        assert metrics.running == 0
        return peer.out

    assert asyncio.run(run()).startswith(b"HTTP/1.1 500 ")
    assert "a bug" in caplog.text
