"""Answers written by callbacks, to a connection without a socket, without a cluster."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import uvicorn
from tests.gateway.test_connections import Peer
from uvicorn.server import ServerState

from baton.client.async_generation import AsyncGeneration
from baton.client.events import Ended, NewTokens
from baton.client.model import Prepared
from baton.client.output import Assembler, Output
from baton.gateway.answers import Answer, CompletionForm
from baton.gateway.app import make_app
from baton.gateway.bodies import CompletionBody
from baton.gateway.exchange import Exchange, WriteBatch
from baton.gateway.http import LimitedHttp
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.served import Served
from baton.gateway.text_routes import StreamDelivery, WholeDelivery
from baton.proto.contexts.status import GenerationStatus
from baton.proto.errors import CapacityError, InputError, RequestCancelled, WorkerLost
from baton.proto.sampling import SamplingParamsGenerationConfigDefaults

REQUEST = b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"


class Generation:
    """A native request whose outputs the test gives."""

    def __init__(self) -> None:
        self.cancelled = False

    def deliver(self, on_output: Any, on_error: Any, **_: bool) -> None:
        self.give, self.fail = on_output, on_error

    def cancel(self) -> None:
        self.cancelled = True

    def say(self, text: str, *, last: bool = False) -> None:
        status = GenerationStatus.MAXIMUM_LENGTH if last else None
        tokens = [] if last else [7]
        self.give(Output(request_id="r", tokens=tokens, text=text, position=3, final_status=status))


class Server:
    """One connection to an application that streams the outputs of ``generations``."""

    def __init__(self, count: int = 1, batch: WriteBatch | None = None, **fields: Any) -> None:
        self.generations: list[list[Generation]] = []
        self.failures: list[Exception] = []
        body = msgspec.convert({"prompt": "x", "stream": True, **fields}, CompletionBody)

        async def app(scope: Any, _receive: Any, send: Any) -> None:
            generations = [Generation() for _ in range(count)]
            self.generations.append(generations)
            kind = StreamDelivery if body.stream else WholeDelivery
            answer = Answer(CompletionForm(None), "cmpl-1", "demo")
            exchange = Exchange.of(scope)
            exchange.batch = batch or exchange.batch
            try:
                await kind(exchange, answer, generations, 1, body).run()  # type: ignore[arg-type]
            except Exception as error:
                self.failures.append(error)
                if not exchange.status:
                    head = {"type": "http.response.start", "status": 500, "headers": []}
                    await send(head)
                    await send({"type": "http.response.body", "body": b"failed"})

        config = uvicorn.Config(
            app, http=LimitedHttp, ws="none", lifespan="off", log_config=None, access_log=False
        )
        config.load()
        self.peer = Peer()
        self.protocol = LimitedHttp(config, ServerState(), {})
        self.protocol.connection_made(self.peer)

    async def ask(self, request: bytes = REQUEST) -> list[Generation]:
        """Send a request; return its native requests."""
        known = len(self.generations)
        self.protocol.data_received(request)
        await unless_failed(self.peer, lambda: len(self.generations) > known)
        await asyncio.sleep(0)
        return self.generations[-1]

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def unless_failed(peer: Peer, reached: Callable[[], bool]) -> None:
    """Wait for a state. Raises AssertionError if the server has failed instead."""
    while not reached():
        assert b"HTTP/1.1 5" not in peer.out, peer.out
        await asyncio.sleep(0)


def events(out: bytes) -> list[Any]:
    """Return the events of one streamed answer, and check its frame."""
    head, _, rest = out.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding: chunked" in head
    content = b""
    while not rest.startswith(b"0\r\n\r\n"):
        size, _, rest = rest.partition(b"\r\n")
        content += rest[: int(size, 16)]
        assert rest[int(size, 16) :][:2] == b"\r\n"
        rest = rest[int(size, 16) + 2 :]
    assert rest == b"0\r\n\r\n"
    found = [event.removeprefix(b"data: ") for event in content.split(b"\n\n")[:-1]]
    return [one.decode() if one == b"[DONE]" else json.loads(one) for one in found]


def texts(found: list[Any]) -> list[tuple[int, str]]:
    choices = [one["choices"][0] for one in found if one != "[DONE]" and one.get("choices")]
    return [(choice["index"], choice["text"]) for choice in choices]


def test_each_output_is_written_when_it_arrives():
    async def run() -> bytes:
        server = Server(stream_options={"include_usage": True})
        (generation,) = await server.ask()
        for text in ("a", 'q"\\\n\u2028é', "c"):
            before = len(server.peer.out)
            generation.say(text)
            assert len(server.peer.out) > before  # no turn of the loop later
        generation.say("", last=True)
        await server.settle()
        assert generation.cancelled
        return server.peer.out

    found = events(asyncio.run(run()))
    assert texts(found) == [(0, "a"), (0, 'q"\\\n\u2028é'), (0, "c"), (0, "")]
    assert found[-3]["choices"][0]["finish_reason"] == "length"
    assert found[-2]["usage"]["completion_tokens"] == 3
    assert found[-2]["usage"]["prompt_tokens"] == 3
    assert [one["usage"] for one in found[:-2]] == [None] * (len(found) - 2)  # as OpenAI's
    assert found[-1] == "[DONE]"
    assert {one["id"] for one in found[:-1]} == {"cmpl-1"}


def test_the_first_outputs_may_have_no_text():
    """As half a character has none."""

    async def run() -> bytes:
        server = Server()
        (generation,) = await server.ask()
        for text in ("", "", "é", "b"):
            generation.say(text)
        generation.say("", last=True)
        return server.peer.out

    assert texts(events(asyncio.run(run()))) == [(0, "é"), (0, "b"), (0, "")]


def test_choices_take_turns_and_the_last_end_ends_the_answer():
    async def run() -> bytes:
        server = Server(count=2)
        one, other = await server.ask()
        one.say("a")
        other.say("b")
        one.say("", last=True)
        other.say("c")
        assert b"[DONE]" not in server.peer.out
        other.say("d", last=True)
        return server.peer.out

    assert texts(events(asyncio.run(run()))) == [(0, "a"), (1, "b"), (0, ""), (1, "c"), (1, "d")]


def test_outputs_for_a_slow_reader_are_held_and_keep_their_order():
    async def run() -> bytes:
        server = Server()
        (generation,) = await server.ask()
        generation.say("a")
        server.protocol.pause_writing()
        size = len(server.peer.out)
        generation.say("b")
        generation.say("c")
        assert len(server.peer.out) == size
        server.protocol.resume_writing()
        assert len(server.peer.out) > size
        server.protocol.pause_writing()
        generation.say("d")
        generation.fail(WorkerLost("no worker is left"))
        await server.settle()
        assert b"no worker" not in server.peer.out
        server.protocol.resume_writing()
        await server.settle()
        assert server.failures == []
        return server.peer.out

    *found, error = events(asyncio.run(run()))
    assert texts(found) == [(0, "a"), (0, "b"), (0, "c"), (0, "d")]
    assert error["error"]["message"] == "no worker is left"


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_before_the_answer_is_raised(stream):
    async def run() -> Server:
        server = Server(stream=stream)
        (generation,) = await server.ask()
        generation.fail(InputError("too long"))
        await server.settle()
        return server

    server = asyncio.run(run())
    assert [str(one) for one in server.failures] == ["too long"]
    assert server.peer.out.startswith(b"HTTP/1.1 500")


def test_nothing_follows_the_error_of_one_choice():
    async def run() -> bytes:
        server = Server(count=2)
        one, other = await server.ask()
        one.say("a")
        one.fail(WorkerLost("gone"))
        other.say("b")
        other.say("", last=True)
        await server.settle()
        assert other.cancelled
        return server.peer.out

    found = events(asyncio.run(run()))
    assert texts(found[:1]) == [(0, "a")]
    assert found[1:] == [found[-1]]
    assert found[-1]["error"]["message"] == "gone"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_closed_connection_cancels_the_native_requests(stream, begun):
    async def run() -> Server:
        server = Server(count=2, stream=stream)
        generations = await server.ask()
        if begun:
            generations[0].say("a")
        written = len(server.peer.out)
        server.protocol.connection_lost(None)
        generations[1].say("late")
        await server.settle()
        assert all(one.cancelled for one in generations)
        assert len(server.peer.out) == written
        return server

    failures = asyncio.run(run()).failures
    expected = [] if stream and begun else [RequestCancelled]
    assert [type(error) for error in failures] == expected


def test_a_connection_that_closes_during_the_first_of_two_requests_cancels_it():
    async def run() -> None:
        server = Server()
        (generation,) = await server.ask()
        generation.say("a")
        server.protocol.data_received(REQUEST)  # waits for the first answer
        await server.settle()
        assert len(server.generations) == 1
        server.protocol.connection_lost(None)
        await server.settle()
        assert generation.cancelled
        assert len(server.generations) == 1

    asyncio.run(run())


def test_a_kept_connection_serves_pipelined_requests_in_order():
    async def run() -> bytes:
        server = Server(stream=False)
        server.protocol.data_received(REQUEST * 2)
        for answer in ("one", "two"):
            await unless_failed(
                server.peer,
                lambda: bool(server.generations) and hasattr(server.generations[-1][0], "give"),
            )
            server.generations[-1][0].say(answer)
            server.generations[-1][0].say("", last=True)
            await server.settle()
        assert not server.peer.closed
        return server.peer.out

    out = asyncio.run(run())
    assert out.count(b"HTTP/1.1 200 OK") == 2
    bodies = [json.loads(part.partition(b"\r\n\r\n")[2]) for part in out.split(b"HTTP/1.1")[1:]]
    assert [one["choices"][0]["text"] for one in bodies] == ["one", "two"]


def test_a_connection_is_closed_after_the_answer_if_the_client_wants_it():
    async def run() -> Peer:
        server = Server()
        request = REQUEST.replace(b"host:", b"connection: close\r\nhost:")
        (generation,) = await server.ask(request)
        generation.say("a")
        assert not server.peer.closed
        generation.say("", last=True)
        return server.peer

    peer = asyncio.run(run())
    assert b"connection: close\r\n" in peer.out
    assert peer.closed


class Requests:
    """A client and its connection: keeps the last request's sink, and ends no request itself."""

    def __init__(self) -> None:
        self.sink: Any = None
        self.is_wrong = False

    async def model(self) -> Any:
        description = SimpleNamespace(folder="/models/demo")
        card = SimpleNamespace(name="demo")
        defaults = SamplingParamsGenerationConfigDefaults()
        return SimpleNamespace(
            description=description, card=card, defaults=defaults, check_generates=lambda: None
        )

    def begin(self, _prompt: Any, _params: Any, options: Any) -> AsyncGeneration:
        generation = AsyncGeneration(self, self, options["request_id"])  # type: ignore[arg-type]
        generation.start(self._prepare)
        return generation

    def _prepare(self) -> Prepared:
        if self.is_wrong:
            raise InputError("wrong")
        return Prepared(None, Assembler(None, show_text=True))  # type: ignore[arg-type]

    def start(self, _spec: Any, sink: Any, _window: Any) -> None:
        self.sink = sink

    def replace(self, _request_id: str, sink: Any, other: Any) -> bool:
        assert self.sink is sink
        self.sink = other
        return True

    def stop(self, *_: Any, **__: Any) -> None:
        self.sink = None


@pytest.mark.parametrize("ends", ["answered", "refused", "wrong"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_leaves_nothing_to_the_garbage_collector(stream, ends):
    """Under overload, refused requests would wait there by the ten thousand."""

    async def run() -> bytes:
        requests, peer = Requests(), Peer()
        config = uvicorn.Config(
            make_app(Served(requests)),  # type: ignore[arg-type]
            http=LimitedHttp, ws="none", lifespan="off", log_config=None, access_log=False,
        )  # fmt: skip
        config.load()
        protocol = LimitedHttp(config, ServerState(), {})
        protocol.connection_made(peer)
        requests.is_wrong = ends == "wrong"
        body = json.dumps({"prompt": [5, 6, 7], "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        protocol.data_received(head % len(body) + body)
        if ends != "wrong":
            await unless_failed(peer, lambda: requests.sink is not None)
            sink, requests.sink = requests.sink, None
            if ends == "answered":
                sink(NewTokens("r", 3, [8]))
                sink(Ended(request_id="r", position=4, status="maximum_length"))
            else:
                sink(Ended(request_id="r", position=0, error=CapacityError("full")))
            del sink
        await unless_failed(peer, lambda: protocol.cycle.response_complete)
        await asyncio.sleep(0)
        protocol.connection_lost(None)
        return bytes(peer.out)

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        answer = asyncio.run(run())
        gc.collect()
        left = {type(one).__name__ for one in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    expected = {"answered": b'"finish_reason":"length"', "refused": b" 429 ", "wrong": b" 400 "}
    assert expected[ends] in answer
    assert not left & {
        "AsyncGeneration",
        "Exchange",
        "Clock",
        "StreamDelivery",
        "WholeDelivery",
        "traceback",
    }


def test_the_events_of_one_message_are_written_after_it_once_per_connection():
    async def run() -> tuple[bytes, bytes]:
        batch = WriteBatch()
        servers = [Server(batch=batch) for _ in range(3)]
        generations = [(await server.ask())[0] for server in servers]
        writes: list[int] = []
        for at, server in enumerate(servers):
            write = server.peer.write
            server.peer.write = lambda data, at=at, write=write: (writes.append(at), write(data))  # type: ignore[method-assign]

        def broken(_data: bytes) -> None:
            raise OSError("gone")

        servers[1].peer.write = broken  # type: ignore[method-assign]
        batch.begin()
        for generation in generations:
            generation.say("a")
            generation.say("b")
        assert not writes
        batch.end()
        assert writes == [0, 2]
        batch.begin()
        generations[0].say("c")
        generations[0].say("", last=True)  # an end does not wait
        assert writes == [0, 2, 0]
        batch.end()
        generations[2].say("c")  # no message is handled, so nothing waits
        generations[2].say("", last=True)
        assert writes == [0, 2, 0, 2, 2]
        assert servers[1].peer.closed
        await servers[0].settle()
        return bytes(servers[0].peer.out), bytes(servers[2].peer.out)

    for out in asyncio.run(run()):
        assert texts(events(out)) == [(0, "a"), (0, "b"), (0, "c"), (0, "")]


class Broken(list[list[Generation]]):
    def append(self, _: list[Generation]) -> None:
        raise ZeroDivisionError


def test_a_route_that_raises_fails_a_test_at_once():
    async def run() -> None:
        server = Server()
        server.generations = Broken()
        await server.ask()

    with pytest.raises(AssertionError, match="500 Internal Server Error"):
        asyncio.run(run())


def test_a_write_that_raises_ends_one_connection_and_is_logged_and_counted():
    async def run() -> None:
        metrics = GatewayMetrics()
        batch = WriteBatch(metrics)
        servers = [Server(batch=batch) for _ in range(3)]
        streams = [(await server.ask())[0] for server in servers]
        for stream in streams:
            stream.say("a")
        batch.begin()
        for stream in streams:
            stream.say("b")

        def raising(data: bytes) -> None:
            raise KeyError("planted")

        servers[1].peer.write = raising  # type: ignore[method-assign]
        batch.end()
        assert [b'"b"' in one.peer.out for one in servers] == [True, False, True]
        assert [one.peer.closed for one in servers] == [False, True, False]
        assert metrics.own_errors == 1

    asyncio.run(run())


@pytest.mark.parametrize(("seconds", "counted"), [(0.5, [0.25]), (0.0, [])])
def test_the_time_per_token_of_a_whole_answer_is_the_router_s(seconds, counted):
    """Its tokens come at one time. A router that resumed the request has not seen the first."""
    metrics = GatewayMetrics()
    output = Output(
        request_id="r", tokens=[1, 2, 3], text="x", position=4, tokens_s=seconds,
        final_status=GenerationStatus.MAXIMUM_LENGTH,
    )  # fmt: skip
    metrics.time = 1.0
    metrics.begin().outputs(0).took(output)
    assert (metrics.per_token.count, metrics.per_token.total) == (len(counted), sum(counted))
    assert (metrics.prompts.total, metrics.generated.total) == (4, 3)
