"""Changes of role under Ray: nodes stay, tokens are exact, and every restart keeps the role."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ..cluster.conftest import wait_until
from ..cluster.streams import jobs, run, tokens
from .bed import parent, processes
from .conftest import WAIT, launched

pytestmark = pytest.mark.timeout(240)

WORK = jobs(40, prompt=200, new=200)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator:
    with launched(tmp_path_factory.mktemp("bed"), {"prefill": 1, "decode": 2}) as cluster:
        cluster.wait_ready(1, 2)
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster) -> list[list[int]]:
    return tokens(run(cluster.address, WORK))


def role(cluster, name: str) -> tuple[str, str]:
    worker = cluster.workers().get(name, {})
    return worker.get("role", ""), worker.get("state", "")


def wait_role(cluster, name: str, wanted: str) -> None:
    def there() -> bool:
        return role(cluster, name) == (wanted, "ready")

    wait_until(there, what=f"{name} as {wanted}", timeout=WAIT)


def change(cluster, name: str, wanted: str) -> None:
    """Order a change and wait for it; the controller learns later than routers who is ready."""

    def done() -> bool:
        try:
            cluster.baton("role", "--wait", name, wanted)
        except AssertionError as problem:
            if "only a ready worker changes its role" not in str(problem):
                raise
            return False
        return True

    wait_until(done, what=f"{name} as {wanted}", timeout=WAIT)


def test_a_worker_changes_its_role_on_its_node(cluster, undisturbed):
    nodes, pid = cluster.bed.nodes(), cluster.pid("decode-1")
    assert nodes == {"prefill": 1, "decode": 2}
    change(cluster, "decode-1", "prefill")
    assert role(cluster, "decode-1") == ("prefill", "ready")
    assert cluster.pools() == {"prefill": 2, "decode": 1}
    assert cluster.pid("decode-1") == pid  # its weights stay loaded
    assert tokens(run(cluster.address, WORK)) == undisturbed
    assert cluster.bed.nodes() == nodes  # none was started for the larger pool


def test_a_restarted_worker_and_a_restarted_actor_have_the_new_role(cluster):
    worker = cluster.pid("decode-1")
    os.kill(worker, 9)
    cluster.wait_replaced("decode-1", worker)
    assert role(cluster, "decode-1")[0] == "prefill"
    worker = cluster.pid("decode-1")
    os.kill(parent(worker), 9)  # Ray restarts the actor with its first arguments
    wait_until(lambda: worker not in processes(), what="its worker gone", timeout=WAIT)
    cluster.wait_replaced("decode-1", worker)
    wait_role(cluster, "decode-1", "prefill")
    assert cluster.pools() == {"prefill": 2, "decode": 1}


def test_a_controller_that_comes_back_keeps_the_roles(cluster, undisturbed):
    controller = next(pid for pid, line in processes().items() if line == "ray::Controller")
    worker = cluster.pid("decode-1")
    os.kill(controller, 9)

    def another() -> bool:
        found = [pid for pid, line in processes().items() if line == "ray::Controller"]
        return found not in ([], [controller])

    wait_until(another, what="another controller", timeout=WAIT)
    cluster.baton("wait-ready", "--prefill", "2", "--decode", "1")
    assert role(cluster, "decode-1") == ("prefill", "ready")
    assert cluster.pid("decode-1") == worker
    change(cluster, "decode-1", "decode")  # and it can order another change
    assert cluster.pools() == {"prefill": 1, "decode": 2}
    assert tokens(run(cluster.address, WORK)) == undisturbed


def test_scale_moves_workers_where_no_node_is_left(cluster):
    """Each type has three nodes at most: four prefill workers need a change of role."""
    cluster.baton("scale", "--wait", "decode=3")
    cluster.baton("scale", "--wait", "prefill=3")
    assert cluster.bed.nodes() == {"prefill": 3, "decode": 3}
    cluster.baton("scale", "--wait", "prefill=4", "decode=2")
    assert cluster.pools() == {"prefill": 4, "decode": 2}
    assert cluster.bed.nodes() == {"prefill": 3, "decode": 3}
    assert "hold 3" in cluster.baton("scale", "prefill=5", code=1)
