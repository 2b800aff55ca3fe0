"""Requests that name a worker go there, or end in an error with the reason."""

import os
import signal

import pytest

from baton.proto.errors import (
    EndpointDead,
    EndpointDraining,
    EndpointUnknown,
    InputError,
    WorkerLost,
)

from ..processes import wait_until
from .driver import Answer, Job, ask, ask_all, collect, greedy
from .reference import DATA, cases_of

pytestmark = pytest.mark.cluster

CASE = cases_of("llama_plain")[3]
LONG = 1900


@pytest.fixture(scope="module")
def running(shared_cluster):
    return shared_cluster(model=DATA / "llama_plain", prefill=2, decode=2)


@pytest.fixture
def client(running):
    with running.client() as client:
        yield client


def job(endpoint: str, count: int = 64, **options) -> Job:
    return Job(CASE.prompt, greedy(count), {"target_endpoint": endpoint, **options})


def endpoint_of(running, name: str) -> str:
    return running.workers()[name]["endpoint"]


@pytest.mark.parametrize("pin", ["prefer", "strict"])
@pytest.mark.parametrize("name", ["decode-0", "decode-1", "prefill-0", "prefill-1"])
def test_the_named_worker_serves(running, client, name, pin):
    endpoint = endpoint_of(running, name)
    answers = ask_all(client, [job(endpoint, pin=pin)] * 6)
    assert {getattr(a, name.partition("-")[0]) for a in answers} == {name}
    assert all(a.tokens == CASE.greedy for a in answers)


def test_a_context_names_its_worker(running, client):
    from baton.proto.contexts.text import TextContext

    context = TextContext(
        max_length=len(CASE.prompt) + 64,
        tokens=CASE.prompt,
        sampling_params=greedy(64),
        ignore_eos=True,
        target_endpoint=endpoint_of(running, "decode-1"),
    )
    answer = collect(client.generate(context))
    assert (answer.tokens, answer.decode) == (CASE.greedy, "decode-1")


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:9", "ipc:///nowhere/decode-0.sock"])
def test_an_unknown_worker(client, endpoint):
    with pytest.raises(EndpointUnknown, match="names no worker"):
        ask(client, job(endpoint))
    assert ask(client, job(endpoint, fallback=True)).tokens == CASE.greedy


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "decode-0",
        "udp://127.0.0.1:5555",
        "inproc://decode-0",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:port",
        "tcp://::1:5555",
        "ipc://",
        "ipc://" + "x" * 108,
        "tcp://" + "x" * 600 + ":1",
        "tcp://127.0.0.1:5555\n",
    ],
)
@pytest.mark.parametrize("fallback", [False, True])
def test_a_malformed_endpoint(client, endpoint, fallback):
    with pytest.raises(InputError, match="endpoint") as raised:
        ask(client, job(endpoint, fallback=fallback))
    assert type(raised.value) is InputError


def kill(running, name: str) -> dict:
    """Kill a worker; returns its status once the router has seen its connection close."""
    victim = running.workers()[name]
    os.kill(victim["pid"], signal.SIGKILL)

    def seen() -> bool:
        worker = running.workers().get(name, {})
        return worker.get("state") != "ready" or worker["pid"] != victim["pid"]

    wait_until(seen, what="its end")
    return victim


@pytest.mark.parametrize("name", ["decode-0", "prefill-1"])
def test_a_dead_worker_until_its_successor_comes(running, client, name):
    victim = kill(running, name)
    with pytest.raises(
        EndpointDead, match=f"{name} .*: its (connection closed|process was killed)"
    ):
        ask(client, job(victim["endpoint"]))
    assert ask(client, job(victim["endpoint"], fallback=True)).tokens == CASE.greedy
    running.wait_replaced(name, victim["pid"])
    answer = ask(client, job(victim["endpoint"]))
    assert (answer.tokens, getattr(answer, name.partition("-")[0])) == (CASE.greedy, name)


@pytest.mark.parametrize("pin", ["prefer", "strict"])
def test_a_stream_leaves_its_dead_worker_unless_the_pin_is_strict(running, client, pin):
    whole = ask(client, Job(CASE.prompt, greedy(LONG))).tokens
    endpoint = endpoint_of(running, "decode-1")
    stream = job(endpoint, LONG, pin=pin).start(client)
    answer = Answer(list(next(stream).tokens))
    victim = kill(running, "decode-1")
    if pin == "strict":
        with pytest.raises(WorkerLost, match="strict pin to"):
            collect(stream, answer)
        assert answer.tokens == whole[: len(answer.tokens)]
    else:
        collect(stream, answer)
        assert (answer.tokens, answer.decode) == (whole, "decode-0")
    running.wait_replaced("decode-1", victim["pid"])


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_draining_worker(running, client, name):
    """What runs on it ends as usual; nothing new is taken, except elsewhere."""
    endpoint = endpoint_of(running, name)
    whole = ask(client, Job(CASE.prompt, greedy(LONG))).tokens
    stream = job(endpoint, LONG).start(client)
    answer = Answer(list(next(stream).tokens))
    assert client.drain(name) == "draining"
    with pytest.raises(EndpointDraining, match=f"{name} .* is draining"):
        ask(client, job(endpoint))
    elsewhere = ask(client, job(endpoint, fallback=True))
    assert elsewhere.tokens == CASE.greedy
    assert name not in (elsewhere.prefill, elsewhere.decode)
    assert collect(stream, answer).tokens == whole
