"""Requests to the application, in this process, whose cluster is a stub."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from baton.gateway.app import make_app
from baton.gateway.connections import Phase, Place
from baton.gateway.errors import BodyTooSlow
from baton.gateway.exchange import Exchange
from baton.gateway.served import Served, read_body
from baton.gateway.text_routes import completions
from baton.proto.errors import InputError
from baton.proto.sampling import SamplingParamsGenerationConfigDefaults
from baton.runtime.metrics.families import counter

LENGTH = 100
VOCABULARY = 50


class Cluster:
    """A client that starts no request. ``metrics``: what the router reports."""

    def __init__(self, metrics: Any = ()) -> None:
        self.decoded: list[threading.Thread] = []
        self.started: list[dict[str, Any]] = []
        self._metrics = metrics

    async def model(self) -> Any:
        return SimpleNamespace(
            description=SimpleNamespace(folder="/models/demo"),
            card=SimpleNamespace(name="demo", max_length=LENGTH, vocab_size=VOCABULARY),
            tokenizer=SimpleNamespace(decode=self._decode),
            defaults=SamplingParamsGenerationConfigDefaults(),
            check_text=lambda: None,
            check_generates=lambda: None,
            draws=False,
        )

    def _decode(self, ids: list[int], **_: bool) -> str:
        self.decoded.append(threading.current_thread())
        return "text"

    def begin(self, _prompt: Any, _params: Any, options: Any) -> Any:
        self.started.append(options)
        raise InputError("the stub starts no request")

    async def status(self, **_: Any) -> Any:
        return json.loads(msgspec.json.encode({"metrics": self._metrics}))


def ask(
    cluster: Cluster, method: str, path: str, body: Any = None, headers: Any = (), **more: Any
) -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": b"/",
        "query_string": b"", "headers": list(headers), "scheme": "http", "server": None,
        "client": None, "root_path": "",
    }  # fmt: skip
    app = make_app(Served(cluster, **more))  # type: ignore[arg-type]
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(part.get("body", b"") for part in sent)


def complete(cluster: Cluster, headers: Any = (), **body: Any) -> dict[str, Any]:
    """Return the error of a completion."""
    status, content = ask(cluster, "POST", "/v1/completions", body, headers)
    assert status == 400
    error: dict[str, Any] = json.loads(content)["error"]
    return error


def test_an_echo_is_decoded_beside_the_event_loop():
    cluster = Cluster()
    said = complete(cluster, prompt=[7] * (LENGTH - 1), echo=True)["message"]
    assert said == "the stub starts no request"
    assert len(cluster.decoded) == 1
    assert threading.main_thread() not in cluster.decoded


def test_a_prompt_that_is_too_long_is_not_decoded():
    cluster = Cluster()
    for prompt in ([7] * LENGTH, [[7], [7] * LENGTH]):
        error = complete(cluster, prompt=prompt, echo=True)
        assert error["message"] == f"prompt too long: {LENGTH} tokens, limit {LENGTH - 1}"
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert not cluster.decoded


def test_tokens_beyond_the_model_s_length_are_not_decoded():
    cluster = Cluster()
    body = {"tokens": [7] * (LENGTH + 1)}
    status, content = ask(cluster, "POST", "/detokenize", body)
    error = json.loads(content)["error"]
    assert (status, error["param"]) == (400, "tokens")
    assert error["message"] == f"too many tokens: {LENGTH + 1}, limit {LENGTH}"
    assert not cluster.decoded
    body["tokens"].pop()
    assert ask(cluster, "POST", "/detokenize", body) == (200, b'{"prompt":"text"}')
    status, content = ask(cluster, "POST", "/detokenize", {"tokens": [7, VOCABULARY]})
    error = json.loads(content)["error"]
    assert (status, error["param"]) == (400, "tokens")
    assert error["message"] == "tokens: token id 50 is outside the vocabulary of 50"
    assert len(cluster.decoded) == 1


@pytest.mark.parametrize("order", [1, -1])
def test_a_request_id_given_twice_is_replaced(order):
    headers = [(b"x-request-id", b"\x9b31mEVIL"), (b"x-request-id", b"good")][::order]
    cluster = Cluster()
    complete(cluster, headers, prompt="x")
    (options,) = cluster.started
    assert options["request_id"].isascii()
    assert "good" not in options["request_id"]
    complete(cluster, [(b"x-request-id", b"good")], prompt="x")
    assert "-good-" in cluster.started[-1]["request_id"]


@pytest.mark.parametrize("order", [1, -1])
def test_a_trace_given_twice_is_ignored(order):
    traces = [f"00-{digit * 32}-{digit * 16}-01".encode() for digit in "12"][::order]
    cluster = Cluster()
    complete(cluster, [(b"traceparent", one) for one in traces], prompt="x")
    complete(cluster, [(b"traceparent", traces[0])], prompt="x")
    assert [options.get("traceparent", "").encode() for options in cluster.started] == [
        b"", traces[0],
    ]  # fmt: skip


def test_a_worker_chosen_twice_is_refused():
    target = (b"x-target-endpoint", b"tcp://127.0.0.1:1")
    cluster = Cluster()
    error = complete(cluster, [target, target], prompt="x")
    assert error["message"] == "the header X-Target-Endpoint occurs more than once"
    assert not cluster.started
    complete(cluster, [target], prompt="x")
    assert cluster.started[-1]["target_endpoint"] == target[1].decode()


@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs", "add_generation_prompt"])
def test_tokenize_refuses_a_field_without_effect(field):
    value = {"tools": [], "chat_template_kwargs": {}, "add_generation_prompt": True}[field]
    status, content = ask(Cluster(), "POST", "/tokenize", {"prompt": "x", field: value})
    assert (status, json.loads(content)["error"]["param"]) == (400, field)
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "add_special_tokens": False}
    status, content = ask(Cluster(), "POST", "/tokenize", body)
    assert status == 400
    assert json.loads(content)["error"]["message"] == "add_special_tokens needs prompt"


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_a_number_that_json_lacks_does_not_fail_the_metrics(value):
    families = [counter("baton_x_total", "x", {("w",): value}, ("worker",))]
    status, text = ask(Cluster(families), "GET", "/metrics", vllm_metrics=True)
    assert status == 200
    assert b"baton_gateway" in text


def test_a_request_has_a_limited_number_of_answers():
    cluster = Cluster()
    for prompts, number in ((65, 16), (1024, 2)):
        error = complete(cluster, prompt=["x"] * prompts, n=number)
        assert error["param"] == "n"
        assert "at most 1024 are allowed" in error["message"]
    assert not cluster.started


def test_other_connections_take_turns_with_a_request_of_many_prompts():
    class Slow(Cluster):
        def begin(self, _prompt: Any, _params: Any, options: Any) -> Any:
            self.started.append(options)
            if len(self.started) == 1024:
                raise InputError("enough")

    cluster, turns = Slow(), []

    async def watch() -> None:
        while len(cluster.started) < 1024:
            turns.append(len(cluster.started))
            await asyncio.sleep(0)

    async def respond(request: Any) -> None:
        watching = asyncio.ensure_future(watch())
        try:
            await completions(request)
        finally:
            await watching

    body = json.dumps({"prompt": ["x"] * 1024}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    app = SimpleNamespace(served=Served(cluster))  # type: ignore[arg-type]
    scope = {"type": "http", "headers": [], "app": app}
    with pytest.raises(InputError, match="enough"):
        asyncio.run(respond(Request(scope, receive)))
    assert max(after - before for before, after in pairwise(turns)) <= 64


def test_a_body_that_never_begins_ends_in_time(monkeypatch):
    monkeypatch.setattr("baton.gateway.served.BODY_TIMEOUT_S", 0.01)

    async def receive() -> dict[str, Any]:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    app = SimpleNamespace(served=Served(Cluster()))  # type: ignore[arg-type]
    headers = [(b"content-length", b"5")]
    scope = {"type": "http", "headers": headers, "app": app}
    with pytest.raises(BodyTooSlow):
        asyncio.run(asyncio.wait_for(read_body(Request(scope, receive)), 20))


def test_a_body_that_has_arrived_as_a_whole_is_taken_without_a_message():
    async def run() -> bytes:
        resumed: list[bool] = []
        cycle = SimpleNamespace(
            more_body=True, disconnected=False, body=bytearray(b"{"), message_event=asyncio.Event(),
            flow=SimpleNamespace(resume_reading=lambda: resumed.append(True)), transport=None,
            scope={
                "type": "http", "http_version": "1.1", "headers": [],
                "app": SimpleNamespace(served=Served(Cluster())),
            },
        )  # type: ignore[arg-type]  # fmt: skip
        exchange = Exchange.begin(cycle, Place("", Phase.FRESH, 0.0))  # type: ignore[arg-type]
        assert exchange.take_body() is None  # the rest is still on its way
        cycle.body += b"}"
        cycle.more_body = False
        cycle.message_event.set()
        content = await read_body(Request(cycle.scope))  # type: ignore[arg-type]
        assert resumed == [True]
        assert not cycle.message_event.is_set()  # the next message is the end
        cycle.disconnected = True
        assert exchange.take_body() is None
        return content

    assert asyncio.run(run()) == b"{}"
