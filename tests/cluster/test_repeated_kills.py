"""One worker that is killed again and again: it is restarted each time, the others serve on."""

import os
import signal
import time

import pytest

from baton.deploy.controller.admin_client import AdminClient

from ..processes import wait_until
from .conftest import Cluster
from .streams import check, jobs, run, tokens, under_load

pytestmark = pytest.mark.cluster

WORK = jobs(8, prompt=60, new=40)
VICTIM = "decode-1"


@pytest.fixture(scope="module")
def pools(shared_cluster):
    return shared_cluster(prefill=1, decode=2, kv_memory="64MiB")


def problems(cluster: Cluster) -> list[str]:
    with AdminClient(f"{cluster.address}.admin", timeout=20.0) as client:
        found = client.overview()
    assert found.phase == "serving"
    assert found.health == ("degraded" if found.problems else "ok")
    return found.problems


def kill(cluster: Cluster) -> None:
    """End the victim's process once it serves."""

    def serving() -> int:
        worker = cluster.workers().get(VICTIM, {})
        pid = int(worker.get("pid", 0))
        ready = worker.get("state") == "ready" and cluster.pids().get(VICTIM) == pid
        return pid if ready else 0

    os.kill(wait_until(serving, what=f"a serving {VICTIM}"), signal.SIGKILL)


@pytest.mark.long
def test_a_worker_killed_six_times_in_a_minute_ends_nothing(pools):
    undisturbed = tokens(run(pools.address, WORK))

    def kill_often() -> None:
        for _ in range(6):
            kill(pools)
        down = f"{VICTIM} is down: killed by signal 9; restart 6 in "
        wait_until(lambda: any(p.startswith(down) for p in problems(pools)), what=down)

    check(under_load(pools.address, WORK, kill_often), undisturbed)
    wait_until(lambda: not problems(pools), what=f"{VICTIM} to serve again")
    assert pools.process.poll() is None
    pools.wait_said(f"{VICTIM} serves again")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_sixty_kills_of_one_worker_in_ten_minutes_end_nothing(pools):
    undisturbed = tokens(run(pools.address, WORK))
    others = {name: pid for name, pid in pools.pids().items() if name != VICTIM}
    begin = time.monotonic()

    def kill_often() -> None:
        for number in range(60):
            time.sleep(max(0.0, begin + 10.0 * number - time.monotonic()))
            kill(pools)

    ended = under_load(pools.address, WORK, kill_often, limit=800.0)
    seconds = time.monotonic() - begin
    check(ended, undisturbed)
    longest = max(stream.longest_gap for _, stream in ended)
    print(
        f"60 kills in {seconds:.0f} s, {len(ended)} requests; longest wait of a stream"
        f" {longest:.2f} s"
    )
    assert seconds < 660
    assert {name: pools.pids().get(name) for name in others} == others
    wait_until(lambda: not problems(pools), what=f"{VICTIM} to serve again")
    assert pools.process.poll() is None
