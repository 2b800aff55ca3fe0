from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import zmq

from baton.runtime.net.loop import Loop

PEER = """
import sys, zmq
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.setsockopt(zmq.IDENTITY, sys.argv[2].encode())
socket.setsockopt(zmq.HEARTBEAT_IVL, 100)
socket.connect(sys.argv[1])
socket.send(b"hello")
while True:
    socket.recv_multipart()
"""


class Driver:
    """Runs a loop until a condition holds."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def until(self, condition: Callable[[], object], timeout: float = 30.0) -> float:
        """Run until ``condition`` holds; return the elapsed seconds."""
        start = self.loop.now()
        stopping = False

        def check() -> None:
            nonlocal stopping
            if not stopping and (condition() or self.loop.now() - start > timeout):
                stopping = True
                self.loop.asyncio_loop.stop()
            elif not stopping:
                self.loop.asyncio_loop.call_later(0.001, check)

        check_now = self.loop.asyncio_loop.call_soon(check)
        self.loop.asyncio_loop.run_forever()
        check_now.cancel()
        if not condition():
            raise AssertionError(f"not within {timeout} s")
        return self.loop.now() - start

    def spin(self, seconds: float) -> None:
        self.loop.asyncio_loop.call_later(seconds, self.loop.asyncio_loop.stop)
        self.loop.asyncio_loop.run_forever()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def drive(loop: Loop) -> Driver:
    return Driver(loop)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def start_peer() -> Iterator[Callable[[str, str], subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []

    def start(endpoint: str, identity: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", PEER, endpoint, identity])
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
