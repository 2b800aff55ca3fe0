"""Pools that change their size and processes that are replaced, all of it under load.

A hundred requests are in flight from before the order until after its end; every one of them has
to give the tokens of an undisturbed run.
"""

import asyncio
from pathlib import Path

import pytest

from baton.deploy.controller.admin import GoDown, Overview, Result, RollOut, ScalePools
from baton.deploy.controller.admin_client import AdminClient
from baton.proto.errors import RequestFailed

from ..processes import alive, wait_until
from .streams import Stream, begun, check, jobs, run, tokens, under_load

pytestmark = pytest.mark.cluster

WORK = jobs(100, prompt=60, new=40)
OTHER_MODEL = Path(__file__).parents[1] / "data/checkpoints/qwen3"


def admin(cluster) -> AdminClient:
    return AdminClient(f"{cluster.address}.admin", timeout=20.0)


def order(cluster, request) -> list[str]:
    """All answers of the controller to an order until its end; raises the error of a failure."""
    with admin(cluster) as client:
        return [answer.text for answer in client.ask(request, wait=90.0)]


def overview(cluster) -> Overview:
    with admin(cluster) as client:
        return client.overview()


def pids(cluster) -> dict[str, int]:
    return {member.name: member.pid for member in overview(cluster).members}


@pytest.fixture(scope="module")
def pools(shared_cluster):
    return shared_cluster(prefill=1, decode=2, kv_memory="64MiB", grace=20.0)


def counted(cluster, name: str) -> int:
    with cluster.client() as client:
        return client.status()["router"]["requests"][name]


def test_pools_grow_and_shrink_under_load(pools, undisturbed):
    before = counted(pools, "replayed")

    def scale() -> None:
        order(pools, ScalePools(targets={"prefill": 2, "decode": 3}))
        assert set(pids(pools)) == {
            "router", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2",
        }  # fmt: skip
        order(pools, ScalePools(targets={"prefill": 1, "decode": 1}))

    check(under_load(pools.address, WORK, scale), undisturbed)
    assert set(pids(pools)) == {"router", "prefill-0", "decode-0"}
    assert counted(pools, "replayed") == before  # all were drained, none was cut off
    order(pools, ScalePools(targets={"decode": 2}))


def test_every_worker_and_router_is_replaced_under_load(pools, undisturbed):
    before = pids(pools)
    said: list[str] = []

    def replace() -> None:
        with admin(pools) as first:
            answers = first.ask(RollOut(changes={"max_num_seqs": 24, "grace": 25.0}), wait=90.0)
            said.append(next(answers).text)
            with pytest.raises(RequestFailed, match="a rollout is running, "):
                order(pools, RollOut())
            said.extend(answer.text for answer in answers)

    check(under_load(pools.address, WORK, replace), undisturbed)
    after = pids(pools)
    assert len(after) == len(before) == 4
    assert not set(after.values()) & set(before.values())
    assert not any(alive(pid) for pid in before.values())
    assert said[-1] == "4 of 4 replaced"
    assert overview(pools).settings["max_num_seqs"] == 24


@pytest.mark.long
def test_a_rollout_that_no_worker_follows_stops_and_the_old_ones_serve_on(pools, undisturbed):
    before = pids(pools)
    with pytest.raises(RequestFailed, match=r"stopped at 0 of 4 replaced: prefill-. cannot run: "):
        order(pools, RollOut(changes={"model": str(OTHER_MODEL)}))
    assert pids(pools) == before
    assert overview(pools).rollout.startswith("stopped at 0 of 4 replaced: ")
    wait_until(lambda: wrong_tries(pools) >= 2, what="its last words")
    assert tokens(run(pools.address, WORK[:8])) == undisturbed[:8]
    order(pools, ScalePools(targets={"decode": 3}))  # with the settings that work
    order(pools, ScalePools(targets={"decode": 2}))
    assert wrong_tries(pools) == 2  # one try, and the outcome


def wrong_tries(cluster) -> int:
    return cluster.text().count("architecture is Qwen3ForCausalLM")


@pytest.mark.long
def test_workers_are_replaced_in_place_under_load_without_one_more(pools, undisturbed):
    before = pids(pools)
    most: list[int] = []

    def replace() -> None:
        with admin(pools) as client:
            for answer in client.ask(RollOut(in_place=True), wait=90.0):
                most.append(len(pids(pools)))
                last = answer.text
        assert last == "4 of 4 replaced"

    check(under_load(pools.address, WORK, replace), undisturbed)
    assert max(most) == len(before) == 4
    assert not set(pids(pools).values()) & set(before.values())


@pytest.mark.long
def test_two_routers_are_replaced_one_after_the_other_under_load(cluster, undisturbed):
    pair = cluster(prefill=1, decode=2, kv_memory="64MiB", grace=20.0, routers=2)
    before = pids(pair)
    assert set(before) == {"router-0", "router-1", "prefill-0", "decode-0", "decode-1"}
    both = f"{pair.address},{pair.address}.1"
    check(under_load(both, WORK, lambda: order(pair, RollOut())), undisturbed)
    after = pids(pair)
    assert set(after) >= {"router-0", "router-1"}
    assert not set(after.values()) & set(before.values())


def test_a_drain_that_does_not_end_is_cut_off_by_the_grace_and_nothing_is_lost(cluster):
    work = jobs(8, prompt=60, new=400)
    short = cluster(prefill=1, decode=2, kv_memory="64MiB", grace=0.05)
    undisturbed = tokens(run(short.address, work))

    async def disturb(streams: list[Stream]) -> None:
        await begun(streams, 8, tokens=20)
        await asyncio.to_thread(order, short, ScalePools(targets={"decode": 1}))

    assert tokens(run(short.address, work, disturb)) == undisturbed
    assert set(pids(short)) == {"router", "prefill-0", "decode-0"}
    assert counted(short, "replayed") > 0
    short.wait_said("decode-1 has not finished within the grace period")


@pytest.mark.long
def test_a_rollout_can_change_the_grace_of_drains(cluster):
    work = jobs(4, prompt=60, new=1500)
    patient = cluster(prefill=1, decode=2, kv_memory="64MiB", grace=60.0)
    undisturbed = tokens(run(patient.address, work))
    order(patient, RollOut(changes={"grace": 0.2}))

    async def disturb(streams: list[Stream]) -> None:
        await begun(streams, 4, tokens=20)
        await asyncio.to_thread(order, patient, ScalePools(targets={"decode": 1}))

    assert tokens(run(patient.address, work, disturb)) == undisturbed
    patient.wait_said("has not finished within the grace period")


def test_down_in_mid_rollout_ends_everything(pools):
    """The last test of this file, since it ends the others' cluster."""
    before = pids(pools)
    with admin(pools) as roller, admin(pools) as ender:
        answers = roller.ask(RollOut(), wait=60.0)
        next(answers)
        assert isinstance(list(ender.ask(GoDown(), wait=60.0))[-1], Result)
        with pytest.raises(RequestFailed, match="the cluster is going down"):
            list(answers)
    assert pools.process.wait(60) == 0
    assert not any(alive(pid) for pid in before.values())
    wait_until(lambda: not list(pools.folder.glob("baton-run-*")), what="no folder")
    assert not [p for p in pools.folder.iterdir() if p.is_socket()]
