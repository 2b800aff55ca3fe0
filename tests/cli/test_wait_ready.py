"""The router states that ``baton wait-ready`` waits for."""

from argparse import Namespace

import pytest

from baton.cli.wait_ready import no_controller, wait_ready
from baton.proto.errors import ConnectionLost, TaskMismatch


class Router:
    """Answers each status request with the next state."""

    def __init__(self, task, *states):
        self.task = task
        self.states = list(states)

    def status(self, **_options):
        prefill, decode = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        workers = [
            {"id": f"{role}-{i}", "role": role, "state": "ready"}
            for role, count in (("prefill", prefill), ("decode", decode))
            for i in range(count)
        ]
        task = self.task if prefill or decode else ""
        return {"workers": workers, "handoffs": {}, "router": {"task": task}}


def waited(router, decode=None, timeout=5.0, **options):
    return wait_ready(router, None, decode, timeout, **options)


def test_it_waits_for_all_that_the_controller_wants_unless_told_otherwise():
    def wanted():
        return {"prefill": 1, "decode": 2}

    states = ((0, 0), (1, 1), (1, 2))
    assert waited(Router("generate", *states), expected=wanted)["decode"] == 2
    assert waited(Router("generate", *states), decode=1, expected=wanted)["decode"] == 1
    with pytest.raises(ConnectionLost, match="1 of 1 prefill and 1 of 2 decode"):
        waited(Router("generate", (1, 1)), timeout=0.05, expected=wanted)


def test_a_guessed_address_of_the_controller_can_be_named(monkeypatch):
    monkeypatch.delenv("BATON_ADMIN", raising=False)
    guessed = no_controller(Namespace(address="ipc:///run/x.sock", admin=None))
    assert guessed.endswith("give --prefill and --decode; name it with --admin")
    given = no_controller(Namespace(address="ipc:///run/x.sock", admin="ipc:///run/y.sock"))
    assert given.startswith("no controller answers at ipc:///run/y.sock, ")
    assert given.endswith("give --prefill and --decode")


def test_a_controller_that_answers_only_later_counts_from_then_on():
    wanted = {"prefill": 2, "decode": 1}
    answers = iter((None, wanted, wanted))
    ready = waited(Router("generate", (1, 0), (1, 1), (2, 1)), expected=lambda: next(answers))
    assert ready == wanted


def test_a_text_model_needs_a_decode_worker_unless_told_otherwise():
    assert waited(Router("generate", (0, 0), (1, 0), (1, 1))) == {"prefill": 1, "decode": 1}
    assert waited(Router("generate", (1, 0)), decode=0) == {"prefill": 1, "decode": 0}
    assert waited(Router("generate", (1, 1), (1, 2)), decode=2)["decode"] == 2
    with pytest.raises(ConnectionLost, match="1 of 1 prefill and 0 of 1 decode"):
        waited(Router("generate", (1, 0)), timeout=0.05)


def test_an_embedding_model_needs_none():
    assert waited(Router("embed", (0, 0), (1, 0))) == {"prefill": 1, "decode": 0}
    assert waited(Router("embed", (1, 0)), decode=0) == {"prefill": 1, "decode": 0}


def test_decode_workers_of_an_embedding_model_are_not_waited_for():
    with pytest.raises(TaskMismatch, match="has no decode workers"):
        waited(Router("embed", (0, 0), (1, 0)), decode=1)


def test_an_older_router_says_no_task():
    assert waited(Router("", (1, 1))) == {"prefill": 1, "decode": 1}
