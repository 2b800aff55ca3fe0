"""Keys of a running cluster are replaced; names stay their keys' while processes come and go."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading

import pytest

from baton.cli.command import main
from baton.client import Client
from baton.proto.errors import ConfigError
from baton.runtime.keys.keyring import add_key, make_folder, read_pair

from ..processes import wait_until
from .driver import Job, ask, collect, greedy
from .raw import RawPeer, envelope, hello_map
from .reference import DATA, cases_of
from .scan import check_roles, heard_kinds, keys_of
from .test_keys import free_port, worker_address

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

MODEL = "llama_plain"
REFUSALS = (("Rejected", "access_denied"), ("Rejected", "endpoint_dead"))
ROTATED = ("router", "prefill", "decode", "client")


def test_no_request_is_lost_while_keys_are_replaced(cluster, tmp_path):
    folder, old = tmp_path / "keys", tmp_path / "old"
    make_folder(folder)
    shutil.copytree(folder, old)
    (old / "operator.key").unlink()  # what follows has a client's key
    admin = f"tcp://127.0.0.1:{free_port()}"
    running = cluster(
        model=DATA / MODEL, prefill=1, decode=1, transport="tcp", keys=str(folder), admin=admin,
        address=f"tcp://127.0.0.1:{free_port()}",
    )  # fmt: skip
    case = cases_of(MODEL)[4]
    before, rounds, done, wrong = running.pids(), [0], threading.Event(), []

    def keep_asking() -> None:
        with Client(running.address, keys=old, connect_timeout=20.0) as client:
            while not done.is_set():
                tokens = ask(client, Job(case.prompt, greedy(16))).tokens
                wrong.extend([tokens] if tokens != case.greedy[:16] else [])
                rounds[0] += 1

    asker = threading.Thread(target=keep_asking)
    asker.start()
    try:
        for stem in ROTATED:
            assert main(["keygen", str(folder), "--rotate", stem]) == 0
        shutil.copy(folder / "allowed.toml", old)
        assert main(["rollout", "--wait", "--admin", admin, "--keys", str(folder)]) == 0
        seen = rounds[0]
        wait_until(lambda: rounds[0] > seen or not asker.is_alive(), what="another answer")
    finally:
        done.set()
        asker.join(60)
    assert not asker.is_alive() and rounds[0] > 1 and wrong == []
    assert set(before.values()).isdisjoint(running.pids().values())
    for stem in ROTATED:
        assert main(["keygen", str(folder), "--retire", stem]) == 0
    with running.client() as client:
        assert ask(client, Job(case.prompt, greedy(16))).tokens == case.greedy[:16]
        status = str(client.status())
    said = running.text() + status
    for path in (*folder.glob("*.key"), *old.glob("*.key")):
        assert read_pair(path).secret not in said, path
    shutil.copy(folder / "router.key", old)  # to know whom to expect there
    worker = int(worker_address(running).rpartition(":")[2])

    def old_ones_are_refused() -> bool:
        with contextlib.suppress(AssertionError):  # the list is read once a second
            check_roles(worker, "router", old, ("prefill", "decode"), ())
            return True
        return False

    wait_until(old_ones_are_refused)
    check_roles(worker, "router", folder, ("prefill", "decode"), ("prefill", "decode"))
    shutil.copy(folder / "allowed.toml", old)
    with pytest.raises(ConfigError, match="is not in"):
        Client(running.address, keys=old).status()


def test_a_dead_workers_id_is_not_free_for_another_key(cluster, tmp_path):
    """Until it is back, a thief sends Hello in its name, then in its incarnation."""
    folder = tmp_path / "keys"
    make_folder(folder)
    add_key(folder, "decode", ["decode-0"])
    running = cluster(
        model=DATA / MODEL, prefill=1, decode=2, transport="tcp", keys=str(folder),
        address=f"tcp://127.0.0.1:{free_port()}",
    )  # fmt: skip
    victim, pid = running.workers()["decode-0"], running.pids()["decode-0"]
    case = cases_of(MODEL)[5]
    fresh = {**hello_map(), "role": "decode", "incarnation": random.getrandbits(63)}
    stolen = [
        {**fresh, "worker": "decode-0"},
        {**fresh, "worker": "decode-0", "incarnation": victim["incarnation"]},
        {**fresh, "worker": "decode-7", "incarnation": victim["incarnation"]},
    ]
    keys = keys_of(folder, "decode", "router")
    tried = 0
    with running.client() as client, RawPeer(worker_address(running), keys=keys) as thief:
        jobs = [Job(case.prompt, greedy(64)).start(client) for _ in range(6)]
        os.kill(pid, signal.SIGKILL)
        while tried < 30 or running.workers().get("decode-0", victim)["pid"] == pid:
            thief.send(envelope(stolen[tried % len(stolen)]))
            wanted = ("Rejected", "Welcome")
            answer = thief.hear_until(lambda message: message["type"] in wanted)[-1]  # noqa: B023
            assert (answer["type"], answer["code"]) in REFUSALS, answer
            tried += 1
        running.wait_replaced("decode-0", pid)
        assert [collect(job).tokens for job in jobs] == [case.greedy] * 6
        assert heard_kinds(thief) <= {"Ping"}
