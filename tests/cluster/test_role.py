"""A worker changes its role: the process and its weights stay, and no stream loses a token."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from baton.cli.operator import carry_out
from baton.deploy.controller.admin import TurnWorker
from baton.deploy.controller.admin_client import AdminClient
from baton.deploy.plan.addresses import admin_address, free_ports
from baton.proto.errors import RequestFailed
from baton.runtime.keys.keyring import add_key, make_folder

from ..processes import alive, wait_until
from .driver import Job as Ask
from .driver import ask_all, lost_requests
from .streams import begun, jobs, run, tokens

pytestmark = pytest.mark.cluster

WORK = jobs(8, prompt=200, new=700, seed=5)
SETTINGS = {"kv_memory": "64MiB", "worker_timeout": 1.0}


@pytest.fixture(scope="module")
def pools(shared_cluster):
    return shared_cluster(prefill=1, decode=2, **SETTINGS)


@pytest.fixture(scope="module")
def wanted(pools):
    return tokens(run(pools.address, WORK))


@pytest.fixture(autouse=True)
def back_in_its_role(pools):
    """Let each try begin with the pools as they were started."""
    if pools.workers()["decode-1"]["role"] != "decode":
        order(pools, "decode-1", "decode")
        wait_role(pools, "decode-1", "decode")


def order(cluster, worker: str, role: str) -> str:
    """Order a change without the start of a command; returns the sizes of the pools.

    The controller learns a little later than the routers that a worker is ready.
    """
    answers: list[str] = []

    def accepted() -> bool:
        with AdminClient(admin_address(cluster.address), timeout=20.0) as client:
            try:
                answers.append(carry_out(client, TurnWorker(worker=worker, role=role), wait=False))
            except RequestFailed as problem:
                assert "only a ready worker changes its role" in str(problem)
        return bool(answers)

    wait_until(accepted, what=f"{worker} to turn to {role}")
    return answers[0]


def wait_role(cluster, worker: str, role: str) -> None:
    def serves() -> bool:
        found = cluster.workers().get(worker)
        return found is not None and (found["role"], found["state"]) == (role, "ready")

    wait_until(serves, what=f"{worker} to be a {role} worker")


def test_streams_go_on_while_their_worker_changes_its_role(pools, wanted):
    pid, before = pools.pids()["decode-1"], lost_requests(pools)

    async def change(streams) -> None:
        await begun(streams, len(WORK), tokens=3)
        text = await asyncio.to_thread(order, pools, "decode-1", "prefill")
        assert text == "prefill=2 decode=1"

    streams = run(pools.address, WORK, change)
    assert tokens(streams) == wanted
    wait_role(pools, "decode-1", "prefill")
    assert pools.pids()["decode-1"] == pid and lost_requests(pools) == before
    shown = pools.command("status").stdout
    assert "prefill      2 of 2 ready" in shown and "decode       1 of 1 ready" in shown
    assert "decode-1 *" in shown and "decode-1 is a prefill worker" in shown
    with pools.client() as client:  # pinned to the new prefill worker
        endpoint = pools.workers()["decode-1"]["endpoint"]
        work = [Ask(list(job.prompt), job.params, {"target_endpoint": endpoint}) for job in WORK]
        answers = ask_all(client, work)
    assert [one.tokens for one in answers] == wanted
    assert {(one.prefill, one.decode) for one in answers} == {("decode-1", "decode-0")}

    text = pools.command("role", "decode-1", "decode", "--wait").stdout
    assert text.endswith("decode-1 serves as decode; pools: prefill=1 decode=2\n")
    streams = run(pools.address, WORK)
    assert tokens(streams) == wanted
    assert {one.decode for one in streams} == {"decode-0", "decode-1"}
    assert pools.pids()["decode-1"] == pid and "loads" not in pools.text().split("ready: ")[1]
    assert "worker.turns" not in pools.text()  # no warning: it was ordered
    pools.wait_idle()


def test_after_the_grace_other_workers_take_over_the_streams(cluster, wanted):
    running = cluster(prefill=1, decode=2, grace=0.1, **SETTINGS)
    pid = running.pids()["decode-1"]

    async def change(streams) -> None:
        await begun(streams, len(WORK), tokens=3)
        await asyncio.to_thread(order, running, "decode-1", "prefill")

    for _ in range(3):  # on a busy machine the order may come when all is over
        assert tokens(run(running.address, WORK, change)) == wanted
        wait_role(running, "decode-1", "prefill")
        if lost_requests(running):
            break
        order(running, "decode-1", "decode")
        wait_role(running, "decode-1", "decode")
    else:
        pytest.fail("nothing ran on the worker after the grace")
    assert running.pids()["decode-1"] == pid
    running.wait_idle()


def test_a_worker_killed_in_its_change_comes_back_in_the_new_role(pools, wanted):
    pid = pools.pids()["decode-1"]

    async def strike(streams) -> None:
        await begun(streams, len(WORK), tokens=3)
        await asyncio.to_thread(order, pools, "decode-1", "prefill")
        os.kill(pid, signal.SIGKILL)

    assert tokens(run(pools.address, WORK, strike)) == wanted
    wait_role(pools, "decode-1", "prefill")
    killed = pools.pids()["decode-1"]
    assert killed != pid
    assert tokens(run(pools.address, WORK)) == wanted
    os.kill(killed, signal.SIGKILL)  # every later start has the role too
    pools.wait_replaced("decode-1", killed)
    wait_role(pools, "decode-1", "prefill")
    pools.wait_idle()


@pytest.mark.long
def test_a_supervisor_killed_in_a_change_leaves_no_worker(start_cluster, cluster, wanted):
    """The kernel ends the workers with it, in whichever role; the next one has its settings."""
    killed = start_cluster(prefill=1, decode=2, **SETTINGS).wait_ready()
    pids = killed.pids()

    async def strike(streams) -> None:
        await begun(streams, len(WORK), tokens=3)
        await asyncio.to_thread(order, killed, "decode-1", "prefill")
        killed.process.kill()
        killed.process.wait()
        await asyncio.to_thread(succeed)

    def succeed() -> None:
        wait_until(lambda: not any(map(alive, pids.values())), what="all children to end")
        after = cluster(prefill=1, decode=2, address=killed.address, **SETTINGS)
        roles = {name: worker["role"] for name, worker in after.workers().items()}
        assert roles == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}

    for stream, whole in zip(run(killed.address, WORK, strike), wanted, strict=True):
        assert stream.tokens == whole[: len(stream.tokens)]  # no stream has a wrong token
        assert (stream.error is None) == (stream.tokens == whole)
    assert tokens(run(killed.address, WORK)) == wanted


def test_refusals_are_one_line_and_change_nothing(pools):
    for words, said in (
        (("prefill-0", "decode"), "prefill-0 is the last"),
        (("decode-7", "prefill"), "no worker 'decode-7'"),
        (("decode-0", "decode"), "decode-0 is a decode worker already"),
        (("decode-0", "cook"), "must be one of prefill, decode"),
    ):
        ended = pools.command("role", *words)
        assert ended.returncode in (1, 2) and said in ended.stderr
        assert ended.stderr.count("\n") == 1
    roles = {name: worker["role"] for name, worker in pools.workers().items()}
    assert roles == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


def test_workers_of_mode_colocated_have_one_role(cluster):
    running = cluster(mode="colocated", workers=2, **SETTINGS)
    ended = running.command("role", "decode-0", "prefill")
    assert ended.returncode == 2 and "mode colocated has one role only" in ended.stderr


def test_with_keys_a_worker_takes_the_key_of_its_new_role(cluster, tmp_path):
    folder = tmp_path / "keys"
    make_folder(folder)
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    running = cluster(
        prefill=1, decode=2, transport="tcp", address=address, keys=str(folder), **SETTINGS
    )
    pid = running.pids()["decode-1"]
    work = [Ask(list(job.prompt), job.params) for job in WORK]
    with running.client() as client:
        before = [one.tokens for one in ask_all(client, work)]
        for role, pools in (("prefill", "prefill=2 decode=1"), ("decode", "prefill=1 decode=2")):
            ended = running.command("role", "decode-1", role, "--wait", "--keys", str(folder))
            assert ended.returncode == 0 and pools in ended.stdout, ended.stderr
            assert [one.tokens for one in ask_all(client, work)] == before
    assert running.pids()["decode-1"] == pid


def test_a_worker_with_a_key_of_its_own_keeps_its_role(cluster, tmp_path):
    folder = tmp_path / "keys"
    make_folder(folder)
    add_key(folder, "decode", ["decode-1"])
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    running = cluster(
        prefill=1, decode=2, transport="tcp", address=address, keys=str(folder), **SETTINGS
    )
    ended = running.command("role", "decode-1", "prefill", "--keys", str(folder))
    assert ended.returncode == 2 and "decode-1 cannot be a prefill worker" in ended.stderr
