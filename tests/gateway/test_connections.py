"""Limits of a connection after a request's head, without a socket."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from baton.gateway.http import MAX_HEAD_BYTES, LimitedHttp
from baton.gateway.server import Server, server_config

HEAD = b"POST /x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
TRAILERS = b"".join(b"a%d: %s\r\n" % (at, b"v" * 1000) for at in range(60))


class Peer(asyncio.Transport):
    """A transport that keeps the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.closed, self.ended = b"", False, False

    def write(self, data: Any) -> None:
        self.out += bytes(data)

    def writelines(self, parts: Any) -> None:
        self.out += b"".join(parts)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = self.ended = True

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def talk(
    *parts: bytes,
    answer_first: bool = True,
    then: Callable[[LimitedHttp, Peer], Awaitable[None]] | None = None,
    **settings: Any,
) -> tuple[LimitedHttp, Peer, list[bytes]]:
    """Send parts to an application that answers before or after it has read the body."""
    bodies: list[bytes] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        more = not answer_first
        while more:
            message = await receive()
            bodies.append(message.get("body", b""))
            more = message.get("more_body", False)
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run() -> tuple[LimitedHttp, Peer]:
        config = uvicorn.Config(
            app, http=LimitedHttp, ws="none", lifespan="off", log_config=None, access_log=False,
            **settings,
        )  # fmt: skip
        config.load()
        protocol, peer = LimitedHttp(config, ServerState(), {}), Peer()
        protocol.connection_made(peer)
        for part in parts:
            if not peer.closed:
                protocol.data_received(part)
            for _ in range(5):
                await asyncio.sleep(0)
        if then is not None:
            await then(protocol, peer)
        headers = list(protocol.headers or ())
        protocol.connection_lost(None)
        protocol.headers = headers
        return protocol, peer

    protocol, peer = asyncio.run(run())
    return protocol, peer, bodies


def test_an_idle_connection_ends_some_time_after_its_last_answer():
    async def wait(protocol: LimitedHttp, peer: Peer) -> None:
        for _ in range(3):
            await asyncio.sleep(0.3)
            assert not peer.closed
            protocol.data_received(GET)
        await asyncio.sleep(0.3)
        assert peer.out.count(b"200 OK") == 4
        assert not peer.closed
        await asyncio.sleep(0.6)
        assert peer.closed

    talk(GET, then=wait, timeout_keep_alive=0.5)


@pytest.mark.parametrize("ends", ["idle", "stops"])
def test_a_request_that_has_arrived_is_answered_before_its_connection_ends(ends):
    """A busy event loop may run the timer of an idle connection before it reads a request."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        head = {"type": "http.response.start", "status": 200}
        await send({**head, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run() -> bytes:
        (ours, peer), (reader, writer) = socket.socketpair(), socket.socketpair()
        config = server_config(app, grace_s=1.0)
        config.timeout_keep_alive = 0.05  # type: ignore[assignment]  # whole seconds for uvicorn
        config.load()
        protocol = LimitedHttp(config, ServerState(), {})
        loop = asyncio.get_running_loop()
        ours.setblocking(False)
        await loop.connect_accepted_socket(lambda: protocol, ours)

        def be_busy() -> None:
            loop.remove_reader(reader)
            peer.send(GET)
            if ends == "idle":
                time.sleep(0.1)  # until the timer is due
            else:
                protocol.shutdown()

        with peer, reader, writer:
            peer.sendall(GET)
            peer.setblocking(False)
            answer = await loop.sock_recv(peer, 65536)
            loop.add_reader(reader, be_busy)
            writer.send(b"x")
            return answer + await loop.sock_recv(peer, 65536)

    assert uvloop.run(run()).count(b"200 OK") == 2


def test_a_burst_of_connections_takes_memory_that_is_given_back(monkeypatch):
    monkeypatch.setattr("baton.gateway.server._BURST", 2)

    async def run() -> list[bool]:
        listener = socket.create_server(("127.0.0.1", 0))
        config = server_config(lambda *_: None, grace_s=1.0)  # type: ignore[arg-type]
        config.load()
        server = Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup([listener])
        states = [server._burst.is_on]
        clients = [socket.create_connection(listener.getsockname()) for _ in range(4)]
        while len(server.server_state.connections) < 4:
            await asyncio.sleep(0.01)
        states.append(server._burst.is_on)
        for one in clients:
            one.close()
        while server.places:
            await asyncio.sleep(0.01)
        server.tidy()
        await server.shutdown()
        return [*states, server._burst.is_on]

    assert uvloop.run(run()) == [False, True, False]


@pytest.mark.parametrize("answer_first", [True, False])
@pytest.mark.parametrize("trailer", [TRAILERS, b"v" * 65536], ids=["many", "one-endless"])
def test_endless_trailers_end_the_connection(trailer, answer_first):
    parts = [HEAD, b"0\r\nx: ", *[trailer] * 20]
    protocol, peer, _ = talk(*parts, answer_first=answer_first)
    assert b"431 Request Header Fields Too Large" in peer.out
    assert [name for name, _ in protocol.headers] == [b"host", b"transfer-encoding"]


@pytest.mark.parametrize(
    "rest", [b"1\r\nx\r\n", b"x", b""], ids=["of-a-body", "of-a-chunk", "nothing-more"]
)
def test_a_request_that_goes_on_after_its_answer_ends_with_the_connection(monkeypatch, rest):
    """A client that keeps a connection open by sending its body byte by byte."""
    monkeypatch.setattr(LimitedHttp, "head_timeout_s", 0.2)
    trickle = [b"ff\r\n" if rest == b"x" else b""]

    async def until_closed(protocol: LimitedHttp, peer: Peer) -> None:
        assert b"200 OK" in peer.out
        protocol.data_received(trickle[0])
        for _ in range(200):
            if peer.closed:
                return
            if rest:
                protocol.data_received(rest)
            await asyncio.sleep(0.1)
        raise AssertionError("the connection stays open")

    _, peer, _ = talk(HEAD, then=until_closed)
    assert peer.out.count(b"HTTP/1.1") == 1


def test_a_body_that_arrives_soon_after_the_answer_keeps_the_connection(monkeypatch):
    monkeypatch.setattr(LimitedHttp, "head_timeout_s", 0.2)

    async def wait(protocol: LimitedHttp, peer: Peer) -> None:
        await asyncio.sleep(0.4)  # longer than the limit, which ended with the body
        assert not peer.closed
        protocol.data_received(HEAD + b"0\r\n\r\n")
        for _ in range(5):
            await asyncio.sleep(0)

    _, peer, _ = talk(HEAD, b"4\r\nbody\r\n0\r\n\r\n", then=wait)
    assert peer.out.count(b"200 OK") == 2


def test_short_trailers_are_ignored_and_the_next_request_is_answered():
    end = b"0\r\nx-request-id: late\r\n\r\n"
    request = HEAD.replace(b"chunked", b"Chunked") + b"4\r\nbody\r\n" + end
    protocol, peer, bodies = talk(request, request, answer_first=False)
    assert b"".join(bodies) == b"bodybody"
    assert peer.out.count(b"200 OK") == 2
    assert b"x-request-id" not in dict(protocol.headers)


HOST = "a request of HTTP/1.1 has one Host header, and one of HTTP/1.0 at most one"
ENCODING = "bodies of requests are read without a Content-Encoding"
CODING = "the only transfer coding that this server knows is chunked"
PATH = b"GET /%b HTTP/1.1\r\nhost: localhost\r\n\r\n" % (b"a" * MAX_HEAD_BYTES)
LONG = GET[:-2] + b"x: %b\r\n\r\n" % (b"a" * MAX_HEAD_BYTES)
MANY = GET[:-2] + b"".join(b"x%d: %b\r\n" % (at, b"a" * 90) for at in range(200)) + b"\r\n"


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (PATH, b"431 Request Header Fields Too Large", "the request's head is too long"),
        (LONG, b"431 Request Header Fields Too Large", "the request's head is too long"),
        (MANY, b"431 Request Header Fields Too Large", "the request's head is too long"),
        (b"nonsense\r\n\r\n", b"400 Bad Request", "the request is not valid HTTP/1.1"),
        (GET.replace(b"GET", b"FOO"), b"400 Bad Request", "the request is not valid HTTP/1.1"),
        (HEAD + b"zz\r\n", b"400 Bad Request", "the request is not valid HTTP/1.1"),
        (GET.replace(b"host: localhost\r\n", b""), b"400 Bad Request", HOST),
        (GET.replace(b"host", b"host: a\r\nHost", 1), b"400 Bad Request", HOST),
        (GET.replace(b"/1.1", b"/1.0").replace(b"host", b"host: a\r\nHost", 1), b"400 Bad", HOST),
        (HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n", b"415 Unsupported Media Type", ENCODING),
        (HEAD.replace(b"chunked", b"gzip, chunked"), b"501 Not Implemented", CODING),
        (HEAD.replace(b"chunked", b"gzip\r\nTransfer-Encoding: chunked"), b"501 Not", CODING),
    ],
    ids=[
        "path", "header", "headers", "nonsense", "method", "chunk", "no-host", "hosts", "hosts-1.0",
        "gzip", "coding", "codings",
    ],
)  # fmt: skip
def test_what_is_refused_before_its_route_gets_a_typed_error(data, status, message):
    _, peer, _ = talk(data, answer_first=False)
    assert peer.out.startswith(b"HTTP/1.1 " + status)
    error = json.loads(peer.out.partition(b"\r\n\r\n")[2])["error"]
    assert (error["message"], error["type"]) == (message, "invalid_request_error")
    assert peer.ended


def test_http_1_0_needs_no_host_and_identity_is_no_encoding():
    for request in (
        b"GET / HTTP/1.0\r\n\r\n", GET[:-2] + b"content-encoding: Identity\r\n\r\n"
    ):  # fmt: skip
        _, peer, _ = talk(request)
        assert peer.out.startswith(b"HTTP/1.1 200 ")
    _, peer, _ = talk(GET, GET, GET)
    assert peer.out.count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_white_space_around_a_value_is_no_part_of_it(size):
    """RFC 9110, 5.5: else a Host, key or id that ends with a space is another one."""
    text = b"GET / HTTP/1.1\r\nHost: \t localhost \t\r\nX-Request-Id: a b  \r\nEmpty: \t\r\n\r\n"
    protocol, peer, _ = talk(*(text[at : at + size] for at in range(0, len(text), size)))
    assert peer.out.startswith(b"HTTP/1.1 200 ")
    assert protocol.headers == [(b"host", b"localhost"), (b"x-request-id", b"a b"), (b"empty", b"")]
    identity = GET[:-2] + b"content-encoding: identity \r\n\r\n"
    assert talk(identity)[1].out.startswith(b"HTTP/1.1 200 ")


UPGRADES = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n",
    b"Connection: keep-alive, TE\r\nTE: trailers\r\nAccept-Encoding: gzip\r\n",
    b"",
)


@pytest.mark.parametrize("upgrade", UPGRADES, ids=["h2c", "websocket", "te", "none"])
@pytest.mark.parametrize("coding", ["length", "chunked", "continue", "no-body"])
@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_what_clients_send_by_default_is_served_in_packets_of_any_size(upgrade, coding, size):
    """Java's client asks for h2c with its first request; the body then follows as HTTP/1.1."""
    head = b"%b /x HTTP/1.1\r\nhost: localhost\r\n%b%b\r\n%b"
    bodies = {
        "length": (b"POST", b"content-length: 8\r\n", b"the body"),
        "chunked": (b"POST", b"Transfer-Encoding: chunked\r\n", b"8\r\nthe body\r\n0\r\n\r\n"),
        "continue": (b"POST", b"expect: 100-continue\r\ncontent-length: 8\r\n", b"the body"),
        "no-body": (b"GET", b"", b""),
    }
    method, framing, body = bodies[coding]
    request = head % (method, upgrade, framing, body) + GET  # and a further one
    parts = [request[at : at + size] for at in range(0, len(request), size)]
    _, peer, received = talk(*parts, answer_first=False)
    assert peer.out.count(b"HTTP/1.1 200 OK") == 2
    assert b"".join(received) == (b"" if coding == "no-body" else b"the body")


def test_a_body_that_arrives_with_its_head_does_not_count_as_head():
    size = 4 * MAX_HEAD_BYTES
    head = b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % size
    _, peer, bodies = talk(head + b"x" * size, answer_first=False)
    assert b"".join(bodies) == b"x" * size
    assert b"200 OK" in peer.out


def test_the_frames_of_small_chunks_are_not_trailers():
    count = MAX_HEAD_BYTES
    parts = [HEAD, *[b"1\r\nx\r\n" * (count // 8)] * 8, b"0\r\n\r\n"]
    _, peer, bodies = talk(*parts, answer_first=False)
    assert b"".join(bodies) == b"x" * count
    assert b"200 OK" in peer.out


def test_a_chunk_extension_is_limited():
    _, peer, _ = talk(HEAD, b"1;", *[b"e" * 4096] * 8)
    assert b"431" in peer.out


def test_a_further_head_that_stays_unfinished_ends_the_connection(monkeypatch):
    monkeypatch.setattr(LimitedHttp, "head_timeout_s", 0.0)
    request = HEAD + b"0\r\n\r\n"
    _, peer, _ = talk(request, b"POST /x HTTP/1.1\r\nhost: local", b"host\r\n", answer_first=False)
    assert peer.out.count(b"200 OK") == 1
    assert b"408 Request Timeout" in peer.out
    assert peer.ended


def test_a_client_that_does_not_read_its_answer_loses_the_connection(monkeypatch):
    monkeypatch.setattr("baton.gateway.http._UNREAD_S", 0.0)

    async def block(protocol: LimitedHttp, peer: Peer) -> None:
        protocol.pause_writing()
        await asyncio.sleep(0.05)
        assert peer.closed

    talk(GET, then=block)


def test_a_client_that_reads_again_keeps_the_connection(monkeypatch):
    monkeypatch.setattr("baton.gateway.http._UNREAD_S", 0.02)

    async def block(protocol: LimitedHttp, peer: Peer) -> None:
        protocol.pause_writing()
        protocol.resume_writing()
        await asyncio.sleep(0.05)
        assert not peer.closed

    talk(GET, then=block)


class TestStop:
    """A server that stops answers the requests of connections that it has accepted."""

    def stopped(self, before: bytes, after: bytes) -> Peer:
        async def stop(protocol: LimitedHttp, peer: Peer) -> None:
            protocol.shutdown()
            if after and not peer.closed:
                protocol.data_received(after)
            for _ in range(5):
                await asyncio.sleep(0)

        return talk(*([before] if before else []), then=stop)[1]

    def test_a_new_connection_may_send_one_request(self):
        peer = self.stopped(b"", b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert peer.out.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in peer.out
        assert peer.closed

    def test_a_new_connection_without_a_request_ends_soon(self, monkeypatch):
        monkeypatch.setattr("baton.gateway.http.FIRST_REQUEST_S", 0.0)
        assert self.stopped(b"", b"").closed

    def test_a_used_connection_ends_at_once(self):
        assert self.stopped(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", b"").closed


def test_a_stopping_server_answers_whoever_is_in_its_queue():
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def run() -> list[bytes]:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=LimitedHttp, ws="none", lifespan="off", log_config=None)
        server = Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(20)]
        for client in clients:  # the loop has not run since: all of them wait in the kernel
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        server.should_exit = True
        await server.shutdown([listener])
        await serving
        return [client.recv(1 << 12) for client in clients]

    answers = uvloop.run(run())
    assert [answer[:13] for answer in answers] == [b"HTTP/1.1 204 "] * 20


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificate")
def test_a_server_with_tls_stops_after_its_requests_alone(tmp_path, monkeypatch):
    """An idle connection, a stream, and handshakes that have begun or not when the server stops."""
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", *make.split(), *names], check=True, capture_output=True)
    trusted = ssl.create_default_context(cafile=certificate)
    monkeypatch.setattr(LimitedHttp, "head_timeout_s", 2.0)

    async def run() -> tuple[bytes, list[bytes], list[object]]:
        begun, rest = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if scope["path"] == "/stream":
                await send({"type": "http.response.body", "body": b"first", "more_body": True})
                begun.set()
                await rest.wait()
            await send({"type": "http.response.body", "body": b"last"})

        problems: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()
        server = Server(server_config(app, certfile=str(certificate), keyfile=str(key), grace_s=60))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        idle, idle_writer = await asyncio.open_connection(host, port, ssl=trusted)
        idle_writer.write(GET)
        await idle.readuntil(b"last")
        stream, stream_writer = await asyncio.open_connection(host, port, ssl=trusted)
        stream_writer.write(GET.replace(b"/ ", b"/stream ", 1))
        await begun.wait()
        silent, silent_writer = await asyncio.open_connection(host, port)
        partial, partial_writer = await asyncio.open_connection(host, port)
        partial_writer.write(b"\x16\x03\x01\x02\x00\x01")  # the begin of a ClientHello
        server.should_exit = True
        ends = [await idle.read()]
        assert not serving.done()
        rest.set()
        answer = await stream.read()
        await serving
        assert not server.server_state.connections
        ends += [await one.read() for one in (silent, partial)]  # the handshakes' time is over
        for writer in (idle_writer, stream_writer, silent_writer, partial_writer):
            writer.close()
        return answer, ends, problems

    answer, ends, problems = uvloop.run(asyncio.wait_for(run(), 50))
    assert b"first" in answer
    assert answer.endswith(b"4\r\nlast\r\n0\r\n\r\n")
    assert ends[0].endswith(b"0\r\n\r\n") or ends[0] == b"\r\n0\r\n\r\n"
    assert ends[1:] == [b"", b""]
    assert problems == []
