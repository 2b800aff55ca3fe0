"""Lone round trip over ipc: our loop and channels beside blocking pyzmq and zmq.asyncio.

Prints medians of one run; only their ratios carry over to other machines.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
import zmq
import zmq.asyncio

from baton.runtime.net.loop import Loop
from baton.runtime.net.sockets import DealerChannel, RouterChannel

from .scratch import scratch_folder

ROUNDS = 3000
WARM_UP = 300
BODY = b"x" * 64


def serve_blocking(endpoint: str) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        socket.send_multipart(socket.recv_multipart())


def serve_asyncio(endpoint: str) -> None:
    async def main() -> None:
        socket = zmq.asyncio.Context().socket(zmq.ROUTER)
        socket.bind(endpoint)
        while True:
            await socket.send_multipart(await socket.recv_multipart())

    uvloop.run(main())


def serve_loop(endpoint: str) -> None:
    loop = Loop()
    channel = RouterChannel(zmq.Context(), endpoint)
    channel.attach(loop, channel.send)
    loop.run()


def ask_blocking(endpoint: str) -> list[float]:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(endpoint)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        socket.send(BODY)
        socket.recv()
        times.append(time.perf_counter() - start)
    return times


def ask_asyncio(endpoint: str) -> list[float]:
    async def main() -> list[float]:
        socket = zmq.asyncio.Context().socket(zmq.DEALER)
        socket.connect(endpoint)
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            await socket.send(BODY)
            await socket.recv()
            times.append(time.perf_counter() - start)
        return times

    return uvloop.run(main())


def ask_loop(endpoint: str) -> list[float]:
    loop = Loop()
    channel = DealerChannel(zmq.Context(), endpoint, b"bench")
    times: list[float] = []
    start = 0.0

    def ask() -> None:
        nonlocal start
        start = time.perf_counter()
        channel.send([BODY])

    def answered(_frames: object) -> None:
        times.append(time.perf_counter() - start)
        if len(times) < ROUNDS:
            ask()
        else:
            loop.stop()

    channel.attach(loop, answered, ask)
    loop.run()
    return times


SERVERS: dict[str, Callable[[str], None]] = {
    "blocking": serve_blocking,
    "asyncio": serve_asyncio,
    "loop": serve_loop,
}
CLIENTS: dict[str, Callable[[str], list[float]]] = {
    "blocking": ask_blocking,
    "asyncio": ask_asyncio,
    "loop": ask_loop,
}


@contextmanager
def server(kind: str, endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-m", "baton.benchmarks.loop", kind, endpoint])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def measure(kind: str, folder: str) -> tuple[float, float]:
    """Median round trip in µs, and CPU µs per round trip of the server."""
    endpoint = f"ipc://{folder}/{kind}"
    with server(kind, endpoint) as child:
        times = CLIENTS[kind](endpoint)
        cpu = cpu_seconds(child.pid)
    return statistics.median(times[WARM_UP:]) * 1e6, cpu / ROUNDS * 1e6


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(prog="loop", description=__doc__).parse_args()
    with scratch_folder() as folder:
        rows = {kind: measure(kind, str(folder)) for kind in SERVERS}
    print("lone round trip over ipc, 64 bytes, both sides of one kind")
    for kind, (wall, cpu) in rows.items():
        ratio = wall / rows["blocking"][0]
        print(f"  {kind:9} {wall:7.0f} us  {ratio:5.2f} x blocking  server CPU {cpu:5.0f} us")
    print("  limit: loop < asyncio in both columns")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        SERVERS[sys.argv[1]](sys.argv[2])
    else:
        main()
