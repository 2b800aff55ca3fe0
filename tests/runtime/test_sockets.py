"""Router and dealer channels on real sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import signal
import socket as posix
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import zmq

from baton.proto.errors import ConfigError, InternalError
from baton.runtime.keys.curve import is_local
from baton.runtime.net import sockets
from baton.runtime.net.channel import ChannelOptions, SendResult
from baton.runtime.net.loop import MESSAGES_PER_VISIT, PASSES_PER_TURN
from baton.runtime.net.sockets import DealerChannel, RouterChannel, bind

pytestmark = pytest.mark.integration


class Server:
    """A RouterChannel that echoes and records messages."""

    def __init__(self, loop, context, endpoint, **kwargs):
        self.channel = RouterChannel(context, endpoint, **kwargs)
        self.heard: list[tuple[bytes, list]] = []
        self.gone: list[bytes] = []
        self.channel.attach(loop, self.on_message, self.gone.append)

    def on_message(self, identity, frames):
        self.heard.append((identity, frames))
        self.channel.send(identity, [b"echo", *frames])


class Peer:
    """A DealerChannel that records messages."""

    def __init__(self, loop, context, endpoint, identity=b"peer", **kwargs):
        self.channel = DealerChannel(context, endpoint, identity, **kwargs)
        self.heard: list[list] = []
        self.links: list[str] = []
        self.channel.attach(loop, self.heard.append, lambda: self.links.append("up"), self.on_down)

    def on_down(self):
        self.links.append("down")


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request, tmp_path):
    return f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:0"


def test_round_trip_keeps_frames(loop, drive, context, endpoint):
    server = Server(loop, context, endpoint)
    peer = Peer(loop, context, server.channel.endpoint)
    drive.until(lambda: peer.channel.connected)
    large = np.arange(100_000, dtype=np.int32)
    assert peer.channel.send([b"small", large, b""])
    drive.until(lambda: peer.heard)
    identity, frames = server.heard[0]
    assert identity == b"peer"
    assert isinstance(frames[0], bytes) and isinstance(frames[1], memoryview)
    assert np.array_equal(np.frombuffer(frames[1], np.int32), large)
    assert [bytes(f) for f in peer.heard[0]] == [b"echo", b"small", large.tobytes(), b""]
    assert server.channel.stats.received == server.channel.stats.sent == 1


def test_send_says_why_it_did_not(loop, drive, context, tmp_path):
    server = Server(loop, context, f"ipc://{tmp_path}/s", options=ChannelOptions(send_hwm=5))
    assert server.channel.send(b"nobody", [b"x"]) is SendResult.UNREACHABLE
    deaf = context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.IDENTITY, b"deaf")
    deaf.setsockopt(zmq.RCVHWM, 5)
    deaf.connect(server.channel.endpoint)
    deaf.send(b"hi")
    drive.until(lambda: server.heard)
    block = bytes(1 << 20)
    results = [server.channel.send(b"deaf", [block]) for _ in range(50)]
    assert results[0] is SendResult.SENT
    assert set(results) == {SendResult.SENT, SendResult.FULL}
    assert server.channel.stats.full > 0 and server.channel.stats.unreachable == 1


def test_a_dealer_queues_nothing_without_a_connection(loop, drive, context, tmp_path):
    peer = Peer(loop, context, f"ipc://{tmp_path}/s")
    assert peer.channel.send([b"stale"]) is SendResult.UNREACHABLE
    server = Server(loop, context, f"ipc://{tmp_path}/s")
    drive.until(lambda: peer.channel.connected)
    peer.channel.send([b"fresh"])
    drive.until(lambda: server.heard)
    assert server.heard[0][1] == [b"fresh"]


def test_a_dealer_comes_back_after_its_router(loop, drive, context, tmp_path):
    endpoint = f"ipc://{tmp_path}/s"
    first = Server(loop, context, endpoint)
    peer = Peer(loop, context, endpoint)
    drive.until(lambda: peer.links == ["up"])
    first.channel.close()
    drive.until(lambda: peer.links == ["up", "down"])
    second = Server(loop, context, endpoint)
    drive.until(lambda: peer.links == ["up", "down", "up"])
    peer.channel.send([b"again"])
    drive.until(lambda: second.heard)


def test_a_closed_peer_is_reported_once(loop, drive, context, endpoint):
    server = Server(loop, context, endpoint)
    peers = [Peer(loop, context, server.channel.endpoint, b"p%d" % n) for n in range(3)]
    drive.until(lambda: all(p.channel.connected for p in peers))
    for peer in peers:
        peer.channel.send([b"hi"])
    drive.until(lambda: len(server.heard) == 3)
    peers[1].channel.close()
    drive.until(lambda: server.gone)
    drive.spin(0.08)
    assert server.gone == [b"p1"]
    assert server.channel.peers == 2


def test_a_peer_that_speaks_and_dies_at_once_is_reported(loop, drive, context, endpoint):
    server = Server(loop, context, endpoint)
    for n in range(20):
        brief = context.socket(zmq.DEALER)
        brief.setsockopt(zmq.IDENTITY, b"b%d" % n)
        brief.setsockopt(zmq.LINGER, 30_000)
        brief.connect(server.channel.endpoint)
        brief.send(b"hi")
        brief.close()
    time.sleep(0.05)  # all connections end before the loop's first turn
    while server.channel._read_monitor():
        pass  # the worst order: every close event is read before the messages
    drive.until(lambda: len(server.heard) == 20 and len(set(server.gone)) == 20)
    assert server.channel.peers == 0


def test_a_peer_that_reconnects_is_not_reported(loop, drive, context, tmp_path):
    """Only the connection ends; the peer lives."""
    server = Server(loop, context, f"ipc://{tmp_path}/s")
    proxy = Cut(tmp_path / "proxy", tmp_path / "s")
    peer = Peer(loop, context, f"ipc://{tmp_path}/proxy")
    drive.until(lambda: peer.channel.connected)
    peer.channel.send([b"one"])
    drive.until(lambda: peer.heard)
    # The server's side of the old connection stays half open until the peer has reconnected.
    proxy.cut_client_side()
    drive.until(lambda: peer.links == ["up", "down", "up"])
    proxy.close_old_server_side()
    drive.spin(0.1)
    proxy.stop()
    assert server.gone in ([], [b"peer"])
    assert proxy.accepted >= 2


class Cut:
    """A relay between two unix sockets; connections can be cut on either side."""

    def __init__(self, listen: Path, target: Path) -> None:
        self.target = target
        self.server = posix.socket(posix.AF_UNIX)
        self.server.bind(str(listen))
        self.server.listen()
        self.pairs: list[tuple[posix.socket, posix.socket]] = []
        self.accepted = 0
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def _accept(self) -> None:
        while True:
            try:
                left, _ = self.server.accept()
            except OSError:
                return
            self.accepted += 1
            right = posix.socket(posix.AF_UNIX)
            right.connect(str(self.target))
            self.pairs.append((left, right))
            for a, b in ((left, right), (right, left)):
                threading.Thread(target=self._copy, args=(a, b), daemon=True).start()

    def _copy(self, source: posix.socket, sink: posix.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            return

    def cut_client_side(self) -> None:
        self.pairs[0][0].shutdown(posix.SHUT_RDWR)

    def close_old_server_side(self) -> None:
        self.pairs[0][1].shutdown(posix.SHUT_RDWR)

    def stop(self) -> None:
        self.server.shutdown(posix.SHUT_RDWR)
        self.server.close()
        self.thread.join(1)
        for pair in self.pairs:
            for end in pair:
                end.close()


def test_a_killed_peer_is_seen_without_heartbeats(loop, drive, context, endpoint, start_peer):
    """The kernel closes the process's connection at once."""
    options = ChannelOptions(heartbeat_s=0, heartbeat_timeout_s=0)
    server = Server(loop, context, endpoint, options=options)
    child = start_peer(server.channel.endpoint, "doomed")
    drive.until(lambda: server.heard)
    child.send_signal(signal.SIGKILL)
    drive.until(lambda: server.gone)
    assert server.gone == [b"doomed"]


def test_a_stopped_peer_is_seen_by_heartbeat(loop, drive, context, tmp_path, start_peer):
    server = Server(loop, context, f"ipc://{tmp_path}/s")
    child = start_peer(server.channel.endpoint, "frozen")
    drive.until(lambda: server.heard)
    child.send_signal(signal.SIGSTOP)
    drive.until(lambda: server.gone)  # usually 0.4 s; the connection stays open
    child.send_signal(signal.SIGCONT)
    assert server.gone == [b"frozen"]


LISTENER = """
import sys, time, zmq
from baton.runtime.net.channel import ChannelOptions
from baton.runtime.net.sockets import DealerChannel, RouterChannel
options = ChannelOptions(heartbeat_s=0.1)
"""
LEAVES = """
channel = RouterChannel(zmq.Context(), "tcp://127.0.0.1:0", options=options)
with zmq.Context() as theirs:
    peer = theirs.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.SNDHWM, 0)
    peer.connect(channel.endpoint)
    for _ in range(5000):
        peer.send(bytes(1000))
    time.sleep(0.4)
    peer.close()
    time.sleep(0.5)
print("alive")
"""
PINGS = """
import socket, struct
channel = RouterChannel(zmq.Context(), "tcp://127.0.0.1:0", options=options)
raw = socket.create_connection(("127.0.0.1", int(channel.endpoint.rpartition(":")[2])))
raw.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x01" + b"NULL".ljust(20, b"\\0") + bytes(32))
time.sleep(0.2)
ready = b"\\x05READY\\x0bSocket-Type\\0\\0\\0\\x06DEALER"
raw.sendall(b"\\x04" + bytes([len(ready)]) + ready)
ping = b"\\x04PING\\0\\0"
try:
    raw.sendall((b"\\0\\x05hello\\x04" + bytes([len(ping)]) + ping) * 5000)
    time.sleep(0.1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
finally:
    raw.close()
time.sleep(0.5)
while channel.recv() is not None:
    time.sleep(0.0001)
print("alive")
"""
LISTENS = """
with zmq.Context() as theirs:
    listener = theirs.socket(zmq.ROUTER)
    listener.setsockopt(zmq.LINGER, 0)
    listener.setsockopt(zmq.SNDHWM, 0)
    listener.bind("tcp://127.0.0.1:0")
    address = listener.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\\0").decode()
    channel = DealerChannel(zmq.Context(), address, b"us", options=options)
    while not channel.send([b"hello"]):
        time.sleep(0.01)
    (who, _) = listener.recv_multipart()
    for _ in range(5000):
        listener.send_multipart([who, bytes(1000)])
    time.sleep(0.4)
    listener.close()
    time.sleep(0.5)
print("alive")
"""


@pytest.mark.parametrize("peer", [LEAVES, PINGS, LISTENS], ids=["leaves", "pings", "listens"])
def test_a_peer_that_leaves_a_full_queue_unread_does_not_end_this_process(peer):
    """libzmq aborted at its next ping or pong, with ``Assertion failed: !_io_error``."""
    done = subprocess.run([sys.executable, "-c", LISTENER + peer], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_flood_of_refused_messages_does_not_stop_the_loop(loop, drive, context, endpoint):
    """Each one was dropped within one visit, so timers waited until the flood was over."""
    options = ChannelOptions(max_frames=1)
    server = Server(loop, context, endpoint, options=options)
    stats = server.channel.stats
    ends = [0]
    loop.on_turn_end(lambda: ends.append(stats.malformed))
    flood = context.socket(zmq.DEALER)
    flood.setsockopt(zmq.LINGER, 0)
    flood.setsockopt(zmq.SNDHWM, 0)
    flood.connect(server.channel.endpoint)
    for _ in range(3000):
        flood.send_multipart([b"one", b"too many"])
    time.sleep(0.3)  # most of them wait now
    drive.until(lambda: stats.malformed == 3000)
    flood.close()
    most = MESSAGES_PER_VISIT * PASSES_PER_TURN
    assert max(b - a for a, b in itertools.pairwise(ends)) <= most


def test_a_listener_that_floods_with_refused_messages_does_not_stop_the_loop(loop, drive, context):
    with context.socket(zmq.ROUTER) as listener:
        listener.setsockopt(zmq.LINGER, 0)
        listener.setsockopt(zmq.SNDHWM, 0)
        listener.bind("tcp://127.0.0.1:0")
        address = listener.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        peer = Peer(loop, context, address, options=ChannelOptions(max_frames=1))
        stats = peer.channel.stats
        ends = [0]
        loop.on_turn_end(lambda: ends.append(stats.malformed))
        drive.until(lambda: peer.channel.connected)
        peer.channel.send([b"hello"])
        who, _ = listener.recv_multipart()
        for _ in range(3000):
            listener.send_multipart([who, b"one", b"too many"])
        time.sleep(0.3)
        drive.until(lambda: stats.malformed == 3000)
    most = MESSAGES_PER_VISIT * PASSES_PER_TURN
    assert max(b - a for a, b in itertools.pairwise(ends)) <= most


def test_a_connection_that_is_far_ahead_is_closed(loop, drive, context):
    """Whether its messages wait, or are never read because another peer has its identity."""
    options = ChannelOptions(backlog_bytes=1 << 20)
    server = Server(loop, context, "tcp://127.0.0.1:0", options=options)
    honest = Peer(loop, context, server.channel.endpoint, b"honest")
    drive.until(lambda: honest.channel.connected)
    honest.channel.send([b"first"])
    drive.until(lambda: honest.heard)
    with contextlib.ExitStack() as opened:
        namesake = opened.enter_context(context.socket(zmq.DEALER))
        namesake.setsockopt(zmq.IDENTITY, b"honest")
        namesake.setsockopt(zmq.LINGER, 0)
        namesake.connect(server.channel.endpoint)
        for _ in range(500):
            namesake.send(bytes(10_000))
        drive.until(lambda: server.channel.stats.ahead)
        namesake.close()
    for number in range(300):  # as much, but it is read
        honest.channel.send([bytes(10_000)])
        drive.until(lambda number=number: len(server.heard) == number + 2)
    assert "down" not in honest.links


def test_heartbeats_of_a_silent_connection_do_not_put_it_ahead(loop, drive, context):
    quick = ChannelOptions(backlog_bytes=2000, heartbeat_s=0.02)
    server = Server(loop, context, "tcp://127.0.0.1:0", options=quick)
    peer = Peer(loop, context, server.channel.endpoint, options=quick)
    drive.until(lambda: peer.channel.connected)
    peer.channel.send([b"first"])
    drive.until(lambda: server.heard)
    drive.spin(4.0)  # 50 pings and pongs of 16 bytes per second, none of which is a message
    assert not server.channel.stats.ahead and not peer.channel.stats.ahead


def test_an_oversized_frame_costs_the_connection_only(loop, drive, context, tmp_path):
    options = ChannelOptions(max_frame_bytes=10_000)
    server = Server(loop, context, f"ipc://{tmp_path}/s", options=options)
    peer = Peer(loop, context, server.channel.endpoint)
    drive.until(lambda: peer.channel.connected)
    peer.channel.send([bytes(20_000)])
    drive.until(lambda: "down" in peer.links)
    drive.until(lambda: peer.channel.connected)
    peer.channel.send([b"fine"])
    drive.until(lambda: server.heard)
    assert server.heard[0][1] == [b"fine"]


def test_too_many_frames_are_dropped_and_counted(loop, drive, context, tmp_path):
    server = Server(loop, context, f"ipc://{tmp_path}/s", options=ChannelOptions(max_frames=3))
    peer = Peer(loop, context, server.channel.endpoint)
    drive.until(lambda: peer.channel.connected)
    peer.channel.send([b"x"] * 4)
    peer.channel.send([b"x"] * 3)
    drive.until(lambda: server.heard)
    assert len(server.heard) == 1 and server.channel.stats.malformed == 1


def test_a_connection_that_breaks_the_protocol_is_told_in_words(
    loop, drive, context, tmp_path, capsys
):
    server = Server(loop, context, f"ipc://{tmp_path}/s")
    with posix.socket(posix.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / "s"))
        stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47))
        drive.until(lambda: server.channel.stats.refused)
    said = capsys.readouterr().err
    assert "socket.handshake_failed" in said and "mechanism mismatch" in said


def test_a_connection_that_ends_in_the_handshake_is_a_warning_on_tcp_alone(
    loop, drive, context, tmp_path, capsys
):
    """On an ipc file it is a command of this user, for example a check for a listener."""
    local = Server(loop, context, f"ipc://{tmp_path}/s")
    with posix.socket(posix.AF_UNIX) as brief:
        brief.connect(str(tmp_path / "s"))
    drive.until(lambda: local.channel.stats.refused)
    assert capsys.readouterr().err == ""
    server = Server(loop, context, "tcp://127.0.0.1:0")
    port = int(server.channel.endpoint.rsplit(":", 1)[1])
    posix.create_connection(("127.0.0.1", port)).close()
    drive.until(lambda: server.channel.stats.refused)
    assert "closed during the handshake: " in capsys.readouterr().err


@pytest.mark.parametrize("tcp", [False, True])
def test_a_listener_that_ends_in_the_handshake_is_a_warning_on_tcp_alone(
    loop, drive, context, tmp_path, capsys, tcp
):
    """On an ipc file it is a process of this user that stopped before it served."""
    with contextlib.ExitStack() as opened:
        if tcp:
            listener = posix.create_server(("127.0.0.1", 0))
            endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        else:
            listener = posix.socket(posix.AF_UNIX)
            listener.bind(str(tmp_path / "s"))
            listener.listen()
            endpoint = f"ipc://{tmp_path}/s"
        opened.enter_context(listener)
        peer = Peer(loop, context, endpoint)
        connection = listener.accept()[0]
    connection.close()
    drive.until(lambda: peer.channel.stats.refused)
    assert ("socket.handshake_failed" in capsys.readouterr().err) is tcp


def test_handshakes_that_fail_without_end_are_one_line_with_the_likely_cause(
    loop, drive, context, capsys
):
    """A worker without keys logged 20 lines per second, none of which mentioned keys."""
    with posix.create_server(("127.0.0.1", 0)) as listener:
        peer = Peer(loop, context, f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        while peer.channel.stats.refused < 3:
            listener.accept()[0].close()
            seen = peer.channel.stats.refused
            drive.until(lambda seen=seen: peer.channel.stats.refused > seen)
    (line,) = capsys.readouterr().err.splitlines()
    assert "socket.handshake_failed" in line and "if it requires keys, give --keys FOLDER" in line


def test_noise_on_the_port_leaves_the_socket_working(loop, drive, context):
    server = Server(loop, context, "tcp://127.0.0.1:0")
    port = int(server.channel.endpoint.rsplit(":", 1)[1])
    with posix.create_connection(("127.0.0.1", port)) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        peer = Peer(loop, context, server.channel.endpoint)
        drive.until(lambda: peer.channel.connected)
        peer.channel.send([b"hi"])
        drive.until(lambda: peer.heard)


@pytest.mark.parametrize("count", [1, 3, 400])
def test_strangers_that_pass_for_old_zeromq_are_dropped(loop, drive, context, tmp_path, count):
    """Short frames parse as ZMTP 1, and such messages carry no descriptor of their connection."""
    server = Server(loop, context, f"ipc://{tmp_path}/s")
    peer = Peer(loop, context, server.channel.endpoint)
    with posix.socket(posix.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / "s"))
        stranger.sendall(b"\x01\x00" + b"\x03\x01ab\x03\x00cd" * count)
        drive.until(lambda: server.channel.stats.malformed == count)
    drive.until(lambda: peer.channel.connected)
    peer.channel.send([b"hi", b"there"])
    drive.until(lambda: peer.heard)
    assert server.heard == [(b"peer", [b"hi", b"there"])]
    assert loop.callback_errors == 0


def test_ipc_path_is_private_and_removed(context, tmp_path):
    path = tmp_path / "s"
    channel = RouterChannel(context, f"ipc://{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="address in use"):
        RouterChannel(context, f"ipc://{path}")
    channel.close()
    channel.close()
    assert not path.exists()


def test_an_ipc_path_left_by_a_dead_process_is_taken_over(context, tmp_path):
    path = tmp_path / "s"
    dead = posix.socket(posix.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    RouterChannel(context, f"ipc://{path}").close()


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("tcp://0.0.0.0:0", "without CURVE keys"),
        ("tcp://*:5555", "without CURVE keys"),
        ("tcp://10.1.2.3:5555", "without CURVE keys"),
        ("ipc:///no/such/folder/s", "no folder"),
        ("tcp://127.0.0.1:99999", "port must be"),
        ("udp://127.0.0.1:1", "must start with"),
        ("nonsense", "must start with"),
    ],
)
def test_addresses_that_are_refused(context, endpoint, message):
    with pytest.raises(ConfigError, match=message):
        RouterChannel(context, endpoint)


def test_a_file_of_another_kind_is_not_removed(context, tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="another kind"):
        RouterChannel(context, f"ipc://{path}")
    assert path.read_text() == "data"


def test_a_port_in_use(context):
    first = RouterChannel(context, "tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="address in use"):
        RouterChannel(context, first.endpoint)
    first.close()


def test_localhost_can_be_listened_on(context):
    channel = RouterChannel(context, "tcp://localhost:0")
    assert channel.endpoint.startswith("tcp://127.0.0.1:")
    channel.close()


def test_a_bad_address_to_connect_to(context):
    with pytest.raises(ConfigError, match="must start with"):
        DealerChannel(context, "nonsense", b"x")


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.3.2.1:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("ipc:///x", True),
        ("tcp://[::]:1", False),
        ("tcp://eth0:1", False),
        ("tcp://127.0.0.1.example.org:1", False),
        ("tcp://[bad", False),
        ("tcp://LOCALHOST:1", False),
        ("tcp://x@127.0.0.1:1", False),
        ("tcp://0.0.0.0;127.0.0.1:1", False),
    ],
)
def test_is_local(endpoint, local):
    assert is_local(endpoint) is local


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "*", "[::]", "0", "lo", "eth0", "127.1", "2130706433", "0177.0.0.1", "LOCALHOST",
     "[::ffff:0.0.0.0]", "[::ffff:10.0.0.1]", "[0:0:0:0:0:ffff:7f00:2]", posix.gethostname(),
     "example.org", "localhost.", "x@127.0.0.1", "127.0.0.1@0.0.0.0", "eth0;127.0.0.1",
     "127.0.0.1;0.0.0.0", "0.0.0.0#@127.0.0.1", "0.0.0.0\\@127.0.0.1"],
)  # fmt: skip
def test_without_keys_only_what_is_surely_this_machine_is_listened_on(context, host):
    if ipaddress.IPv6Address("::ffff:127.0.0.2").is_loopback and host.startswith("[0:"):
        pytest.skip("this Python knows mapped addresses, and this one is loopback")
    with pytest.raises(ConfigError, match=r"refusing to listen on .*baton keygen"):
        RouterChannel(context, f"tcp://{host}:0")


def test_a_name_that_turns_out_to_be_elsewhere_is_not_listened_on(context, monkeypatch):
    monkeypatch.setattr(sockets, "bind", lambda socket, _: bind(socket, "tcp://0.0.0.0:0"))
    with pytest.raises(ConfigError, match=r"refusing to listen on tcp://0\.0\.0\.0"):
        RouterChannel(context, "tcp://127.0.0.1:0")


def test_an_abstract_name_has_no_mode_and_is_refused(context):
    with pytest.raises(ConfigError, match="is not a file"):
        RouterChannel(context, f"ipc://@baton-{os.getpid()}")


def test_a_socket_refuses_a_second_thread(loop, context, tmp_path):
    server = Server(loop, context, f"ipc://{tmp_path}/s")
    server.channel.recv()
    raised = []

    def intrude():
        try:
            server.channel.send(b"x", [b"y"])
        except InternalError as error:
            raised.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert raised


def test_tracked_send_tells_when_the_buffer_is_free(loop, drive, context, tmp_path):
    server = Server(loop, context, f"ipc://{tmp_path}/s")
    peer = Peer(loop, context, server.channel.endpoint)
    drive.until(lambda: peer.channel.connected)
    tracker = peer.channel.send_tracked([b"head", np.zeros(1 << 20, np.uint8)])
    assert isinstance(tracker, zmq.MessageTracker)
    drive.until(lambda: server.heard and tracker.done)
