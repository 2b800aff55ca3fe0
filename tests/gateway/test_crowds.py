"""More connections than a gateway can keep, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from baton.gateway.app import make_app
from baton.gateway.connections import Connections, Phase
from baton.gateway.exchange import Exchange
from baton.gateway.served import Served
from baton.gateway.server import Server, server_config
from baton.runtime.keys.api_keys import digest_of

MOST = 64
GET = b"GET /version HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\n\r\n"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[Stream]]


@pytest.fixture
def short(monkeypatch):
    """New connections have little time for their first request."""
    monkeypatch.setattr("baton.gateway.connections.FIRST_S", 0.05)
    monkeypatch.setattr("baton.gateway.http.FIRST_REQUEST_S", 0.05)


@asynccontextmanager
async def serving(
    app: Any = None, most: int = MOST, lanes: int = 4
) -> AsyncIterator[tuple[Connect, Server]]:
    """Run a server; yields what connects to it from an address of this machine."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    host, port = listener.getsockname()
    app = app or make_app(Served(None), [digest_of("key")])  # type: ignore[arg-type]
    server = Server(server_config(app, grace_s=1), Connections(most, lanes))
    running = asyncio.ensure_future(server.serve(sockets=[listener]))
    writers: list[asyncio.StreamWriter] = []

    async def connect(address: str = "127.0.0.1") -> Stream:
        stream = await asyncio.open_connection(host, port, local_addr=(address, 0))
        writers.append(stream[1])
        return stream

    try:
        yield connect, server
    finally:
        server.should_exit = True
        for writer in writers:
            writer.transport.abort()
        await running


async def ask(stream: Stream, request: bytes = GET) -> bytes:
    """Return the head of the answer, without the rest."""
    stream[1].write(request)
    head = await stream[0].readuntil(b"\r\n\r\n")
    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    await stream[0].readexactly(int(length))
    return head


@pytest.mark.usefixtures("short")
def test_idle_connections_without_a_key_keep_nobody_out():
    async def run() -> None:
        async with serving() as (connect, server):
            kept = await connect()
            assert b" 200 " in await ask(kept)
            idle = [await connect() for _ in range(4 * MOST)]
            for _ in range(20):
                assert b" 200 " in await ask(await connect("127.0.0.2"))
            assert b" 200 " in await ask(kept)
            assert len(server.places) <= MOST
            ended = [stream for stream in idle if stream[0].at_eof()]
            assert len(ended) >= 3 * MOST

    uvloop.run(asyncio.wait_for(run(), 60))


@pytest.mark.usefixtures("short")
def test_unfinished_heads_and_refused_keys_count_as_idle():
    async def run() -> None:
        async with serving() as (connect, _):
            partial = [await connect() for _ in range(MOST // 2)]
            for stream in partial:
                stream[1].write(GET[:30])
            for _ in range(MOST // 4):
                assert b" 401 " in await ask(await connect(), GET.replace(b"key", b"no"))
            honest = [await connect("127.0.0.2") for _ in range(MOST // 2)]
            for stream in honest:
                assert b" 200 " in await ask(stream)
            answer = await partial[0][0].read()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in answer

    uvloop.run(asyncio.wait_for(run(), 60))


def test_a_request_that_no_connection_is_left_for_gets_503_and_when_to_retry():
    """Its client may still be sending: the answer is not lost by a reset."""

    async def run() -> None:
        go = asyncio.Event()

        async def work(scope: Any, _receive: Any, send: Any) -> None:
            exchange = Exchange.of(scope)
            exchange.admitted()
            await go.wait()
            exchange.respond(b"{}")

        async with serving(work) as (connect, server):
            body = b"content-length: %d\r\n\r\n" % (1 << 20) + b"x" * (1 << 18)

            async def one() -> bytes:
                stream = await connect()
                try:
                    return await ask(stream, GET.replace(b"\r\n\r\n", b"\r\n") + body)
                finally:
                    stream[1].transport.abort()

            answers = [asyncio.ensure_future(one()) for _ in range(3 * MOST)]
            while sum(one.done() for one in answers) < 3 * MOST - MOST * 7 // 8:
                await asyncio.sleep(0.01)
            refused = [one.result() for one in answers if one.done()]
            assert all(one.startswith(b"HTTP/1.1 503 ") for one in refused)
            assert all(b"\r\nretry-after: 1\r\n" in one for one in refused)
            assert server.places.crowded_out == 0
            served = [one for one in answers if not one.done()]
            go.set()
            served = await asyncio.gather(*served)
            assert len(served) == MOST * 7 // 8
            assert all(one.startswith(b"HTTP/1.1 200 ") for one in served)

    uvloop.run(asyncio.wait_for(run(), 60))


def test_a_connection_is_idle_after_its_answer():
    async def run() -> None:
        async with serving() as (connect, server):
            stream = await connect()
            await ask(stream)
            (place,) = server.places._open
            assert place.phase is Phase.IDLE
            stream[1].close()
            while len(server.places):
                await asyncio.sleep(0.01)

    uvloop.run(asyncio.wait_for(run(), 60))
