"""Peers with valid keys change nothing about the requests of others.

Each role has a rogue that sends every message of its sockets about requests of others,
while streams run and while a router is replaced. Tokens, ends and blocks stay as without them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator

import pytest

from baton.client import Client, Generation
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.envelope import encode_kv_header
from baton.proto.wire.messages import (
    Accepted,
    ClientToRouter,
    Hello,
    KVFrame,
    Message,
    Open,
    PrefillToDecode,
    RouterToWorker,
    Terminal,
    TokenRun,
    Tokens,
    WorkerToRouter,
)
from baton.runtime.keys.keyring import add_key, make_folder

from ..processes import wait_until
from .driver import Job, collect, greedy
from .raw import RawPeer, life_of
from .reference import DATA, cases_of
from .rogues import ATTEMPTS, FORGED, Rogue, grants, hostile, samples
from .scan import keys_of
from .test_keys import free_port, ports_of, worker_address

pytestmark = pytest.mark.cluster

MODEL = "llama_plain"
STREAMS, LENGTH = 8, 1500


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Keys; the rogues have separate keys."""
    folder = tmp_path_factory.mktemp("k") / "keys"
    make_folder(folder)
    for name in ("prefill-9", "decode-9", "client-9"):
        add_key(folder, name.partition("-")[0], [name])
    return folder


@pytest.fixture(scope="module")
def running(shared_cluster, folder):
    port = free_port()
    return shared_cluster(
        model=DATA / MODEL, prefill=1, decode=2,
        transport="tcp", address=f"tcp://127.0.0.1:{port}", keys=str(folder),
    )  # fmt: skip


@pytest.fixture(scope="module")
def truth(running) -> list[list[int]]:
    """What the streams give without rogues."""
    with running.client() as client:
        return [collect(generation).tokens for generation in begun(client, client)]


def begun(client: Client, watcher: Client) -> list[Generation]:
    """The streams, when all of them are with a decode worker."""
    before = watcher.status(handoffs=0)["handoffs"]["count"]
    cases = cases_of(MODEL)
    jobs = [Job(cases[i % len(cases)].prompt, greedy(LENGTH)) for i in range(STREAMS)]
    generations = [job.start(client) for job in jobs]
    wait_until(lambda: watcher.status()["handoffs"]["count"] >= before + STREAMS)
    return generations


class Gang:
    """A rogue of every role at every socket its key lets it connect to."""

    def __init__(self, running, folder) -> None:
        self.victims: dict[bytes, int] = {}
        self._running, self._folder = running, folder
        with running.client() as client:
            self._card = client.describe().card
        workers = running.workers()
        self.rogues = [
            self._worker("prefill"),
            self._worker("decode"),
            self._peer("client-9", "router", running.address, ClientToRouter),
            *(
                self._at_decode(file, worker)
                for worker in workers.values()
                if worker["role"] == "decode"
                for file in ("prefill-9", "router")
            ),
            self._peer("router", "prefill", workers["prefill-0"]["endpoint"], RouterToWorker),
        ]
        self._frames = [self._data_sender(worker) for worker in ("decode-0", "decode-1")]

    def _peer(self, file, server, address, union, **own) -> Rogue:
        keys = keys_of(self._folder, file, server)
        return Rogue(RawPeer(address, keys=keys), self.victims, self._speech(union, **own))

    def _speech(self, union, **own):
        def speech(request: tuple[bytes, int]) -> Iterator[Message]:
            for attempt in ATTEMPTS:
                position = request[1] + random.randrange(200)
                yield from hostile(union, request, attempt, position, own)

        return speech

    def _worker(self, role: str) -> Rogue:
        """Idle and draining: nothing is ever assigned to it. To an Adopt it answers with lies."""
        keys = keys_of(self._folder, f"{role}-9", "router")
        own = {
            "version": PROTOCOL_VERSION, "worker": f"{role}-9", "role": role, "draining": True,
            **life_of(keys), "endpoint": f"tcp://127.0.0.1:{free_port()}",
            "model": self._card, "decode": "decode-0", "prefill": f"{role}-9",
        }  # fmt: skip

        def lies(message: dict) -> list[Message]:
            if message["type"] != "Adopt":
                return []
            key, at = message["request"], message["position"]
            claim = Accepted(request=key, attempt=1, proof=b"?" * 16)
            forged = Tokens(runs=[TokenRun(key, 1, at, [FORGED] * 3)])
            end = Terminal(request=key, attempt=1, position=at + 3, status="end_of_sequence")
            return [claim, forged, end]

        (hello,) = (one for one in samples(WorkerToRouter) if isinstance(one, Hello))
        fields = {n: v for n, v in own.items() if n in hello.__struct_fields__}
        first = type(hello)(
            **{n: getattr(hello, n) for n in hello.__struct_fields__} | fields | {"requests": []}
        )
        return Rogue(
            RawPeer(worker_address(self._running), keys=keys),
            self.victims,
            self._speech(WorkerToRouter, **own),
            lambda: [first],
            answer=lies,
        )

    def _at_decode(self, file: str, worker: dict) -> Rogue:
        """Opens a link and then sends messages about the grants and requests of others."""
        keys = keys_of(self._folder, file, "decode")
        own = {
            "version": PROTOCOL_VERSION, "worker": "prefill-9", **life_of(keys),
            "model": self._card, "transports": ["zmq"], "pool": None, "device_pool": None,
        }  # fmt: skip
        (opening,) = (one for one in samples(PrefillToDecode) if isinstance(one, Open))
        first = type(opening)(**{n: own.get(n, getattr(opening, n)) for n in own})
        guesses = grants(worker["incarnation"])

        def speech(request: tuple[bytes, int]) -> Iterator[Message]:
            for attempt in ATTEMPTS:
                about = {**own, "grant": random.choice(guesses), "hashes": [], "num_tokens": 40,
                         "growth": 40, "grammar": None}  # fmt: skip
                yield from hostile(PrefillToDecode, request, attempt, request[1], about)

        peer = RawPeer(worker["endpoint"], keys=keys)
        return Rogue(peer, self.victims, speech, lambda: [first], sealed=True)

    def _data_sender(self, name: str) -> RawPeer:
        endpoint = self._running.workers()[name]["endpoint"]
        ports = ports_of(self._running)[name]
        (data,) = (port for port in ports if port != int(endpoint.rpartition(":")[2]))
        keys = keys_of(self._folder, "prefill-9", "decode")
        return RawPeer(f"tcp://127.0.0.1:{data}", keys=keys)

    def send_frames(self) -> None:
        workers = self._running.workers()
        for name, sender in zip(("decode-0", "decode-1"), self._frames, strict=True):
            for grant in grants(workers[name]["incarnation"]):
                header = KVFrame(grant, 0, 0, 1, 0, 1, 64, 0)
                sender.send(encode_kv_header(header), bytes(64))

    def look(self, client: Client) -> None:
        """Learn which requests there are; the rogues could hardly know better."""
        for one in client.status(handoffs=64)["handoffs"]["last"]:
            self.victims[bytes.fromhex(one["request"])] = 10
        self.send_frames()

    def end(self) -> None:
        for rogue in self.rogues:
            rogue.end()
        for sender in self._frames:
            sender.__exit__()


@pytest.fixture
def gang(running, folder, truth) -> Iterator[Gang]:
    gang = Gang(running, folder)
    yield gang
    gang.end()


def under_attack(running, gang) -> list[list[int]]:
    """The tokens of the streams while the gang is at work."""
    with running.client() as client, running.client() as watcher:
        generations = begun(client, watcher)
        gang.look(watcher)
        answers = []
        for generation in generations:
            with contextlib.suppress(Exception):
                gang.look(watcher)
            answers.append(collect(generation))
    assert all(answer.status == "maximum_length" for answer in answers)
    return [answer.tokens for answer in answers]


def test_running_streams_are_not_touched(running, gang, truth):
    with running.client() as client:
        before = client.status()
    for _ in range(3):
        assert under_attack(running, gang) == truth
    with running.client() as client:
        after = client.status()
        for kind in ("replayed", "cancelled", "disconnected", "failed"):
            assert after["router"]["requests"][kind] == before["router"]["requests"][kind], kind

        def used() -> int:
            honest = [w for w in client.status()["workers"] if not w["id"].endswith("-9")]
            assert len(honest) == 3
            return sum(worker["kv_blocks_used"] for worker in honest)

        wait_until(lambda: not used(), what="free blocks")
    assert all(rogue.said > 100 for rogue in gang.rogues)
    assert after["router"]["dropped"].get("unproven", 0) > 100


def test_a_restarted_router_finds_the_streams_where_they_are(running, gang, truth):
    """It remembers nothing and asks every worker; the rogues answer first, and falsely.

    The decode workers are stopped until a rogue was asked, or the streams could end before.
    """
    with running.client() as client, running.client() as watcher:
        generations = begun(client, watcher)
        gang.look(watcher)
        pids = running.pids()
        holders = [pids[name] for name in ("decode-0", "decode-1")]
        for pid in holders:
            os.kill(pid, signal.SIGSTOP)
        try:
            os.kill(pids["router"], signal.SIGKILL)
            wait_until(lambda: any("Adopt" in rogue.heard for rogue in gang.rogues[:2]))
        finally:
            for pid in holders:
                os.kill(pid, signal.SIGCONT)
        answers = [collect(generation) for generation in generations]
    assert [answer.tokens for answer in answers] == truth
