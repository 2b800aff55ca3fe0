"""Commands with several router addresses."""

import json

import pytest

from baton.cli import status, wait_ready
from baton.cli.command import main
from baton.proto.errors import ConnectionLost

A, B = "ipc:///run/a", "tcp://10.0.0.2:4000"


def report(name, decode=1):
    workers = [{"id": "prefill-0", "role": "prefill", "state": "ready"}]
    workers += [{"id": f"decode-{i}", "role": "decode", "state": "ready"} for i in range(decode)]
    router = {"name": name, "task": "generate", "clients": 2, "requests": {"in_flight": 3}}
    return {"workers": workers, "handoffs": {}, "router": router}


@pytest.fixture
def routers(monkeypatch):
    """Fake routers by address; other addresses do not answer."""
    answering = {A: report("router-0"), B: report("router-1")}

    class Client:
        def __init__(self, address, keys, connect_timeout):
            self.address = address

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def status(self, **_):
            if self.address not in answering:
                raise ConnectionLost(f"no answer from {self.address}")
            return answering[self.address]

    monkeypatch.setattr(status, "Client", Client)
    monkeypatch.setattr(wait_ready, "Client", Client)
    return answering


def test_status_shows_each_router(routers, capsys):
    assert main(["status", "--address", f"{A},{B}"]) == 0
    text = capsys.readouterr().out
    assert f"router-0 at {A}: 3 requests in flight" in text
    assert f"router-1 at {B}: 3 requests in flight" in text
    assert text.count("decode-0") == 2


def test_status_of_one_router_is_the_bare_report(routers, capsys, monkeypatch):
    monkeypatch.setenv("BATON_ADDRESS", A)
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == routers[A]


def test_a_router_that_does_not_answer_is_named_beside_the_others(routers, capsys, monkeypatch):
    del routers[B]
    monkeypatch.setenv("BATON_ADDRESS", f"{A}, {B}")
    assert main(["status"]) == 0
    assert f"router at {B}: no answer" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["routers"]
    assert shown[A]["router"]["name"] == "router-0"
    assert "no answer" in shown[B]["error"]


def test_status_fails_when_no_router_answers(routers, capsys):
    routers.clear()
    assert main(["status", "--address", f"{A},{B}"]) == 1
    assert "no answer" in capsys.readouterr().err


def test_wait_ready_waits_for_every_router(routers, capsys):
    line = ["wait-ready", "--timeout", "0.3", "--address", f"{A},{B}"]
    assert main(line) == 0
    routers[B] = report("router-1", decode=0)
    assert main(line) == 1
    assert "0 of 1 decode" in capsys.readouterr().err


def test_a_bad_address_in_a_list_is_a_wrong_setting(capsys):
    assert main(["status", "--address", f"{A},tcp://nowhere"]) == 2
    assert "tcp://host:port" in capsys.readouterr().err
