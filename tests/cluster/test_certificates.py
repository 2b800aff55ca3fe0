"""A worker that stalls and is then killed: its supervisor certifies the end, and streams go on."""

import asyncio
import os
import signal
import time

import pytest

from baton.runtime.keys.keyring import make_folder

from ..processes import wait_until
from .streams import Stream, begun, jobs, run, tokens

pytestmark = pytest.mark.cluster

WORK = jobs(4, prompt=60, new=1200)
STALLS_S = (0.0, 0.5, 1.2, 2.0)
RESUMED_S = 0.3
"""Longest wait between the kill and the next token of any stream, on an idle machine."""
WITHOUT_S = 2.5
"""Without a certificate a stream waits for the rest of the worker timeout of 5 s."""


@pytest.fixture(scope="module")
def pools(shared_cluster):
    return shared_cluster(prefill=1, decode=2, kv_memory="64MiB", worker_timeout=5.0)


def wait_after_kill(pools, undisturbed, name: str, stall: float) -> float:
    """Stop ``name`` for ``stall`` seconds, then kill it.

    Returns the longest wait of a stream between the kill and its next token.
    """
    pid, struck = pools.pids()[name], []

    async def strike(streams: list[Stream]) -> None:
        await begun(streams, len(WORK))
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(stall)
        struck.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    streams = run(pools.address, WORK, strike)
    assert tokens(streams) == undisturbed
    pools.wait_replaced(name, pid)
    pools.wait_ready()
    after = [next((at for at in s.times if at > struck[0]), struck[0]) for s in streams]
    return max(after) - struck[0]


def test_streams_of_a_worker_that_was_stopped_and_killed_do_not_wait_for_its_timeout(
    pools, undisturbed
):
    assert wait_after_kill(pools, undisturbed, "decode-0", 1.2) < WITHOUT_S
    assert wait_after_kill(pools, undisturbed, "decode-1", 1.2) < WITHOUT_S


@pytest.mark.long  # compares times, on an idle machine
@pytest.mark.timeout(600)
def test_streams_resume_within_a_moment_of_every_kill(pools, undisturbed):
    waits = {}
    for stall in STALLS_S:
        waits[stall] = [
            wait_after_kill(pools, undisturbed, f"decode-{number % 2}", stall)
            for number in range(5)
        ]
    for stall, found in waits.items():
        print(f"stopped for {stall} s, then killed:", " ".join(f"{wait:.3f}" for wait in found))
    assert max(max(found) for found in waits.values()) <= RESUMED_S


def test_certificates_pass_a_socket_with_keys(cluster, tmp_path):
    """With the worker's own key, which is all that its host has."""
    folder = tmp_path / "keys"
    make_folder(folder)
    keyed = cluster(prefill=1, decode=2, transport="tcp", keys=str(folder), log_level="info")
    os.kill(keyed.pids()["decode-0"], signal.SIGKILL)
    reason = "its process was killed by signal 9"
    wait_until(lambda: reason in keyed.text(), timeout=30.0, what="the certificate")
