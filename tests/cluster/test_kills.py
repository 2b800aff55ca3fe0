"""Processes that die or stop under 16 streams: every stream ends with its own tokens."""

import os
import signal

import pytest

from ..processes import alive, wait_until
from .driver import lost_requests
from .streams import Stream, begun, jobs, run, tokens

pytestmark = pytest.mark.cluster

WORK = jobs(16, prompt=400, new=300)


@pytest.fixture(scope="module")
def pools(shared_cluster):
    """Two prefill and two decode workers; small chunks, so that prefill takes its time."""
    settings = {"kv_memory": "64MiB", "max_num_batched_tokens": 64, "worker_timeout": 1.0}
    return shared_cluster(prefill=2, decode=2, **settings)


@pytest.fixture
def whole(pools):
    """All four workers are there, and afterwards none holds a block."""
    pools.wait_ready()
    yield pools
    pools.wait_idle()


def report(what: str, streams: list[Stream]) -> None:
    """Shown with ``pytest -s``."""
    print(f"{what}: no stream waited longer than {max(s.longest_gap for s in streams):.2f} s")


def strike(cluster, sig: int, *names: str, after: int):
    """A disturbance: ``sig`` to these processes once ``after`` streams have begun."""

    async def disturb(streams: list[Stream]) -> None:
        await begun(streams, after)
        for name in names:
            os.kill(cluster.pids()[name], sig)

    return disturb


# With the first token of the first stream most prompts are still being computed; with the
# first tokens of all, everything runs on the decode workers.
@pytest.mark.parametrize(
    ("name", "sig", "after"),
    [
        ("prefill-0", signal.SIGKILL, 1),
        ("decode-0", signal.SIGKILL, 16),
        ("prefill-1", signal.SIGSTOP, 1),
        ("decode-1", signal.SIGSTOP, 16),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else str(value),
)
def test_streams_survive_the_loss_of_a_worker(whole, undisturbed, name, sig, after):
    before = lost_requests(whole)
    for _ in range(3):  # on a busy machine the blow may come when all is over
        pid = whole.pids()[name]
        streams = run(whole.address, WORK, strike(whole, sig, name, after=after))
        report(f"{name} {sig.name}", streams)
        assert tokens(streams) == undisturbed
        whole.wait_replaced(name, pid)
        assert not alive(pid)
        if lost_requests(whole) > before:
            return
    pytest.fail("nothing ran on the lost worker")


def test_streams_survive_the_loss_of_all_prefill_workers(whole, undisturbed):
    names = ("prefill-0", "prefill-1")
    pids = [whole.pids()[name] for name in names]
    streams = run(whole.address, WORK, strike(whole, signal.SIGKILL, *names, after=1))
    report("both prefill workers killed", streams)
    assert tokens(streams) == undisturbed
    for name, pid in zip(names, pids, strict=True):
        whole.wait_replaced(name, pid)


def test_streams_survive_the_death_of_the_router(whole, undisturbed):
    pid = whole.pids()["router"]
    streams = run(whole.address, WORK, strike(whole, signal.SIGKILL, "router", after=8))
    report("router killed", streams)
    assert tokens(streams) == undisturbed
    assert whole.pids()["router"] != pid
    names = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    wait_until(lambda: set(whole.workers()) == names, what="all workers to register again")
    assert tokens(run(whole.address, WORK[:2])) == undisturbed[:2]
