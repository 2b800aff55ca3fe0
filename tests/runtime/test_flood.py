"""A flood of connections without a key, at a limit of 1,024 open files."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import zmq

from baton.runtime.keys.curve import apply_client_keys
from baton.runtime.keys.identity_owners import tagged
from baton.runtime.keys.keyring import KeyRing, make_folder

pytestmark = pytest.mark.integration

SERVER = """
import resource, sys, zmq
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from baton.runtime.keys.keyring import KeyRing
from baton.runtime.net.loop import Loop
from baton.runtime.net.sockets import RouterChannel
from baton.runtime.keys.zap import Doorkeeper

loop, context = Loop(), zmq.Context()
doors = Doorkeeper(context, KeyRing(sys.argv[1], "router"))
keys = doors.door("clients", "client")
channel = RouterChannel(context, "tcp://127.0.0.1:0", keys=keys)
doors.attach(loop)
channel.attach(loop, lambda identity, frames: channel.send(identity, frames))
print(channel.endpoint, flush=True)
loop.run()
"""
FLOOD = """
import resource, select, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
port, most, greeting = int(sys.argv[1]), 1500, bytes.fromhex(sys.argv[2])
poll, standing, opened = select.epoll(), {}, 0
while True:
    while len(standing) < most:
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        standing[one.fileno()] = one
        poll.register(one, select.EPOLLIN | (select.EPOLLOUT if greeting else 0))
        opened += 1
        if opened == 5000:
            print("flooding", flush=True)
    for number, events in poll.poll():
        one = standing[number]
        try:
            if events & select.EPOLLOUT:
                one.send(greeting)
                poll.modify(number, select.EPOLLIN)
            goes_on = not events & ~select.EPOLLOUT or one.recv(4096)
        except OSError:
            goes_on = False
        if not goes_on:  # closed: the next one
            poll.unregister(number)
            standing.pop(number).close()
"""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(23, b"\0") + bytes(32)
CLIENTS = 24


@pytest.fixture
def run():
    children = []

    def start(code: str, *arguments: str) -> str:
        """Start a process; return it and its first line."""
        child = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
        )
        children.append(child)
        return child.stdout.readline().strip()

    yield start
    for child in reversed(children):
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.long  # uses both processors of a small machine for 10 s
@pytest.mark.timeout(240)
@pytest.mark.parametrize("said", [b"", GREETING], ids=["silent", "greeting"])
def test_clients_behind_the_address_of_a_flood_get_in(run, tmp_path, said):
    """Each closed connection is replaced at once by another connection without a key."""
    make_folder(tmp_path / "keys")
    endpoint = run(SERVER, str(tmp_path / "keys"))
    assert run(FLOOD, endpoint.rpartition(":")[2], said.hex()) == "flooding"
    keys = KeyRing(tmp_path / "keys", "client").connecting("router")
    with zmq.Context() as context:
        poller, waiting = zmq.Poller(), set()
        for number in range(CLIENTS):
            one = context.socket(zmq.DEALER)
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.HANDSHAKE_IVL, 2000)
            one.setsockopt(zmq.IDENTITY, tagged(b"client-%d" % number, keys.public))
            apply_client_keys(one, keys)
            one.connect(endpoint)
            one.send(b"hi")
            poller.register(one, zmq.POLLIN)
            waiting.add(one)
        until = time.monotonic() + 120
        while waiting and time.monotonic() < until:
            for one, _ in poller.poll(100):
                if one.recv() == b"hi":  # skip the server's probes
                    waiting.discard(one)
        missing = len(waiting)
        context.destroy(linger=0)
    assert missing == 0
