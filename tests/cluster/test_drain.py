"""Ends in good order: of a worker by draining it, of everything by Ctrl-C."""

import asyncio
import os
import signal
import sys

import pytest

from baton.client import AsyncClient
from baton.proto.errors import CapacityError

from ..processes import alive, wait_until
from .conftest import command_environment
from .streams import Stream, begun, follow, jobs, new_salt, run, tokens

pytestmark = pytest.mark.cluster

WORK = jobs(8, prompt=100, new=900, seed=6)
SHORT = jobs(4, prompt=100, new=8, seed=7)


@pytest.fixture(scope="module")
def undisturbed():
    """The tokens of ``WORK`` from the first cluster that is asked; they are those of any other."""
    known = []

    def of(cluster):
        if not known:
            known.append(tokens(run(cluster.address, WORK)))
        return known[0]

    return of


async def short_streams(cluster) -> list[Stream]:
    streams = [Stream() for _ in SHORT]
    async with AsyncClient(cluster.address) as client:
        pairs = zip(SHORT, streams, strict=True)
        await asyncio.gather(*(follow(client, job, s, new_salt()) for job, s in pairs))
    return streams


async def command(cluster, *arguments: str) -> int:
    """The exit code of the ``baton`` command."""
    options = ["-P", "-m", "baton.cli", *arguments, f"--address={cluster.address}"]
    environment = command_environment(cluster.folder)
    process = await asyncio.create_subprocess_exec(sys.executable, *options, env=environment)
    return await process.wait()


def test_drained_workers_finish_what_they_have_and_leave(cluster, undisturbed):
    running = cluster(prefill=2, decode=2)
    wanted = undisturbed(running)
    later: list[Stream] = []

    async def drain_two(streams: list[Stream]) -> None:
        await begun(streams, len(WORK))
        async with AsyncClient(running.address) as client:
            for name in ("decode-0", "prefill-0"):
                assert await client.drain(name) == "draining"
        later.extend(await short_streams(running))

    streams = run(running.address, WORK, drain_two)
    assert tokens(streams) == wanted
    tokens(later)
    last = max(stream.ended for stream in streams if stream.decode == "decode-0")
    assert last > later[0].started, "nothing ran on the drained worker any more"
    assert {(stream.prefill, stream.decode) for stream in later} == {("prefill-1", "decode-1")}
    wait_until(lambda: set(running.pids()) == {"router", "prefill-1", "decode-1"}, what="the end")
    assert asyncio.run(command(running, "drain", "prefill-1", "--wait")) == 1
    assert set(running.pids()) == {"router", "prefill-1", "decode-1"}
    assert asyncio.run(command(running, "drain", "prefill-1", "--force", "--wait")) == 0
    wait_until(lambda: set(running.pids()) == {"router", "decode-1"}, what="the end")
    with running.client() as client:
        assert client.status()["router"]["requests"]["replayed"] == 0
    running.wait_said("decode-0 finished its requests and was not restarted")


def test_an_interrupt_lets_streams_finish_and_refuses_new_ones(cluster, undisturbed):
    running = cluster(prefill=1, decode=2)
    wanted = undisturbed(running)
    pids = running.pids()

    async def interrupt(streams: list[Stream]) -> None:
        async with AsyncClient(running.address) as late:
            await late.describe()
            await begun(streams, len(WORK))
            running.interrupt()
            while "draining" not in running.text():
                await asyncio.sleep(0.01)
            refused = Stream()
            await follow(late, SHORT[0], refused, new_salt())
        assert isinstance(refused.error, CapacityError)
        assert refused.error.retry_after

    assert tokens(run(running.address, WORK, interrupt)) == wanted
    assert running.process.wait(60) == 0
    assert [name for name, pid in pids.items() if alive(pid)] == []
    assert running.leftovers() == []


def test_a_terminated_worker_leaves_after_its_grace_and_others_take_over(cluster, undisturbed):
    running = cluster(prefill=1, decode=2, grace=0.05, log_level="info")
    wanted = undisturbed(running)

    async def terminate(streams: list[Stream]) -> None:
        await begun(streams, len(WORK))
        os.kill(running.pids()["decode-0"], signal.SIGTERM)

    assert tokens(run(running.address, WORK, terminate)) == wanted
    wait_until(lambda: "decode-0" not in running.pids(), what="the end")
    running.wait_said("decode-0: info: worker.exit reason=grace_over")
    running.wait_said("decode-0 finished its requests and was not restarted")
