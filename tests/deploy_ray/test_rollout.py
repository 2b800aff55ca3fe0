"""Replacement of every worker and both routers under load; a kill of one of two routers."""

import os

import pytest

from ..cluster.streams import Stream, begun, check, jobs, run, tokens, under_load
from .bed import parent, processes
from .conftest import launched, note

pytestmark = pytest.mark.timeout(240)

WORK = jobs(100, prompt=60, new=40)
LONG = jobs(100, prompt=200, new=400)
BOTH = "tcp://127.0.0.1:7070,tcp://127.0.0.1:7071"
NAMES = ("router-0", "router-1", "prefill-0", "decode-0")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with launched(tmp_path_factory.mktemp("bed"), {"routers": 2}) as cluster:
        yield cluster


def test_every_worker_and_router_is_replaced_under_load(cluster):
    undisturbed = tokens(run(BOTH, WORK))
    before = {cluster.pid(name) for name in NAMES}
    said: list[str] = []

    def roll_out() -> None:
        words = ("--wait", "max_num_seqs=40", "grace=25")
        said.append(cluster.baton("rollout", *words, timeout=180.0))

    check(under_load(BOTH, WORK, roll_out, 200.0), undisturbed)
    assert "4 of 4 replaced" in said[0]
    assert len(cluster.members()) == 4
    assert not before & set(processes())
    assert set(cluster.pools().values()) == {1}


def test_clients_of_a_killed_router_go_on_at_the_other(cluster):
    undisturbed = tokens(run(BOTH, LONG))
    router = cluster.pid("router-0")

    async def disturb(streams: list[Stream]) -> None:
        await begun(streams, len(LONG) // 2)
        os.kill(parent(router), 9)
        os.kill(router, 9)

    streams = run(BOTH, LONG, disturb)
    assert tokens(streams) == undisturbed
    gap = max(stream.longest_gap for stream in streams)
    note("one of two routers killed, longest wait of a stream", gap)
