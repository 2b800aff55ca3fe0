"""Workers that are paused: nothing restarts, no token differs, no request fails."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from ..processes import alive, wait_until
from .driver import lost_requests
from .streams import begun, jobs, run, tokens

pytestmark = pytest.mark.cluster

WORK = jobs(8, prompt=300, new=400)
LIGHT = jobs(8, prompt=100, new=40, seed=1)
"""For a machine that is busy with other things."""
PAUSES_S = 6.0


@pytest.fixture(scope="module")
def pools(shared_cluster):
    """Two prefill and two decode workers with the default worker timeout."""
    return shared_cluster(prefill=2, decode=2, kv_memory="64MiB", worker_timeout=5.0)


def incarnations(cluster) -> dict[str, int]:
    return {name: worker["incarnation"] for name, worker in cluster.workers().items()}


async def pause(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def paused_for(pools, seconds: float):
    """A disturbance: one worker after the other is paused for 0.3 to 2 s."""
    pids = {name: pid for name, pid in pools.pids().items() if name != "router"}
    rng = random.Random(7)

    async def disturb(streams) -> None:
        await begun(streams, 1)
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            await pause(pids[rng.choice(sorted(pids))], rng.uniform(0.3, 2.0))
            await asyncio.sleep(0.2)

    return disturb


def test_pauses_restart_nothing_and_change_no_token(pools, undisturbed):
    pids, before = pools.pids(), incarnations(pools)
    streams = run(pools.address, WORK, paused_for(pools, PAUSES_S))
    assert [s.error for s in streams if s.error] == []
    assert tokens(streams) == undisturbed
    assert (pools.pids(), incarnations(pools)) == (pids, before)
    wait_until(
        lambda: {w["state"] for w in pools.workers().values()} == {"ready"}, what="all workers"
    )


def test_a_pause_of_the_router_costs_no_more_than_itself(pools, undisturbed):
    """All its peers give up their connections meanwhile, and come back."""
    pids, before = pools.pids(), lost_requests(pools)

    async def disturb(streams) -> None:
        await begun(streams, len(WORK))
        await pause(pids["router"], 1.0)

    assert tokens(run(pools.address, WORK, disturb)) == undisturbed
    assert (pools.pids(), lost_requests(pools)) == (pids, before)


def test_a_worker_that_was_declared_dead_returns_without_loading_its_weights(pools, undisturbed):
    pid, before = pools.pids()["decode-0"], incarnations(pools)["decode-0"]

    async def disturb(streams) -> None:
        await begun(streams, len(WORK))
        await pause(pid, 7.0)  # longer than the worker timeout, shorter than the supervisor's

    streams = run(pools.address, WORK, disturb)
    assert tokens(streams) == undisturbed

    def returned() -> bool:
        worker = pools.workers().get("decode-0", {})
        return worker.get("state") == "ready" and worker["incarnation"] != before

    wait_until(returned, what="decode-0 to register again")
    assert alive(pid)
    assert pools.pids()["decode-0"] == pid
    assert tokens(run(pools.address, WORK)) == undisturbed


@contextmanager
def cpu_quota(pids, share: float):
    """Throttle these processes together to ``share`` of one processor, as a container would be."""
    group = Path("/sys/fs/cgroup/cpu") / f"baton-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(int(100_000 * share)))
    except OSError as error:
        pytest.skip(f"no processor quota can be set here: {error}")
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


@contextmanager
def busy_processes(count: int):
    """Processes that keep all processors busy."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", ["free", "throttled", "busy"])
def test_a_minute_of_pauses(pools, machine):
    """Also in a container with a fifth of a processor, and beside 40 processes that compute."""
    work = LIGHT if machine == "busy" else WORK
    undisturbed = tokens(run(pools.address, work))
    pids, before = pools.pids(), incarnations(pools)
    disturbed = {
        "free": nullcontext(),
        "throttled": cpu_quota([pools.process.pid, *pids.values()], 0.2),
        "busy": busy_processes(40),
    }[machine]
    with disturbed:
        end = time.monotonic() + 60.0
        while time.monotonic() < end:
            streams = run(pools.address, work, paused_for(pools, 8.0))
            assert [s.error for s in streams if s.error] == []
            assert tokens(streams) == undisturbed
        assert (pools.pids(), incarnations(pools)) == (pids, before)
