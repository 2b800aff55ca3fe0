"""The real router process over ipc, with stub clients and workers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from baton.client import Client
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import (
    Abort,
    Accepted,
    Adopt,
    Assign,
    Describe,
    Described,
    FinalAck,
    Heartbeat,
    Hello,
    Message,
    Ping,
    Pong,
    Rejected,
    RequestState,
    Resume,
    RouterToClient,
    RouterToWorker,
    Status,
    StatusReport,
    Submit,
    Submitted,
    Terminal,
    TokenRun,
    Tokens,
    Welcome,
)
from baton.proto.wire.proofs import Holder, assignment_proof
from baton.proto.wire.wire_context import WireContext, WireTokens
from baton.runtime.process.main import dump_settings

pytestmark = pytest.mark.integration


class Peer:
    """A DEALER socket that sends and receives envelopes."""

    def __init__(
        self, address: str, name: str, union: object, context: zmq.Context, hwm: int
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, hwm)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.name = name
        self._encoder, self._decoder = EnvelopeEncoder(), EnvelopeDecoder[Message](union)
        self.heard: list[Message] = []

    def say(self, *messages: Message) -> None:
        self.socket.send_multipart(self._encoder.encode(messages))

    def read(self, timeout: float = 0.0) -> None:
        while self.socket.poll(int(timeout * 1000)):
            messages = self._decoder.decode(self.socket.recv_multipart())
            nonces = [m.nonce for m in messages if isinstance(m, Ping)]
            if nonces:
                self.say(*[Pong(nonce=nonce) for nonce in nonces])
            self.heard += messages
            timeout = 0.0

    def wait(self, kind: type, timeout: float = 30.0, **fields: object):
        """Wait for a message of a type (with these fields), remove and return it."""
        end = time.monotonic() + timeout
        while True:
            for message in self.heard:
                if isinstance(message, kind) and all(
                    getattr(message, name) == value for name, value in fields.items()
                ):
                    self.heard.remove(message)
                    return message
            left = end - time.monotonic()
            if left <= 0:
                raise AssertionError(f"{self.name} did not hear {kind.__name__}: {self.heard}")
            self.read(left)

    def close(self) -> None:
        self.socket.close()


class Router:
    """One router process and its stub peers."""

    def __init__(self, folder: Path, config) -> None:
        self.folder, self.config = folder, config
        (folder / "router.json").write_text(dump_settings(config))
        self.context = zmq.Context()
        self.peers: list[Peer] = []
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "baton.router", "--config", str(self.folder / "router.json")],
            stderr=(self.folder / "router.log").open("ab"),
        )

    def client(self, name: str = "client", hwm: int = 1000) -> Peer:
        return self._peer(self.config.client_address, name, RouterToClient, hwm)

    def worker(self, role: str, card, incarnation: int = 1) -> Peer:
        name = f"{role}-{incarnation}"
        worker = self._peer(self.config.worker_address, name, RouterToWorker)
        hello = Hello(
            version=PROTOCOL_VERSION, worker=role, role=role, incarnation=incarnation, pid=1,
            endpoint=f"ipc:///run/{role}", model=card,
        )  # fmt: skip
        worker.say(hello)
        worker.wait(Welcome)
        return worker

    def _peer(self, address: str, name: str, union: object, hwm: int = 1000) -> Peer:
        peer = Peer(address, name, union, self.context, hwm)
        self.peers.append(peer)
        return peer

    def wait_said(self, event: str, timeout: float = 30.0) -> None:
        """Wait until the router's log contains ``event``."""
        end = time.monotonic() + timeout
        while event not in (self.folder / "router.log").read_text():
            assert time.monotonic() < end, f"no {event} in the log"
            time.sleep(0.005)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.context.term()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def start_router(tmp_path: Path, config: Callable) -> Iterator[Callable[..., Router]]:
    started: list[Router] = []

    def start(**settings: object) -> Router:
        settings = {
            "client_address": f"ipc://{tmp_path}/clients",
            "worker_address": f"ipc://{tmp_path}/workers",
            "worker_timeout_s": 30.0,
            **settings,
        }
        started.append(Router(tmp_path, config(**settings)))
        return started[-1]

    yield start
    for router in started:
        router.close()


def submit(request_id: str, new: int = 20, prompt: int = 10) -> Submit:
    tokens = np.arange(prompt, dtype=np.int32) % 1000
    return Submit(
        request_id=request_id,
        context=WireContext(tokens=WireTokens(tokens), max_length=prompt + new),
    )


def serve(router: Router, card) -> tuple[Peer, Peer, Peer]:
    return router.worker("prefill", card, 1), router.worker("decode", card, 2), router.client()


def test_a_request_from_submit_to_acknowledgement_and_a_clean_end(start_router, card):
    router = start_router()
    prefill, decode, client = serve(router, card)
    client.say(submit("r", prompt=3000))
    key = client.wait(Submitted).request
    assign = prefill.wait(Assign)
    assert assign.context.tokens.array.tolist() == list(range(1000)) * 3
    prefill.say(Accepted(request=key, attempt=1), Tokens(runs=[TokenRun(key, 1, 3000, [5])]))
    assert client.wait(Tokens).runs == [TokenRun(key, 1, 3000, [5])]
    decode.say(
        Tokens(runs=[TokenRun(key, 1, 3001, [6])]),
        Terminal(request=key, attempt=1, position=3002, status="end_of_sequence"),
    )
    assert client.wait(Terminal).decode == "decode"
    client.say(FinalAck(requests=[key]), Status())
    report = msgspec.json.decode(client.wait(StatusReport).report)
    assert report["router"]["requests"]["unacknowledged"] == 0
    router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(30) == 0
    assert not list(router.folder.glob("clients")) + list(router.folder.glob("workers"))


def test_a_terminating_router_finishes_what_runs_and_takes_nothing_new(start_router, card):
    router = start_router()
    prefill, decode, client = serve(router, card)
    client.say(submit("r"))
    key = client.wait(Submitted).request
    prefill.wait(Assign)
    router.process.send_signal(signal.SIGTERM)
    router.wait_said("router.closing")
    client.say(submit("late"))
    assert client.wait(Terminal, request_id="late").code == "router_closing"
    decode.say(
        Tokens(runs=[TokenRun(key, 1, 10, [6])]),
        Terminal(request=key, attempt=1, position=11, status="end_of_sequence"),
    )
    assert client.wait(Terminal).request == key
    client.say(FinalAck(requests=[key]))
    assert router.process.wait(30) == 0


def test_client_death_reaches_both_workers_at_once(start_router, card):
    router = start_router()
    prefill, decode, _ = serve(router, card)
    doomed = router.client("doomed")
    doomed.say(submit("r"))
    key = doomed.wait(Submitted).request
    prefill.wait(Assign)
    prefill.say(Accepted(request=key, attempt=1))
    doomed.close()
    assert prefill.wait(Abort).request == decode.wait(Abort).request == key


def worker_states(client) -> dict[str, str]:
    client.say(Status())
    report = msgspec.json.decode(client.wait(StatusReport).report)
    return {worker["id"]: worker["state"] for worker in report["workers"]}


def test_worker_death_is_seen_and_the_request_replayed(start_router, card):
    router = start_router()
    prefill, decode, client = serve(router, card)
    client.say(submit("r"))
    key = client.wait(Submitted).request
    prefill.wait(Assign)
    prefill.say(Accepted(request=key, attempt=1))
    decode.say(Tokens(runs=[TokenRun(key, 1, 10, [6, 7])]))
    client.wait(Tokens)
    decode.close()
    while worker_states(client)["decode"] == "ready":
        pass  # wait for the router: the stub asks for the name only once
    other = router.worker("decode", card, 3)
    again = prefill.wait(Assign)
    assert (again.attempt, again.emitted, again.decode_incarnation) == (2, [6, 7], 3)
    other.say(Tokens(runs=[TokenRun(key, 2, 12, [8])]))
    assert client.wait(Tokens).runs[0].position == 12


def test_a_silent_worker_is_declared_dead(start_router, card):
    router = start_router(worker_timeout_s=2.0)
    prefill, _decode, client = serve(router, card)
    end = time.monotonic() + 60.0
    states: dict[str, str] = {}
    while states.get("decode") != "dead" and time.monotonic() < end:
        prefill.say(Heartbeat(incarnation=1, progress=0))
        states = worker_states(client)
    assert states == {"prefill": "ready", "decode": "dead"}


def test_random_bytes_on_both_sockets_leave_the_router_serving(start_router, card):
    router = start_router()
    prefill, _decode, client = serve(router, card)
    rng = random.Random(5)
    good = EnvelopeEncoder().encode([submit("x"), Ping(nonce=1)])[0]
    for peer in (client, prefill):
        for _ in range(300):
            body = bytearray(good if rng.random() < 0.7 else rng.randbytes(rng.randrange(60)))
            for _ in range(rng.randrange(4)):
                if body:
                    body[rng.randrange(len(body))] = rng.randrange(256)
            peer.socket.send_multipart([bytes(body), *[b"x" * 10] * rng.randrange(3)])
    wrong = router.client("wrong")
    wrong.say(Accepted(request=b"k" * 16, attempt=1))
    assert wrong.wait(Rejected).code == "decode_failed"
    fresh = router.client("fresh")
    fresh.say(submit("alive"))
    fresh.wait(Submitted)
    assert router.process.poll() is None
    prefill.wait(Assign, request_id="alive")


def test_a_client_that_does_not_read_is_held_back_and_gets_everything_later(start_router, card):
    router = start_router()
    large = msgspec.structs.replace(card, max_length=1 << 20)
    prefill, decode, quick = serve(router, large)
    slow = router.client("slow", hwm=1)
    keys = []
    for client in (slow, quick):
        client.say(submit("r", new=100_000))
        keys.append(client.wait(Submitted).request)
        prefill.say(Accepted(request=keys[-1], attempt=1))
    for step in range(800):
        tokens = [step % 1000] * 100
        runs = [TokenRun(key, 1, 10 + 100 * step, tokens) for key in keys]
        decode.say(Tokens(runs=runs))
        quick.read(30.0)  # one envelope per step
    for key in keys:
        decode.say(Terminal(request=key, attempt=1, position=80_010, status="maximum_length"))
    for client, key in ((quick, keys[1]), (slow, keys[0])):
        client.wait(Terminal)
        got: list[int] = []
        runs = [r for m in client.heard if isinstance(m, Tokens) for r in m.runs]
        for run in runs:
            assert run.position == 10 + len(got)
            got += run.tokens
        assert got == [step % 1000 for step in range(800) for _ in range(100)]
        assert (len(runs) < 800) == (client is slow)  # the held tokens arrived as one run
        client.say(FinalAck(requests=[key]))


def test_a_client_that_pauses_keeps_its_connection(start_router, card):
    """A client with a full queue does not answer ZeroMQ's heartbeats either."""
    router = start_router()
    prefill, decode, _ = serve(router, card)
    slow = router.client("slow", hwm=1)
    slow.say(submit("r"))
    key = slow.wait(Submitted).request
    prefill.say(Accepted(request=key, attempt=1))
    for step in range(20):
        decode.say(Tokens(runs=[TokenRun(key, 1, 10 + step, [step])]))
        time.sleep(0.01)  # one envelope per step
    time.sleep(1.5)
    decode.say(Terminal(request=key, attempt=1, position=30, status="maximum_length"))
    assert slow.wait(Terminal).status == "maximum_length"
    runs = [run for m in slow.heard if isinstance(m, Tokens) for run in m.runs]
    assert [token for run in runs for token in run.tokens] == list(range(20))


def test_describe_reads_the_model_folder(start_router, card, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"a": 1}')
    router = start_router(model_folder=str(folder))
    client = router.client()
    client.say(Describe(files=["tokenizer.json"]))
    assert client.wait(Described).files == {"tokenizer.json": b'{"a": 1}'}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('{"client_address": "tcp://0.0.0.0:5555", "worker_address": "ipc:///x/y"}', "CURVE"),
        ('{"client_address": "ipc:///x/y"}', "worker_address"),
        ('{"colour": 1}', "colour"),
    ],
)
def test_wrong_settings_end_with_one_clear_line(tmp_path, settings, words):
    path = tmp_path / "router.json"
    path.write_text(settings)
    done = subprocess.run(
        [sys.executable, "-m", "baton.router", "--config", str(path)],
        capture_output=True, text=True, timeout=30, env=os.environ, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_killed_router_comes_back_and_the_stream_continues(start_router, card):
    router = start_router(cluster_key="31" * 32)
    prefill, decode, client = serve(router, card)
    client.say(submit("r"))
    submitted = client.wait(Submitted)
    prefill.wait(Assign)
    decode.say(Tokens(runs=[TokenRun(submitted.request, 1, 10, [6, 7])]))
    client.wait(Tokens)
    router.process.kill()
    router.process.wait()
    router.start()
    again = router.client("again")
    old = submit("r")
    fields = {f: getattr(submitted, f) for f in ("request_id", "request", "secret", "attempt")}
    again.say(Resume(**fields, position=12, context=old.context, emitted=[6, 7]))
    again.wait(Submitted)
    key, request = bytes.fromhex(router.config.cluster_key), submitted.request
    proof = assignment_proof(key, request, submitted.attempt, Holder(2))
    held = [RequestState(request, 1, 13, 10, proof=proof)]
    hello = Hello(
        version=PROTOCOL_VERSION, worker="decode", role="decode", incarnation=2, pid=1,
        endpoint="ipc:///run/decode", model=card, requests=held,
    )  # fmt: skip
    decode.say(hello)
    assert decode.wait(Adopt).position == 12
    decode.say(Tokens(runs=[TokenRun(submitted.request, 1, 12, [8])]))
    assert again.wait(Tokens).runs == [TokenRun(submitted.request, 1, 12, [8])]


def test_a_client_gets_a_tokenizer_larger_than_any_other_message(start_router, card, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(text := os.urandom(20 << 20))
    router = start_router(model_folder=str(tmp_path))
    serve(router, card)
    with Client(router.config.client_address) as client:
        assert client.describe().files["tokenizer.json"] == text


def test_text_files_that_no_message_can_carry_are_refused_at_start(start_router, tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(64 << 20)
    router = start_router(model_folder=str(tmp_path))
    assert router.process.wait(30) == 1
    assert "exceed the limit of 66060288 bytes" in (tmp_path / "router.log").read_text()
