"""A holder of one valid key harms nothing that was not assigned to it.

Rogues are processes of their own, with keys that may use any name of their role. They flood the
sockets with claims while streams run, while a router and a decode worker are killed and come back,
and they leave. Nothing of theirs delays, changes or reads the streams of others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from baton.runtime.keys.curve import apply_client_keys
from baton.runtime.keys.identity_owners import key_tag
from baton.runtime.keys.keyring import add_key, make_folder

from ..processes import wait_until
from .attacker import BATCH, Attack
from .driver import Job, greedy
from .reference import DATA, cases_of
from .scan import keys_of
from .test_keys import free_port, worker_address

pytestmark = pytest.mark.cluster

MODEL = "llama_plain"
STREAMS, LENGTH = 6, 200
GAP_S = 3.0
"""Longest time that a stream may wait for its next token beyond the wait without rogues."""
LONG_S = 45.0
"""Seconds of the long form, in which rogues send as fast as they can."""
ATTACK_S = 3.0
"""Seconds of the short form's floods."""
CONNECTIONS = 400
CONNECTION_BYTES = 256 << 10
"""Memory that one connection may cost a router."""
ROOT = Path(__file__).resolve().parents[2]
RATE = 300.0
"""Messages per second of each rogue in the short form: two busy processors can serve as well."""
SECRETS = {"Grant", "Assign", "Tokens", "Terminal", "Committed", "Credit"}
"""Kinds of messages that a rogue without a request of its own must never receive.

Refusals of its own messages are counted by another name."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("k") / "keys"
    make_folder(folder)
    for role in ("prefill", "decode", "client"):
        add_key(folder, role, [], host="elsewhere")  # any name of its role
    return folder


@pytest.fixture(scope="module")
def running(shared_cluster, folder):
    return shared_cluster(
        model=DATA / MODEL, prefill=2, decode=2, transport="tcp", keys=str(folder),
        address=f"tcp://127.0.0.1:{free_port()}",
    )  # fmt: skip


def honest(running) -> dict[str, dict]:
    """The cluster's own workers by name, as far as routers have them."""
    pids = running.pids()
    with running.client() as client:
        listed = client.status()["workers"]
    return {one["id"]: one for one in listed if pids.get(one["id"]) == one["pid"]}


def all_ready(running) -> bool:
    workers = honest(running)
    return len(workers) == 4 and all(one["state"] == "ready" for one in workers.values())


def attacks(running, folder, rate: float = RATE) -> list[Attack]:
    with running.client() as client:
        card = msgspec.to_builtins(client.describe().card)
    victims = [{**one, "card": card} for one in honest(running).values()]
    where = {one["id"]: one["endpoint"] for one in victims}
    router = worker_address(running)
    makes = [
        *((f"{role}@elsewhere", "router", router, "worker") for role in ("prefill", "decode")),
        *(
            ("prefill@elsewhere", "decode", where[name], "link")
            for name in ("decode-0", "decode-1")
        ),
        ("client@elsewhere", "router", running.address, "client"),
    ]
    return [
        Attack(str(folder), file, server, address, role, victims, f"{role}-{number}", rate)
        for number, (file, server, address, role) in enumerate(makes)
    ]


@contextmanager
def attacked(wanted: list[Attack]) -> Iterator[list[dict]]:
    """Rogues at work; afterwards, what each of them did and received."""
    started, reports = [], []
    path = os.pathsep.join([*filter(None, sys.path), str(ROOT)])
    try:
        for attack in wanted:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.attacker", msgspec.json.encode(attack)],
                env={**os.environ, "PYTHONPATH": path},
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            started.append(process)
            assert process.stdout.readline() == "begun\n"
        yield reports
        for process in started:
            out, _ = process.communicate("end\n", timeout=60)
            reports.append(json.loads(out))
    finally:
        for process in started:
            process.kill()
            process.wait()


def streamed(running, during=lambda: None) -> tuple[list[list[int]], float]:
    """The tokens of all streams, and the longest wait of one for its next token.

    ``during``: called after the first tokens of each stream.
    """
    cases = cases_of(MODEL)
    with running.client() as client:
        jobs = [Job(cases[i % len(cases)].prompt, greedy(LENGTH)) for i in range(STREAMS)]
        generations = [job.start(client) for job in jobs]
        answers, longest = [list(next(one).tokens) for one in generations], 0.0
        during()
        before = time.monotonic()
        for answer, generation in zip(answers, generations, strict=True):
            for output in generation:
                longest = max(longest, time.monotonic() - before)
                answer += output.tokens
                before = time.monotonic()
    return answers, longest


def counted(running) -> Counter[str]:
    with running.client() as client:
        return Counter(client.status()["router"]["requests"])


def test_floods_and_claims_touch_no_stream(running, folder):
    truth, calm = streamed(running)
    before = counted(running)
    with attacked(attacks(running, folder)) as reports:
        end = time.monotonic() + ATTACK_S
        while time.monotonic() < end:
            tokens, longest = streamed(running)
            assert tokens == truth
        assert all_ready(running)
    after = counted(running)
    for kind in ("replayed", "failed", "cancelled", "disconnected"):
        assert after[kind] == before[kind], kind
    check(reports)
    assert streamed(running)[0] == truth
    print(f"longest wait {longest:.2f} s, without rogues {calm:.2f} s, {sums(reports)}")


@pytest.mark.parametrize("victim", ["router", pytest.param("decode-0", marks=pytest.mark.long)])
def test_claims_during_a_restart_lock_nobody_out(running, folder, victim):
    """The claims come before, during and after: whoever is first, the honest workers serve."""
    truth, _ = streamed(running)
    pid = running.pids()[victim]
    with attacked(attacks(running, folder)) as reports:
        tokens, longest = streamed(running, lambda: os.kill(pid, signal.SIGKILL))
        assert tokens == truth
        wait_until(lambda: running.pids().get(victim, pid) != pid, what="the restart")
        wait_until(lambda: all_ready(running), what="all honest workers")
        assert streamed(running)[0] == truth
    check(reports)
    assert streamed(running)[0] == truth
    print(f"longest wait {longest:.2f} s, {sums(reports)}")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["router", "decode-0"])
def test_claims_during_a_restart_delay_no_stream(running, folder, victim):
    """Beside a restart of the same process without rogues, so the machine need not be idle."""

    def restarted() -> float:
        pid = running.pids()[victim]
        found, longest = streamed(running, lambda: os.kill(pid, signal.SIGKILL))
        assert found == truth
        wait_until(lambda: running.pids().get(victim, pid) != pid, what="the restart")
        wait_until(lambda: all_ready(running), what="all honest workers")
        return longest

    truth, _ = streamed(running)
    alone = restarted()
    with attacked(attacks(running, folder)) as reports:
        attacked_too = restarted()
    check(reports)
    print(f"{victim} killed: longest wait {attacked_too:.2f} s, without rogues {alone:.2f} s")
    assert attacked_too <= alone + GAP_S


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_long_attack_delays_no_stream(running, folder):
    """Messages without a limit. The machine must be idle otherwise."""
    truth, calm = streamed(running)
    most = 0.0
    with attacked(attacks(running, folder, 1e9)) as reports:
        end, number = time.monotonic() + LONG_S, 0
        while time.monotonic() < end:
            number += 1
            tokens, longest = streamed(running)
            assert tokens == truth
            most = max(most, longest)
            print(f"round {number}: longest wait {longest:.2f} s", flush=True)
    check(reports)
    assert all(report["sent"] > 5_000 for report in reports), sums(reports)
    assert most <= GAP_S, (most, calm)
    print(f"longest wait {most:.2f} s, without rogues {calm:.2f} s, {sums(reports)}")


def check(reports: list[dict]) -> None:
    """Every rogue was busy, was refused, and received nothing of others."""
    for report in reports:
        assert report["sent"] >= BATCH, report
        assert not SECRETS & report["heard"].keys(), report
    refused: Counter[str] = Counter()
    for report in reports:
        refused.update(report["codes"])
    assert refused["endpoint_dead"] > 10
    assert refused["access_denied"] > 10


def sums(reports: list[dict]) -> list[tuple[int, dict]]:
    return [(report["sent"], report["heard"]) for report in reports]


def test_many_connections_of_one_key_harm_nobody(running, folder):
    """Each costs a descriptor and some memory, which come back when they close."""
    truth, calm = streamed(running)
    pid = running.pids()["router"]
    before, worker = descriptors(pid), worker_address(running)
    memory = resident(pid)
    keys = keys_of(folder, "prefill@elsewhere", "router")
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 2 * CONNECTIONS)
        peers = []  # a socket without a reference is closed
        for _ in range(CONNECTIONS):
            peer = context.socket(zmq.DEALER)
            peer.linger = 0
            peer.routing_id = key_tag(keys.public) + os.urandom(8)
            apply_client_keys(peer, keys)
            peer.connect(worker)
            peers.append(peer)
        wait_until(lambda: descriptors(pid) >= before + CONNECTIONS, what="all connections")
        tokens, longest = streamed(running)
        grown, open_there = resident(pid) - memory, descriptors(pid) - before
        context.destroy(linger=0)
    assert tokens == truth
    assert grown < CONNECTIONS * CONNECTION_BYTES
    wait_until(lambda: descriptors(pid) <= before + 8, what="closed connections")
    assert all_ready(running)
    print(
        f"{open_there} connections: {grown / open_there / 1024:.0f} KiB each, longest wait"
        f" {longest:.2f} s, without them {calm:.2f} s"
    )


def descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
