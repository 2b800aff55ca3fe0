"""A recorded proof or ticket is of no use to another key, before and after restarts.

The victim is a prefill worker that speaks by hand: a request is assigned to it, so the test has its
proofs and its ticket as they were on the wire. Rogues with valid keys of other workers replay them.
Controls show that the records are genuine: the victim itself succeeds with them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from baton.kv_transfer.checksums import envelope_digest
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.envelope import EnvelopeEncoder
from baton.proto.wire.messages import (
    Accepted,
    Heartbeat,
    Hello,
    Message,
    Open,
    PrefillToDecode,
    RequestState,
    Reserve,
    Terminal,
    TokenRun,
    Tokens,
    WorkerToRouter,
)
from baton.runtime.keys.keyring import add_key, make_folder

from ..processes import wait_until
from .driver import collect, greedy
from .raw import RawPeer, life_of
from .reference import DATA, cases_of
from .rogues import FORGED, samples
from .scan import keys_of
from .test_keys import free_port, worker_address

pytestmark = pytest.mark.cluster

MODEL, NEW = "llama_plain", 48
GRANTING = ("Grant", "Committed", "Credit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Keys; the victim and the rogues have separate keys."""
    folder = tmp_path_factory.mktemp("k") / "keys"
    make_folder(folder)
    for name in ("prefill-8", "prefill-9", "decode-9"):
        add_key(folder, name.partition("-")[0], [name])
    return folder


@pytest.fixture(scope="module")
def running(shared_cluster, folder):
    address = f"tcp://127.0.0.1:{free_port()}"
    return shared_cluster(
        model=DATA / MODEL, prefill=1, decode=1, transport="tcp", address=address, keys=str(folder)
    )


class ByHand:
    """A worker with a key of its own that speaks by hand, registered with the router."""

    def __init__(self, running: Any, folder: Any, name: str, *, draining: bool) -> None:
        self.name, self.role = name, name.partition("-")[0]
        self._folder = folder
        keys = keys_of(folder, name, "router")
        with running.client() as client:
            card = client.describe().card
        (hello,) = (one for one in samples(WorkerToRouter) if isinstance(one, Hello))
        self.life = life_of(keys)
        self.hello = replace(
            hello, version=PROTOCOL_VERSION, worker=name, role=self.role, draining=draining,
            endpoint=f"tcp://127.0.0.1:{free_port()}", model=card, requests=[], **self.life,
        )  # fmt: skip
        (opening,) = (one for one in samples(PrefillToDecode) if isinstance(one, Open))
        self._open = replace(
            opening, version=PROTOCOL_VERSION, worker=name, model=card, transports=["zmq"],
            pool=None, device_pool=None, **self.life,
        )  # fmt: skip
        self._peer = RawPeer(worker_address(running), keys=keys)
        self.register()

    def register(self, *requests: RequestState) -> None:
        """Send a Hello that names requests, and wait for the Welcome."""
        self._peer.say(replace(self.hello, requests=list(requests)))
        self.hear("Welcome")

    def hear(self, kind: str) -> dict:
        """The next message of a kind; the worker lives on meanwhile."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            self._peer.say(Heartbeat(incarnation=self.life["incarnation"], progress=0))
            with contextlib.suppress(zmq.Again):
                while self._peer._socket.poll(100):
                    message = self._peer.hear()
                    if message["type"] == kind:
                        return message
        raise AssertionError(f"{self.name} received no {kind}")

    def say(self, *messages: Message) -> None:
        self._peer.say(*messages)

    def reserve(self, endpoint: str, assign: dict, incarnation: int) -> str:
        """Ask a decode worker for blocks with a recorded ticket; the kind of the answer."""
        encoder = EnvelopeEncoder(digest=envelope_digest)
        ask = Reserve(
            request=assign["request"], attempt=assign["attempt"], incarnation=incarnation,
            hashes=[], num_tokens=8, growth=8, deadline=30.0, ticket=assign["ticket"],
        )  # fmt: skip
        with RawPeer(endpoint, 30.0, keys_of(self._folder, self.name, "decode")) as peer:
            peer.send(*encoder.encode([self._open]))
            opened = peer.hear()["type"]
            assert opened == "Opened", opened
            peer.send(*encoder.encode([ask]))
            return str(peer.hear()["type"])

    def end(self) -> None:
        self._peer.__exit__()


@pytest.fixture
def workers(running, folder) -> Iterator[tuple[ByHand, ByHand, ByHand]]:
    made = [
        ByHand(running, folder, "prefill-8", draining=False),
        ByHand(running, folder, "prefill-9", draining=True),
        ByHand(running, folder, "decode-9", draining=True),
    ]
    yield made[0], made[1], made[2]
    for one in made:
        one.end()


def lies(assign: dict, proof: bytes) -> list[Message]:
    """What the holder of a proof may say about its request, but with other tokens."""
    request, attempt = assign["request"], assign["attempt"]
    return [
        Accepted(request=request, attempt=attempt, proof=proof),
        Tokens(runs=[TokenRun(request, attempt, 1, [FORGED] * 3)]),
        Terminal(request=request, attempt=attempt, position=4, status="end_of_sequence"),
    ]


def held(assign: dict, proof: bytes) -> RequestState:
    request, attempt = assign["request"], assign["attempt"]
    return RequestState(request, attempt, 1, 1, router="router", proof=proof)


def unproven(running: Any) -> int:
    with running.client() as client:
        return int(client.status()["router"]["dropped"].get("unproven", 0))


def replay_at_router(running: Any, rogue: ByHand, assign: dict, proof: bytes) -> None:
    """Show the proof with every message that may carry one; the router drops them all."""
    before = unproven(running)
    rogue.say(*lies(assign, proof))
    rogue.register(held(assign, proof))
    wait_until(lambda: unproven(running) > before, what="a dropped claim")


def replay_at_workers(running: Any, rogue: ByHand, folder: Any, assign: dict) -> None:
    """Show the ticket to the decode worker, and send the Assign's request to the prefill worker."""
    status = running.workers()
    for incarnation in (rogue.life["incarnation"], assign["victim"]):
        if rogue.role == "prefill":
            answer = rogue.reserve(status["decode-0"]["endpoint"], assign, incarnation)
            assert answer == "Aborted", answer
    keys = keys_of(folder, rogue.name, "prefill")
    with RawPeer(status["prefill-0"]["endpoint"], 1.0, keys) as peer:
        peer.send(*EnvelopeEncoder().encode(lies(assign, assign["proof"])))
        with contextlib.suppress(zmq.Again):
            while True:
                assert peer.hear()["type"] == "Rejected"


def test_records_of_another_key_are_refused_before_and_after_restarts(running, folder, workers):
    victim, *rogues = workers
    case = cases_of(MODEL)[1]
    with running.client() as client:
        stream = client.generate(case.prompt, greedy(NEW), target_endpoint=victim.hello.endpoint)
        assign = {**victim.hear("Assign"), "victim": victim.life["incarnation"]}
        honest = running.workers()["prefill-0"]["endpoint"]
        other = client.generate(case.prompt, greedy(NEW), target_endpoint=honest)

        def stay_alive() -> None:  # or the router would move the victim's request
            victim.say(Heartbeat(incarnation=victim.life["incarnation"], progress=0))

        def replay() -> None:
            for rogue in rogues:
                for proof in (assign["proof"], assign["decode_proof"]):
                    stay_alive()
                    replay_at_router(running, rogue, assign, proof)
                stay_alive()
                replay_at_workers(running, rogue, folder, assign)
                stay_alive()

        replay()
        endpoint = running.workers()["decode-0"]["endpoint"]
        own = victim.life["incarnation"]
        assert victim.reserve(endpoint, assign, own) == "Grant"  # so the ticket is genuine
        assert collect(other).tokens == case.greedy[:NEW]

        pids = running.pids()
        os.kill(pids["router"], signal.SIGKILL)
        wait_until(lambda: running.pids().get("router", pids["router"]) != pids["router"])
        for one in workers:
            one.register()
        before = unproven(running)
        victim.register(held(assign, assign["proof"]))
        assert unproven(running) == before  # so the proof is genuine, also after the restart
        replay()

        os.kill(pids["decode-0"], signal.SIGKILL)
        wait_until(lambda: running.pids().get("decode-0", 0) not in (0, pids["decode-0"]))
        wait_until(lambda: running.workers().get("decode-0", {}).get("state") == "ready")
        for rogue in rogues:
            replay_at_workers(running, rogue, folder, assign)

        victim.end()  # declared dead; another worker serves its request
        answer = collect(stream)
        assert answer.tokens == case.greedy[:NEW]
        assert answer.status == "maximum_length"
