"""Load moves workers between pools, makes pools grow and shrink, and no request notices."""

import asyncio
import time

import pytest

from baton.client import AsyncClient
from baton.deploy.controller.admin_client import AdminClient

from ..processes import wait_until
from .streams import Stream, follow, jobs, new_salt, run, tokens

pytestmark = pytest.mark.cluster

WORK = jobs(24, prompt=60, new=60)


def sizes(cluster):
    with AdminClient(f"{cluster.address}.admin", timeout=20.0) as client:
        view = client.overview()
    ready = [member.role for member in view.members if member.stage == "ready"]
    return view.targets, {role: ready.count(role) for role in ("prefill", "decode")}


@pytest.mark.long
def test_decode_grows_under_load_and_shrinks_after_it_without_a_lost_request(shared_cluster):
    cluster = shared_cluster(
        prefill=1, decode=1, prefill_max=1, decode_max=2, autoscale="on", stabilization_window=4.0,
        decode_kv_blocks=64, slo_ttft=5.0, slo_itl=5.0, grace=20.0,
    )  # fmt: skip
    streams: list[Stream] = []
    seen: set[int] = set()
    until = time.monotonic() + 60.0

    async def ask(client, number, salt):
        rounds = 0
        while rounds < 2 or (2 not in seen and time.monotonic() < until):
            rounds += 1
            streams.append(Stream())
            await follow(client, WORK[number], streams[-1], f"{salt}-{rounds}")

    async def watch(work):
        while not work.done():
            seen.add((await asyncio.to_thread(sizes, cluster))[1]["decode"])
            await asyncio.sleep(0.5)

    async def body():
        async with asyncio.timeout(80.0), AsyncClient(cluster.address) as client:
            salt = new_salt()
            work = asyncio.gather(*(ask(client, number, salt) for number in range(len(WORK))))
            await asyncio.gather(work, watch(work))

    asyncio.run(body())
    assert 2 in seen
    wait_until(lambda: sizes(cluster) == ({"prefill": 1, "decode": 1},) * 2, 60.0)
    assert len(streams) >= 2 * len(WORK)
    assert [stream.error for stream in streams if stream.error is not None] == []
    assert all(len(stream.tokens) == 60 for stream in streams)
    with cluster.client() as client:
        assert client.status()["router"]["requests"]["failed"] == 0


def test_without_room_a_spare_worker_changes_its_role_under_running_streams(cluster):
    """Decode has too few KV blocks for all streams, prefill has a worker to spare."""
    running = cluster(
        prefill=2, decode=1, workers_max=3, autoscale="on", stabilization_window=8.0,
        decode_kv_blocks=64, slo_ttft=5.0, slo_itl=5.0, grace=20.0,
    )  # fmt: skip
    pids = running.pids()
    wanted = tokens(run(running.address, WORK[:2]))
    streams: list[Stream] = []
    until = time.monotonic() + 90.0

    async def ask(client, number, salt):
        while sizes(running)[0]["decode"] < 2 and time.monotonic() < until:
            stream = Stream()
            streams.append(stream)
            await follow(client, WORK[number % 2], stream, f"{salt}-{len(streams)}")
            assert stream.tokens == wanted[number % 2]

    async def body():
        async with asyncio.timeout(100.0), AsyncClient(running.address) as client:
            await asyncio.gather(*(ask(client, n, new_salt()) for n in range(len(WORK))))

    asyncio.run(body())
    wait_until(lambda: sizes(running) == ({"prefill": 1, "decode": 2},) * 2, 60.0)
    assert [stream.error for stream in streams if stream.error is not None] == []
    assert running.pids() == pids  # nothing was started
    (moved,) = (w for w in running.workers().values() if w["role"] not in w["id"])
    shown = running.command("status").stdout
    reason = f"{moved['id']} changed its role to decode: decode needs 2 workers and has 1"
    assert f"role change  {reason}" in shown
    assert f"{moved['id']} changes its role to decode: decode needs 2 workers" in running.text()
    assert tokens(run(running.address, WORK[:2])) == wanted
