"""An exception of the gateway's own code harms one HTTP request, never the process or the feed."""

from __future__ import annotations

import asyncio
import json

import pytest

from baton.gateway import dashboard
from baton.gateway.dashboard import Feed
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.served import Served

from .test_app import Cluster, ask
from .test_dashboard import history, report


class Raising(Cluster):
    """Every call raises an exception that is none of Baton's errors."""

    def generate(self, prompt, _params, **options):
        raise KeyError("planted")

    async def model(self):
        raise KeyError("planted")

    async def status(self, **_):
        raise KeyError("planted")


@pytest.mark.parametrize(("method", "path", "body"), [
    ("POST", "/v1/completions", {"prompt": "x"}),
    ("POST", "/v1/completions", {"prompt": "x", "stream": True}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("POST", "/v1/responses", {"input": "x"}),
    ("POST", "/v1/embeddings", {"input": "x"}),
    ("POST", "/tokenize", {"prompt": "x"}),
    ("POST", "/detokenize", {"tokens": [7]}),
    ("GET", "/v1/models", None),
    ("GET", "/ready", None),
])  # fmt: skip
def test_a_handler_that_raises_answers_500_with_the_request_id(method, path, body):
    status, content = ask(Raising(), method, path, body, [(b"x-request-id", b"mine")])
    error = json.loads(content)["error"]
    assert (status, error["code"]) == (500, "internal")
    wanted = "an internal error (request mine); the gateway's log has its cause"
    assert error["message"] == wanted


def test_the_feed_goes_on_after_an_exception(monkeypatch):
    monkeypatch.setattr(dashboard, "INTERVAL_S", 0.0)
    good = report("a", finished=3, p50=None, heard=0.1, state="ready")
    answers = [KeyError("planted"), {**good, "history": history([], [], [])}]

    class Flaky(Cluster):
        async def status(self, **_):
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

    async def read():
        metrics = GatewayMetrics()
        events = Feed(metrics).events(Served(Flaky()))
        first = await anext(events)
        second = first
        while b"error" in second:
            second = await anext(events)
        await events.aclose()
        return metrics, first, second

    metrics, first, second = asyncio.run(asyncio.wait_for(read(), 30.0))
    assert b"an internal error; the gateway's log has its cause" in first
    assert b"planted" not in first
    assert b'"finished":3' in second
    assert metrics.own_errors == 1
    (family,) = [f for f in metrics.families() if f.name == "baton_gateway_internal_errors_total"]
    assert family
