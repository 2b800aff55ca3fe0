"""Handshakes that are cut, bent, huge or slow, at every listening socket of a cluster.

The bytes are those of real handshakes: between a peer and the socket stands a relay that spoils one
thing of what the peer says, drawn from a seed. Nothing of it may reach a decoder or stay behind.
"""

from __future__ import annotations

import contextlib
import random
import resource
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from baton.runtime.keys.curve import CurveKeys, apply_client_keys
from baton.runtime.keys.keyring import make_folder, read_pair

from ..processes import wait_until
from .driver import Job, ask, greedy
from .reference import DATA, cases_of
from .scan import keys_of, unlisted
from .test_keys import dropped, free_port, ports_of

pytestmark = pytest.mark.cluster

MODEL = "llama_plain"
SEED = 20_260
STREAMS = 36
"""Spoiled handshakes per socket."""
GREETING, HELLO = 64, 202
INITIATE = 330
"""Approximate bytes of a peer's messages; a cut or a flip falls anywhere in their sum."""
DECODED = ("malformed", "protocol", "damaged", "frames", "intruders", "denied")
"""In the names of counters of what a process has read and could not use."""
HANDSHAKE_S = 2.0
HUGE = (b"\x06" + b"\x7f" + b"\xff" * 7, b"\x02" + b"\xff" * 8, b"\x04\xff", b"\x06" + bytes(8))
"""Heads of frames: a command of 2**63 bytes, a message of more, one of 255, an empty long one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k") / "keys"
    make_folder(folder)
    return folder


@pytest.fixture(scope="module")
def running(shared_cluster, folder):
    """A cluster that is the same processes to the end."""
    running = shared_cluster(
        model=DATA / MODEL, prefill=1, decode=1, transport="tcp", keys=str(folder),
        address=f"tcp://127.0.0.1:{free_port()}", admin=f"tcp://127.0.0.1:{free_port()}",
    )  # fmt: skip
    before = running.pids()
    yield running
    assert running.pids() == before and running.process.poll() is None


def sockets_of(running) -> list[tuple[int, str]]:
    """Every listening port, and whose file has the key of its process."""
    found = [
        (port, name.partition("-")[0] if name in running.pids() else "operator")
        for name, ports in ports_of(running).items()
        for port in ports
    ]
    assert sorted(who for _, who in found) == [
        "decode", "decode", "operator", "prefill", "router", "router",
    ]  # fmt: skip
    return found


def descriptors(running) -> dict[str, int]:
    pids = {**running.pids(), "controller": running.process.pid}
    return {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()}


def memory(running) -> dict[str, int]:
    """Resident bytes by process."""
    found = {}
    for name, pid in {**running.pids(), "controller": running.process.pid}.items():
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found[name] = pages * resource.getpagesize()
    return found


def serves(running) -> None:
    case = cases_of(MODEL)[4]
    with running.client() as client:
        assert ask(client, Job(case.prompt, greedy(16))).tokens == case.greedy[:16]


@contextlib.contextmanager
def nothing_stays(running, more_bytes: int = 24 << 20) -> Iterator[None]:
    """Descriptors return to their number, memory stays, no decoder saw anything."""
    serves(running)
    files, sizes, counters = descriptors(running), memory(running), dropped(running)
    yield
    serves(running)
    wait_until(
        lambda: all(n <= files[name] + 4 for name, n in descriptors(running).items()),
        what="descriptors to be closed",
    )
    grown = {name: size - sizes[name] for name, size in memory(running).items()}
    assert max(grown.values()) < more_bytes, grown
    now = dropped(running)
    changed = {name for name, count in now.items() if count != counters.get(name, 0)}
    assert not [name for name in changed if any(mark in name for mark in DECODED)], changed


# ------------------------------------------------------------------------------ spoiling


class Spoiler:
    """Changes one thing in a stream, at the byte where it lies."""

    def __init__(self, draw: random.Random) -> None:
        self.kind = draw.choice(("flip", "flip", "cut", "hold", "drop", "again", "noise", "huge"))
        self.at = draw.randrange(GREETING + HELLO + INITIATE)
        if self.kind == "huge":
            self.at = draw.choice((GREETING, GREETING + HELLO))
        self.noise = (
            draw.choice(HUGE)
            if self.kind == "huge"
            else draw.randbytes(draw.choice((1, 40, 70_000)))
        )
        self.bit = 1 << draw.randrange(8)
        self.seen = 0
        self.held = False

    def __call__(self, data: bytes) -> tuple[bytes, bool]:
        """What goes on in place of ``data``, and whether the connection does."""
        start, self.seen = self.seen, self.seen + len(data)
        place = self.at - start
        if self.held:
            return b"", True
        if not 0 <= place < len(data):
            return data, True
        before, after = data[:place], data[place:]
        if self.kind == "flip":
            return before + bytes([after[0] ^ self.bit]) + after[1:], True
        if self.kind == "cut":
            return before, False
        if self.kind == "hold":
            self.held = True
            return before, True
        if self.kind == "drop":
            return before + after[1:], True
        if self.kind == "again":
            return before + after + after, True
        return before + self.noise + after, True


def spoiled(ports: dict[int, list[CurveKeys]], seed: int) -> tuple[int, int]:
    """Have peers with these keys shake hands through the relay; handshakes begun and ended well."""
    draw = random.Random(seed)
    ended = begun = 0
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        context.set(zmq.MAX_SOCKETS, 4000)
        listeners, pairs, monitors = {}, {}, []
        for port, keys in ports.items():
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=512))
            listeners[listener] = port
            for pair in keys:
                peer = context.socket(zmq.DEALER)
                for option, value in ((zmq.LINGER, 0), (zmq.RECONNECT_IVL, -1), (zmq.IMMEDIATE, 1)):
                    peer.setsockopt(option, value)
                apply_client_keys(peer, pair)
                monitors.append(peer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED))
                peer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
                stack.callback(peer.close, 0)
                begun += 1
        until = time.monotonic() + HANDSHAKE_S + 1
        while (left := until - time.monotonic()) > 0:
            for one in readable([*listeners, *pairs], min(left, 0.05)):
                if one in listeners:
                    near = stack.enter_context(one.accept()[0])
                    address = ("127.0.0.1", listeners[one])
                    far = stack.enter_context(socket.create_connection(address))
                    pairs[near] = (far, Spoiler(draw))
                    pairs[far] = (near, lambda data: (data, True))
                elif one in pairs:
                    relay(one, pairs)
        ended = sum(bool(monitor.poll(0)) for monitor in monitors)
        for monitor in monitors:
            monitor.close(0)
    return begun, ended


def readable(sockets: list[socket.socket], wait: float) -> list[socket.socket]:
    """As select, for any number of them."""
    by_number = {one.fileno(): one for one in sockets}
    poll = select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(wait * 1000)]


def relay(one: socket.socket, pairs: dict) -> None:
    other, spoil = pairs[one]
    data = b""
    with contextlib.suppress(OSError):
        data = one.recv(65536)
    given, goes_on = spoil(data) if data else (b"", False)
    with contextlib.suppress(OSError):
        other.sendall(given)
    if not goes_on:
        for end in (one, other):
            pairs.pop(end, None)
            end.close()


def test_a_spoiled_handshake_gets_a_stranger_nowhere(running, folder):
    """Without a listed key none ends well; with one it may, if the byte did not matter."""
    sockets = sockets_of(running)
    with nothing_stays(running):
        strangers = {
            port: [unlisted(read_pair(folder / f"{who}.key").public.encode())] * STREAMS
            for port, who in sockets
        }
        assert spoiled(strangers, SEED) == (STREAMS * len(sockets), 0)
        roles = ("client", "operator", "prefill", "decode")
        friends = {
            port: [keys_of(folder, role, who) for role in roles] * (STREAMS // len(roles))
            for port, who in sockets
        }
        begun, ended = spoiled(friends, SEED + 1)
        assert ended < begun / 2  # half the bytes do not matter, or their role does
