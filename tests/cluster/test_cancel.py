"""Cancelled requests and dead clients: their blocks are free at once, the others never notice."""

import asyncio
import random
import subprocess
import sys
import time

import pytest

from baton.client import AsyncClient

from ..processes import wait_until
from ..suite.short import some_long
from .conftest import command_environment
from .streams import Job, Stream, follow, jobs, new_salt, run, tokens

pytestmark = pytest.mark.cluster

WORK = jobs(16, prompt=400, new=80, seed=3)
LONG = jobs(8, prompt=400, new=1500, seed=4)


@pytest.fixture(scope="module")
def pools(shared_cluster):
    settings = {"kv_memory": "64MiB", "max_num_batched_tokens": 128, "log_level": "info"}
    return shared_cluster(prefill=2, decode=2, **settings)


@pytest.fixture
def clean(pools):
    """Afterwards no worker holds a block and the router holds no request."""
    yield pools
    wait_until(lambda: idle(pools), what="everything to be free")


def idle(cluster) -> bool:
    with cluster.client() as client:
        state = client.status()
    kept = state["router"]["requests"]
    blocks = sum(worker["kv_blocks_used"] for worker in state["workers"])
    return not (blocks or kept["in_flight"] or kept["unacknowledged"])


class CancelLog:
    """When the router saw each cancel, and when each worker had freed its blocks."""

    def __init__(self, cluster) -> None:
        self.seen: dict[str, float] = {}
        self.freed: dict[str, float] = {}
        for line in cluster.text().splitlines():
            _, _, event = line.partition(": info: ")
            name, *pairs = event.split(" ")
            fields = dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)
            if name == "request.cancelled":
                self.seen[fields["request"]] = float(fields["at"])
            elif name == "request.freed":
                at = max(float(fields["at"]), self.freed.get(fields["request"], 0.0))
                self.freed[fields["request"]] = at

    def latencies(self, without=frozenset()) -> list[float]:
        """Seconds from each cancel to its last freed block, shortest first."""
        return sorted(self.freed[key] - at for key, at in self.seen.items() if key not in without)


def percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def report(what: str, latencies: list[float]) -> None:
    """Shown with ``pytest -s``."""
    p50, p99 = (percentile(latencies, share) * 1e3 for share in (0.5, 0.99))
    print(f"{what}: {len(latencies)} cancelled, blocks free after {p50:.1f} ms, p99 {p99:.1f} ms")


async def cancel_later(client: AsyncClient, job: Job, delay: float, least: int) -> None:
    """Start a job, and drop it after ``delay`` seconds or ``least`` tokens."""
    stream = Stream()
    task = asyncio.create_task(follow(client, job, stream, new_salt()))
    until = time.monotonic() + delay
    while time.monotonic() < until and len(stream.tokens) < least and not task.done():
        await asyncio.sleep(0.002)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def cancels_beside(address: str, work: list[Job], count: int, width: int) -> list[Stream]:
    """``count`` random cancels, ``width`` at a time, beside ``work`` again and again."""
    rng = random.Random(count)
    left = iter(range(count))
    survivors: list[Stream] = []

    async def storm(client: AsyncClient) -> None:
        for _ in left:
            job = rng.choice(LONG)
            await cancel_later(client, job, rng.random() * 0.25, rng.choice([1, 30, 2000]))

    async with AsyncClient(address) as client, AsyncClient(address) as other:
        storms = [asyncio.create_task(storm(client)) for _ in range(width)]
        while not all(task.done() for task in storms):
            streams = [Stream() for _ in work]
            pairs = zip(work, streams, strict=True)
            await asyncio.gather(*(follow(other, j, s, new_salt()) for j, s in pairs))
            survivors += streams
        await asyncio.gather(*storms)
    return survivors


def all_freed(cluster, known, count: int) -> CancelLog:
    """The log, once it has ``count`` more cancels than ``known`` and all seen are freed."""

    def complete() -> CancelLog | None:
        log = CancelLog(cluster)
        enough = len(log.seen.keys() - known) >= count
        return log if enough and log.seen.keys() <= log.freed.keys() else None

    return wait_until(complete, what="the workers' log lines")


@pytest.mark.parametrize("count", some_long(100, 1000))
def test_random_cancels_leak_nothing_and_touch_nobody(clean, undisturbed, count):
    known = CancelLog(clean).seen.keys()
    survivors = asyncio.run(cancels_beside(clean.address, WORK, count, 16))
    assert tokens(survivors) == undisturbed * (len(survivors) // len(WORK))
    # Some are dropped before they were sent; the slower the machine, the more.
    log = all_freed(clean, known, count // 2)
    report("storm", log.latencies(known))


@pytest.mark.long
def test_blocks_are_free_100_ms_after_a_cancel(clean):
    """One request at a time: beside others it would measure the scheduling of the processor."""

    async def lone_cancels(count: int) -> None:
        rng = random.Random(1)
        async with AsyncClient(clean.address) as client:
            for _ in range(count):
                await cancel_later(client, rng.choice(LONG), rng.random() * 0.1, 2000)

    def p99_of_a_run() -> float:
        known = CancelLog(clean).seen.keys()
        asyncio.run(lone_cancels(50))
        latencies = all_freed(clean, known, 25).latencies(known)
        report("lone cancels", latencies)
        return percentile(latencies, 0.99)

    # A busy machine may spoil a run; a timer in the way would spoil all.
    assert any(p99_of_a_run() <= 0.1 for _ in range(5))


DOOMED = """
import sys, time
from baton.client import Client
from baton.proto.sampling import SamplingParams
params = SamplingParams(max_new_tokens=1500, ignore_eos=True, seed=1)
client = Client(sys.argv[1])
streams = [client.generate(list(range(20 + i, 320 + i)), params) for i in range(8)]
for stream in streams[:4]:
    next(stream)
print("running", flush=True)
time.sleep(60)
"""


def test_the_requests_of_a_killed_client_are_freed(clean, undisturbed):
    known = CancelLog(clean).seen.keys()
    doomed = subprocess.Popen(
        [sys.executable, "-P", "-c", DOOMED, clean.address],
        stdout=subprocess.PIPE,
        env=command_environment(clean.folder),
    )

    async def kill(_streams: list[Stream]) -> None:
        assert await asyncio.to_thread(doomed.stdout.readline) == b"running\n"
        doomed.kill()

    with doomed:
        survivors = run(clean.address, WORK, kill)
    assert tokens(survivors) == undisturbed
    report("client killed", all_freed(clean, known, 8).latencies(known))
