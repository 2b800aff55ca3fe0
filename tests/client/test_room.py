"""A client of a process that has almost reached its limit on open files or threads."""

import asyncio
import subprocess
import sys
import threading

import pytest

from baton.client import AsyncClient, Client
from baton.proto import CapacityError

AT_THE_LIMIT = """
import asyncio, os, resource, sys
from contextlib import suppress
from baton.client import AsyncClient, Client
from baton.proto import CapacityError, ConnectionLost

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
address = f"ipc://{sys.argv[1]}/s"


def call():
    with Client(address, connect_timeout=0.05) as client:
        client.status()


async def call_async():
    async with AsyncClient(address, connect_timeout=0.05) as client:
        await client.status()


def open_now():
    return len(os.listdir("/proc/self/fd"))


make = call if sys.argv[2] == "Client" else lambda: asyncio.run(call_async())
with suppress(ConnectionLost):
    make()  # opens what stays open for later clients
first = open_now()
for free in range(4, 30):  # an event loop of asyncio itself needs 4
    fill = []
    with suppress(OSError):
        while True:
            fill.append(os.dup(0))
    for descriptor in fill[:free]:
        os.close(descriptor)
    try:
        make()
    except CapacityError as problem:
        print("capacity", problem)
    except ConnectionLost:
        print("connects")
    for descriptor in fill[free:]:
        os.close(descriptor)
print(open_now() - first)
"""


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_too_few_free_files_are_a_typed_error_and_end_no_process(kind, tmp_path):
    """It raised errors of ZeroMQ and kept files, and libzmq aborted the user's program."""
    ended = subprocess.run(
        [sys.executable, "-c", AT_THE_LIMIT, str(tmp_path), kind],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    *lines, leaked = ended.stdout.splitlines()
    assert lines[0] == (
        "capacity cannot connect: Too many open files (64); close some, or raise the limit on "
        "open files (ulimit -n)"
    )
    refused = lines.count(lines[0])
    assert lines[refused:] == ["connects"] * (len(lines) - refused)
    assert len(lines) > refused
    assert leaked == "0"


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_too_few_threads_are_a_typed_error(kind, tmp_path, monkeypatch):
    """libzmq aborted the user's program, and a gateway at its first request."""
    started, real = [], threading.Thread.start

    def start(thread):
        if len(started) == 1:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    address = f"ipc://{tmp_path}/s"

    async def call():
        async with AsyncClient(address) as client:
            await client.status()

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(CapacityError, match=r"can't start new thread; raise .*ulimit -u"):
        Client(address) if kind == "Client" else asyncio.run(call())
    assert [thread.is_alive() for thread in started] == [False]
