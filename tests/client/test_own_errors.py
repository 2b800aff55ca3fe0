"""An exception of the client's own code ends one request, and no other and no clock."""

from __future__ import annotations

import pytest

from baton.client.events import Ended, NewTokens, Raised, Received, Start
from baton.client.request import Request
from baton.client.requests import TEXT
from baton.proto.errors import InternalError
from baton.proto.ids import request_key
from baton.proto.wire.messages import Cancel, Submitted, TokenRun, Tokens

from .bench import ME, SECRET, Bench, messages, spec


@pytest.fixture
def plant(monkeypatch):
    def planted(owner, name, harmed):
        original = getattr(owner, name)

        def raising(one, *arguments, **named):
            if harmed(one):
                raise KeyError("planted")
            return original(one, *arguments, **named)

        monkeypatch.setattr(owner, name, raising)

    return planted


def two():
    """Two running requests, r and s, with their keys."""
    bench, keys = Bench(), {}
    for serial, name in enumerate("rs", 1):
        bench.do(Start(spec(name)))
        keys[name] = request_key(ME, name, serial)
        bench.hear(Submitted(request_id=name, request=keys[name], secret=SECRET, attempt=1))
    return bench, keys


def is_r(request):
    return request.spec.request_id == "r"


def check(actions):
    (ended,) = [action for action in actions if isinstance(action, Ended)]
    assert ended.request_id == "r"
    assert isinstance(ended.error, InternalError)
    assert str(ended.error) == TEXT
    assert isinstance(ended.error.__cause__, KeyError)
    assert [action for action in actions if isinstance(action, Raised)]
    assert [one.request_id for one in messages(actions, Cancel)] == ["r"]


def test_tokens_that_raise_end_their_request_alone(plant):
    bench, keys = two()
    plant(Request, "take", is_r)
    runs = [TokenRun(keys[name], 1, len(spec(name).context.tokens), [7]) for name in "rs"]
    actions = bench.do(Received(Tokens(runs=runs)))
    check(actions)
    assert [one.request_id for one in actions if isinstance(one, NewTokens)] == ["s"]


def test_a_timer_that_raises_ends_its_request_alone(plant):
    bench, _ = two()
    plant(Request, "repeat", is_r)
    check(bench.later(2.0))
    assert "r" not in bench.core._requests and "s" in bench.core._requests


def test_a_start_that_raises_ends_that_request(plant):
    bench = Bench()
    plant(Request, "repeat", is_r)
    check(bench.do(Start(spec("r"))))
    assert not bench.core.active
