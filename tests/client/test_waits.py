"""No call waits without a limit: without an answer, it ends with one typed error."""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from baton.client import AsyncClient, Client
from baton.client.connection import Connection
from baton.client.events import Ended, NewTokens, RequestSpec
from baton.client.model import ModelCache
from baton.proto import ConnectionLost, InputError, SamplingParams, TextContext
from baton.proto.errors import DecodeFailed
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import ClientToRouter, Describe, Ping, Pong, Rejected, Status
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens
from baton.runtime.net.sockets import RouterChannel
from baton.runtime.process.log_limit import INTERVAL_S

UNREADABLE = {
    "top_k": [0.7, "5", None, 1 << 60],
    "top_p": ["1", None],
    "min_p": [[0.5]],
    "temperature": ["hot", True, None],
    "frequency_penalty": ["0"],
    "presence_penalty": [{}],
    "repetition_penalty": [b"1"],
    "max_new_tokens": [5.5, "5", 1 << 60],
    "min_new_tokens": [1.5],
    "ignore_eos": ["yes", 1],
    "stop": ["end", [1], ["x"] * 17],
    "stop_token_ids": [5, ["a"], [1 << 40], [1] * 65],
    "detokenize": [0],
    "seed": [1.5, "1", None],
    "logit_bias": [[5], {"5": 1.0}, {5: "1"}, {1 << 40: 1.0}, dict.fromkeys(range(1025), 1.0)],
}


def raw_spec(name, **sampling):
    """A request as a client without checks would send it."""
    context = WireContext(
        tokens=WireTokens(np.array([1], np.int32)), max_length=9, sampling=WireSampling(**sampling)
    )
    return RequestSpec(request_id=name, context=context)


def start(client, spec):
    news = queue.SimpleQueue()
    connection = client._background.connection
    client._background.post(lambda: connection.start(spec, news.put))
    return news


def end_of(news):
    """Wait for the end of a request."""
    while True:
        heard = news.get(timeout=60)
        if isinstance(heard, Ended):
            return heard


def test_every_field_that_travels_is_tried():
    assert UNREADABLE.keys() == set(WireSampling.__struct_fields__)


@pytest.mark.integration
def test_what_the_router_cannot_read_ends_alone_and_by_name(cluster):
    """The requests share one envelope: the router serves the requests that it can decode."""
    specs = [
        (field, raw_spec(f"{field}-{index}", **{field: value}))
        for field, values in UNREADABLE.items()
        for index, value in enumerate(values)
    ]
    with Client(cluster.address) as client:
        client.status()
        heard: list[tuple[str, queue.SimpleQueue[NewTokens | Ended]]] = []
        connection = client._background.connection

        def start_all():
            for number, (field, spec) in enumerate(specs):
                for what, one in ((field, spec), ("", raw_spec(f"good-{number}"))):
                    news = queue.SimpleQueue()
                    heard.append((what, news))
                    connection.start(one, news.put)

        client._background.post(start_all)
        client.status()
        for field, news in heard:
            end = end_of(news)
            if field:
                assert isinstance(end.error, InputError)
                assert f"$.context.sampling_params.{field}" in str(end.error)
            else:
                assert (end.error, end.status) == (None, "maximum_length")
            assert news.empty()


@pytest.fixture
def answering(tmp_path, on_thread):
    """``answering(reply)``: address of a router that answers each message by ``reply``."""
    channels = []

    def serve(reply):
        channel = RouterChannel(on_thread.context, f"ipc://{tmp_path}/rogue")
        decoder = EnvelopeDecoder(ClientToRouter)

        def hear(identity, frames):
            answers = [answer for message in decoder.decode(frames) for answer in reply(message)]
            if answers:
                channel.send(identity, EnvelopeEncoder().encode(answers))

        on_thread.call(lambda: channel.attach(on_thread.loop, hear))
        channels.append(channel)
        return channel.endpoint

    yield serve
    for channel in channels:
        on_thread.call(channel.close)


def context():
    return TextContext(tokens=np.array([4]), max_length=9)


@pytest.mark.integration
def test_a_router_that_sends_nothing_but_pongs_is_not_waited_for(answering):
    """Each message gets a pong, so that a busy machine does not make the router silent."""
    address = answering(lambda m: [Pong(nonce=m.nonce if isinstance(m, Ping) else 0)])
    refused = pytest.raises(ConnectionLost, match=r"answers, but .* 3 s \(reconnect_timeout\)")
    with Client(address, connect_timeout=3, reconnect_timeout=3) as client, refused:
        list(client.generate(context()))
    with Client(address, connect_timeout=0.3) as client:
        with pytest.raises(ConnectionLost, match=r"for the model within 0.3 s \(connect_timeout"):
            client.generate([1])
        with pytest.raises(ConnectionLost, match=r"for the status within 0.3 s \(timeout\)"):
            client.status(timeout=0.3)


@pytest.mark.integration
def test_a_rejection_that_names_nothing_ends_what_waits(answering):
    rejected = Rejected(code=DecodeFailed.code, message="not a valid message")
    address = answering(lambda m: [Pong(nonce=m.nonce)] if isinstance(m, Ping) else [rejected])
    with Client(address) as client:
        for _ in range(2):
            with pytest.raises(DecodeFailed):
                list(client.generate(context()))
        with pytest.raises(DecodeFailed):
            client.status()


FORKED = """
import os, sys
from baton.client import Client
from baton.proto.errors import ConnectionLost
client = Client(sys.argv[1])
running = client.generate([1], request_id="mine")
next(running)
pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
seen = 0
for call in (client.status, lambda: client.generate([1]), lambda: list(running)):
    try:
        call()
    except ConnectionLost as error:
        seen += "make a Client in each process" in str(error)
os._exit(0 if seen == 3 else 1)
"""


@pytest.mark.integration
def test_a_client_that_was_forked_says_so(cluster):
    script = [sys.executable, "-c", textwrap.dedent(FORKED), cluster.address]
    assert subprocess.run(script, timeout=60, check=False, env=dict(os.environ)).returncode == 0


def test_calls_that_waited_for_a_failed_fetch_share_its_failure():
    models = ModelCache()
    before = models.failures
    with pytest.raises(ConnectionLost, match="nobody"), models.attempt(before):
        raise ConnectionLost("nobody")
    with pytest.raises(ConnectionLost, match="nobody"), models.attempt(before):
        pytest.fail("it waited for the first one and must not try again")
    with models.attempt(models.failures):
        pass  # a later call fetches again


@pytest.mark.integration
def test_the_model_is_fetched_once_for_all_calls_over_a_connection(cluster, monkeypatch):
    asked, ask = [], Connection.ask

    def counted(connection, query, timeout, sink):
        asked.append(type(query))
        ask(connection, query, timeout, sink)

    async def main():
        async with AsyncClient(cluster.address) as client:
            await client.status()  # it is connected now
            return [await client.model() for _ in range(3)]

    monkeypatch.setattr(Connection, "ask", counted)
    with Client(cluster.address) as client:
        client.status()
        found = [client.model() for _ in range(3)]
    assert found == found[:1] * 3
    found = asyncio.run(main())
    assert found == found[:1] * 3
    # Each client asks whether it knows the model, and then for the files.
    assert asked == [Status, Describe, Describe] * 2


@pytest.mark.integration
def test_a_flood_of_unreadable_requests_is_a_few_lines_of_log(cluster, capfd):
    began = time.monotonic()
    with Client(cluster.address) as client:
        client.status()
        for number in range(200):
            news = start(client, raw_spec(f"r{number}", temperature="hot"))
            assert isinstance(end_of(news).error, InputError)
        requests = client.status()["router"]["requests"]
        assert requests["in_flight"] == 0
        assert list(client.generate([1], SamplingParams(max_new_tokens=2)))
    lines = [line for line in capfd.readouterr().err.splitlines() if "malformed" in line]
    assert 1 <= len(lines) <= 3 + (time.monotonic() - began) / INTERVAL_S
