"""A cluster on Ray: growing and shrinking pools, and kills of every process.

The tests of this file share a cluster; each continues where the previous test ended.
"""

import asyncio
import os
import signal

import pytest

from ..cluster.conftest import wait_until
from ..cluster.streams import Stream, begun, jobs, run, tokens
from .bed import parent, processes
from .conftest import note, timed

pytestmark = pytest.mark.timeout(180)

WORK = jobs(100, prompt=200, new=400)


@pytest.fixture(scope="module")
def undisturbed(cluster) -> list[list[int]]:
    return tokens(run(cluster.address, WORK))


def strike(cluster, *pids: int, lost: str = "", nodes=None, then=()):
    """Return a fault: SIGKILL after half of the 100 requests have tokens.

    ``lost``: the worker that ends by it; the router's detection time is recorded. At that time Ray
    has not replaced any node: exactly ``nodes`` are alive. ``then``: conditions to wait for
    afterwards, by name.
    """

    def known() -> bool:
        return cluster.workers()[lost]["state"] != "ready"

    async def disturb(streams: list[Stream]) -> None:
        await begun(streams, len(WORK) // 2)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if lost:
            await asyncio.to_thread(timed, f"{lost} lost, its requests re-routed", known, 2.0)
        assert nodes is None or cluster.bed.nodes() == nodes
        if then:
            await asyncio.to_thread(timed, *then)

    return disturb


@pytest.fixture
def replayed(cluster):
    """Return the number of replays so far; without a replay a fault has tested nothing."""

    def count() -> int:
        with cluster.client() as client:
            return client.status()["router"]["requests"]["replayed"]

    return count


def test_the_pools_grow_independently(cluster):
    assert cluster.bed.nodes() == {"prefill": 1, "decode": 1}
    before = {name: cluster.pid(name) for name in ("router", "prefill-0", "decode-0")}
    cluster.baton("scale", "--wait", "decode=2")
    assert cluster.bed.nodes() == {"prefill": 1, "decode": 2}
    cluster.baton("scale", "--wait", "prefill=2")
    assert cluster.bed.nodes() == {"prefill": 2, "decode": 2}
    assert {name: cluster.pid(name) for name in before} == before


def test_a_killed_actor_takes_its_worker_along_and_both_come_back(cluster, undisturbed, replayed):
    worker = cluster.pid("decode-1")
    before = replayed()
    back = ("service of decode-1 back", lambda: cluster.replaced("decode-1", worker))
    blow = strike(cluster, parent(worker), lost="decode-1", then=back)
    streams = run(cluster.address, WORK, blow)
    assert worker not in processes()
    assert tokens(streams) == undisturbed
    assert replayed() > before


def test_the_worker_of_a_killed_actor_is_gone_at_once(cluster):
    worker = cluster.pid("prefill-1")
    os.kill(parent(worker), signal.SIGKILL)
    timed("the worker of a killed actor is gone", lambda: worker not in processes(), 1.0)
    # The kernel killed it: no successor has registered yet, whose Hello would end it too.
    assert not any("/prefill-1.json --parent" in line for line in processes().values())
    cluster.wait_replaced("prefill-1", worker)


def test_a_killed_worker_is_started_again_by_its_actor(cluster, undisturbed, replayed):
    worker = cluster.pid("decode-0")
    actor = parent(worker)
    before = replayed()
    streams = run(cluster.address, WORK, strike(cluster, worker, lost="decode-0"))
    assert tokens(streams) == undisturbed
    assert replayed() > before
    cluster.wait_replaced("decode-0", worker)
    assert parent(cluster.pid("decode-0")) == actor


def test_requests_of_a_lost_node_go_on_elsewhere(cluster, undisturbed, replayed):
    """Its raylet is killed, together with its actor.

    Normally Ray's workers end within a second after their raylet. Here the raylet's parent, Ray's
    fake provider, does not reap it, so for the workers it still exists.
    """
    worker = cluster.pid("decode-1")
    actor = parent(worker)
    raylet = parent(actor)
    assert raylet in cluster.bed.raylets("decode")
    before = replayed()
    nodes = {"prefill": 2, "decode": 1}
    blow = strike(cluster, raylet, actor, lost="decode-1", nodes=nodes)
    streams = run(cluster.address, WORK, blow)
    assert tokens(streams) == undisturbed
    assert replayed() > before
    timed("the lost node replaced", lambda: cluster.replaced("decode-1", worker))


def test_a_killed_router_comes_back_where_it_was(cluster, undisturbed):
    router = cluster.pid("router")
    streams = run(cluster.address, WORK, strike(cluster, parent(router)))
    gap = max(stream.longest_gap for stream in streams)
    note("actor of the router killed, longest wait of a stream", gap)
    assert tokens(streams) == undisturbed
    assert cluster.pid("router") != router


def test_a_killed_controller_goes_on_from_where_it_was(cluster, undisturbed):
    controller = next(pid for pid, line in processes().items() if line == "ray::Controller")
    prefill = cluster.pid("prefill-1")

    def another() -> bool:
        found = [pid for pid, line in processes().items() if line == "ray::Controller"]
        return found not in ([], [controller])

    blow = strike(cluster, controller, then=("another controller", another))
    streams = run(cluster.address, WORK, blow)
    assert tokens(streams) == undisturbed
    cluster.baton("scale", "--wait", "decode=1")
    assert cluster.pid("prefill-1") == prefill
    cluster.wait_nodes(prefill=2, decode=1)


def test_what_no_node_can_hold_is_refused(cluster):
    said = cluster.baton("scale", "--wait", "prefill=9", code=1)
    assert "hold 3 prefill workers at most" in said
    assert cluster.bed.nodes() == {"prefill": 2, "decode": 1}


def test_launching_again_changes_nothing(cluster):
    pid = cluster.pid("router")
    cluster.launch()
    assert cluster.pid("router") == pid
    cluster.config.write_text(cluster.config.read_text() + "max_num_seqs = 5\n")
    said = cluster.baton("launch", "--backend", "ray", "--config", str(cluster.config), code=2)
    assert "running with other settings: max_num_seqs" in said


def test_a_pool_that_shrinks_drains_and_loses_no_request(cluster, undisturbed, replayed):
    before = replayed()

    async def shrink(streams: list[Stream]) -> None:
        await begun(streams, len(WORK) // 2)
        await asyncio.to_thread(cluster.baton, "scale", "--wait", "prefill=1")

    assert tokens(run(cluster.address, WORK, shrink)) == undisturbed
    assert replayed() == before
    cluster.wait_nodes(prefill=1, decode=1)


def test_down_leaves_nothing_on_any_node(cluster):
    cluster.baton("down")
    assert cluster.members() == []
    actors = ("ray::PoolMember", "ray::Controller")
    wait_until(lambda: not any(line in actors for line in processes().values()), what="the end")
    cluster.wait_nodes(prefill=0, decode=0)
