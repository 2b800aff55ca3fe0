"""Two routers, one of which dies or stops under load: every stream ends with its own tokens."""

import asyncio
import os
import signal
import time

import pytest

from baton.client import AsyncClient

from ..processes import wait_until
from .streams import STREAMS_TIMEOUT, Stream, begun, follow, jobs, new_salt, run, tokens

pytestmark = pytest.mark.cluster

WORK = jobs(100, prompt=200, new=200)
CLIENTS = 10


@pytest.fixture(scope="module")
def pools(shared_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("r")
    address = f"ipc://{folder}/a.sock,ipc://{folder}/b.sock"
    return shared_cluster(prefill=2, decode=2, routers=2, address=address, kv_memory="64MiB")


@pytest.fixture(scope="module")
def addresses(pools):
    return pools.address.split(",")


@pytest.fixture(scope="module")
def undisturbed(pools, addresses):
    return tokens(run(addresses[0], WORK))


def spread(addresses, disturb=None) -> list[Stream]:
    """All jobs at once over several clients, half of which begin at each router."""

    async def body() -> list[Stream]:
        streams = [Stream() for _ in WORK]
        salt = new_salt()
        clients = [AsyncClient(addresses) for _ in range(CLIENTS)]
        async with asyncio.timeout(STREAMS_TIMEOUT), asyncio.TaskGroup() as group:
            for number, (job, stream) in enumerate(zip(WORK, streams, strict=True)):
                client = clients[number % CLIENTS]
                group.create_task(follow(client, job, stream, salt))
            if disturb is not None:
                group.create_task(disturb(streams))
        for client in clients:
            await client.close()
        return streams

    return asyncio.run(body())


def slowest(streams: list[Stream], since: float) -> float:
    """The longest any stream waited that was not over at ``since``."""
    return max(s.longest_gap for s in streams if s.ended > since)


def test_streams_go_on_at_the_other_router_when_theirs_is_killed(pools, addresses, undisturbed):
    pid, struck = pools.pids()["router-0"], []

    async def kill(streams: list[Stream]) -> None:
        await begun(streams, 50)
        os.kill(pid, signal.SIGKILL)
        struck.append(time.monotonic())

    streams = spread(addresses, kill)
    print(f"router killed: no stream waited longer than {slowest(streams, struck[0]):.2f} s")
    assert tokens(streams) == undisturbed
    assert any(s.ended > struck[0] for s in streams)
    wait_until(lambda: pools.pids().get("router-0") not in (None, pid), what="another router-0")


def test_streams_leave_a_router_that_is_stopped_and_it_harms_nothing_later(
    pools, addresses, undisturbed
):
    pids, struck = pools.pids(), []
    names = {n: p for n, p in pids.items() if not n.startswith("router")}

    async def pause(streams: list[Stream]) -> None:
        await begun(streams, 50)
        os.kill(pids["router-1"], signal.SIGSTOP)
        struck.append(time.monotonic())
        await asyncio.sleep(2.2)
        os.kill(pids["router-1"], signal.SIGCONT)

    streams = spread(addresses, pause)
    print(f"router stopped: no stream waited longer than {slowest(streams, struck[0]):.2f} s")
    assert tokens(streams) == undisturbed
    assert {n: pools.pids()[n] for n in names} == names  # no worker was lost
    assert tokens(run(addresses, WORK[:4])) == undisturbed[:4]
