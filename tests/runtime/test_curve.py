"""CURVE and ZAP on real sockets: accepted keys, owners of identities, changes of the list."""

from __future__ import annotations

import shutil
import socket
import time

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils import z85

from baton.proto.errors import ConfigError
from baton.runtime.keys import keyring, zap
from baton.runtime.keys.allowed import AllowedKeys, KeyEntry
from baton.runtime.keys.curve import CurveKeys
from baton.runtime.keys.identity_owners import Callers
from baton.runtime.keys.keyring import KeyRing, add_key, make_folder, retire, revoke, rotate
from baton.runtime.keys.zap import Doorkeeper, answer
from baton.runtime.net import dealer
from baton.runtime.net.admissions import Admissions
from baton.runtime.net.channel import SendResult
from baton.runtime.net.descriptors import handshake_stage, raise_open_files
from baton.runtime.net.monitor import HANDSHAKE_FAILURES, MAX_WAITING
from baton.runtime.net.sockets import DealerChannel, RouterChannel

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Shorten the intervals of one second, so that the tests need not wait."""
    monkeypatch.setattr(keyring, "REREAD_S", 0.0)
    monkeypatch.setattr(zap, "REREAD_S", 0.02)
    monkeypatch.setattr(dealer, "REFUSED_PAUSE_S", 0.05)


class Server:
    """An echo server for clients and operators."""

    def __init__(self, loop, context, folder, endpoint="tcp://127.0.0.1:0", attach=True):
        self.ring = KeyRing(folder, "router")
        self.doors = Doorkeeper(context, self.ring)
        keys = self.doors.door("clients", "client", "operator")
        self.channel = RouterChannel(context, endpoint, keys=keys)
        self.heard: list[tuple[bytes, bytes]] = []
        self.gone: list[bytes] = []
        if attach:
            self.doors.attach(loop)
        self.channel.attach(loop, self.on_message, self.gone.append)

    def on_message(self, identity, frames):
        self.heard.append((identity, bytes(frames[0])))
        self.channel.send(identity, [b"echo " + frames[0]])


class Peer:
    def __init__(self, loop, context, endpoint, keys, identity=b"peer"):
        self.channel = DealerChannel(context, endpoint, identity, keys=keys)
        self.heard: list[bytes] = []
        self.refusals: list[tuple[str, bool]] = []
        self.ups = 0
        self.channel.attach(
            loop,
            lambda frames: self.heard.append(bytes(frames[0])),
            self._up,
            None,
            lambda error, final: self.refusals.append((str(error), final)),
        )

    def _up(self):
        self.ups += 1


@pytest.fixture
def other_context():
    """A second context, as in another process: ZAP handlers are per context."""
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def server(loop, context, folder):
    server = Server(loop, context, folder)
    yield server
    server.channel.close()
    server.doors.close()


def drawn() -> tuple[bytes, bytes]:
    return zmq.curve_keypair()


# ------------------------------------------------------------------------------ accepted keys


def test_strangers_that_say_nothing_do_not_keep_others_out(
    loop, drive, other_context, folder, server
):
    """Each connection uses a descriptor until ZeroMQ's handshake timeout."""
    raise_open_files()
    server.channel._admissions = Admissions(64, handshake_stage)
    port = int(server.channel.endpoint.rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    drive.until(lambda: server.channel.stats.crowded >= 136)
    keys = KeyRing(folder, "client").connecting("router")
    peer = Peer(loop, other_context, server.channel.endpoint, keys)
    drive.until(lambda: peer.channel.connected)
    peer.channel.send([b"hi"])
    drive.until(lambda: peer.heard)
    assert len(server.channel._admissions) <= 64
    for one in silent:
        one.close()
    peer.channel.close()


def test_a_send_ends_though_connections_come_as_fast_as_they_are_counted(
    loop, drive, other_context, folder, server, monkeypatch
):
    """A send first reads the reports of connections, and a flood adds reports all the time."""
    keys = KeyRing(folder, "client").connecting("router")
    peer = Peer(loop, other_context, server.channel.endpoint, keys)
    drive.until(lambda: peer.channel.connected)
    peer.channel.send([b"hi"])
    drive.until(lambda: peer.heard)
    monitor = server.channel._monitor
    address = ("127.0.0.1", int(server.channel.endpoint.rpartition(":")[2]))
    read, reports = monitor.read, 0

    def read_one_of_many():
        nonlocal reports
        reports += 1
        assert reports <= 2 * MAX_WAITING, "no end"
        report = read()
        while not monitor.pending:
            socket.create_connection(address).close()
            monitor.socket.poll(1000)
        return report

    socket.create_connection(address).close()
    assert monitor.socket.poll(30_000)
    monkeypatch.setattr(monitor, "read", read_one_of_many)
    assert server.channel.send(peer.channel.identity, [b"there"]) is SendResult.SENT
    assert reports
    monkeypatch.undo()
    peer.channel.close()


@pytest.mark.parametrize("role", ["client", "operator"])
def test_a_listed_key_of_the_right_role_gets_in(loop, drive, other_context, folder, server, role):
    keys = KeyRing(folder, role).connecting("router")
    peer = Peer(loop, other_context, server.channel.endpoint, keys)
    drive.until(lambda: peer.channel.connected)
    peer.channel.send([b"hi"])
    drive.until(lambda: peer.heard)
    assert peer.heard == [b"echo hi"]
    assert server.channel.callers.entry_of(peer.channel.identity).role == role


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_key_of_another_role_is_refused(loop, drive, other_context, folder, server, role):
    keys = KeyRing(folder, role).connecting("router")
    peer = Peer(loop, other_context, server.channel.endpoint, keys)
    drive.until(lambda: len(peer.refusals) > 2)  # it retries and is refused again
    message, final = peer.refusals[0]
    assert final
    assert "refused this key" in message
    assert not server.heard
    assert server.channel.stats.refused > 2


def test_an_unknown_key_is_refused(loop, drive, other_context, server):
    public, secret = drawn()
    keys = CurveKeys(public=public, secret=secret, server=server.ring.public)
    peer = Peer(loop, other_context, server.channel.endpoint, keys)
    drive.until(lambda: peer.refusals)
    assert peer.refusals[0][1]
    assert not peer.channel.connected
    assert not server.heard


def test_a_wrong_server_key_or_none_does_not_finish_the_handshake(
    loop, drive, other_context, folder, server
):
    ring = KeyRing(folder, "client")
    wrong = CurveKeys(public=ring.public, secret=ring.pair.secret, server=drawn()[0])
    peers = [
        Peer(loop, other_context, server.channel.endpoint, wrong, b"wrong"),
        Peer(loop, other_context, server.channel.endpoint, None, b"none"),
    ]
    drive.until(lambda: all(peer.refusals for peer in peers))
    assert not any(final for peer in peers for _, final in peer.refusals)
    assert "--keys FOLDER" in peers[1].refusals[0][0]
    assert not any(peer.ups for peer in peers)
    assert not server.heard


def test_while_nobody_answers_zap_nobody_gets_in(loop, drive, context, other_context, folder):
    server = Server(loop, context, folder, attach=False)
    peer = Peer(loop, other_context, server.channel.endpoint, None)
    peer.channel.close()
    keys = KeyRing(folder, "client").connecting("router")
    peer = Peer(loop, other_context, server.channel.endpoint, keys)
    drive.spin(0.3)
    assert not peer.ups
    server.doors.close()  # and without the handler's socket
    late = Peer(loop, other_context, server.channel.endpoint, keys, b"late")
    drive.spin(0.3)
    assert not late.ups
    assert not server.heard


def test_keys_are_for_tcp(loop, drive, context, other_context, folder, tmp_path):
    server = Server(loop, context, folder, f"ipc://{tmp_path}/s")
    assert server.channel.callers is None
    ring = KeyRing(folder, "client")
    peer = Peer(loop, other_context, f"ipc://{tmp_path}/s", ring.connecting("router"))
    drive.until(lambda: peer.channel.connected)
    server.doors.close()


def test_without_keys_a_socket_for_others_is_refused(context):
    with pytest.raises(ConfigError, match="baton keygen"):
        RouterChannel(context, "tcp://0.0.0.0:0")


def test_with_keys_it_may_listen_for_others(loop, drive, context, other_context, folder):
    server = Server(loop, context, folder, "tcp://0.0.0.0:0")
    keys = KeyRing(folder, "client").connecting("router")
    endpoint = server.channel.endpoint.replace("0.0.0.0", "127.0.0.1")
    peer = Peer(loop, other_context, endpoint, keys)
    drive.until(lambda: peer.channel.connected)
    server.doors.close()


# ------------------------------------------------------------------------------ names


def test_a_name_cannot_be_taken_over_by_another_key(loop, drive, other_context, folder, server):
    """The thief knows the victim's identity and requests it as soon as it is free."""
    add_key(folder, "client", ["thief"])
    server.ring.refresh()
    victim = Peer(
        loop, other_context, server.channel.endpoint, KeyRing(folder, "client").connecting("router")
    )
    drive.until(lambda: victim.channel.connected)
    victim.channel.send([b"mine"])
    drive.until(lambda: victim.heard)
    pair = keyring.read_pair(folder / "thief.key")
    keys = CurveKeys(
        public=pair.public.encode(), secret=pair.secret.encode(), server=server.ring.public
    )
    with zmq.Context() as theirs:
        # The loop does not run, as within a turn, so the victim's end is not reported yet.
        victim.channel.close()
        for _ in range(20):
            time.sleep(0.005)
            assert server.channel.recv() is None  # ends the victim's pipe and frees its identity
        thief = theirs.socket(zmq.DEALER)
        name = victim.channel.identity
        dealer_options(thief, keys, name)
        events = thief.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        thief.connect(server.channel.endpoint)
        until = time.monotonic() + 60
        while not events.poll(1):
            server.doors._pump()
            assert server.channel.recv() is None
            assert time.monotonic() < until
        assert server.channel.send(name, [b"secret"]) is SendResult.UNREACHABLE
        assert server.gone == []
        drive.until(lambda: server.gone == [name])
        assert server.channel.send(name, [b"secret"]) is SendResult.UNREACHABLE
        thief.send(b"give me")
        drive.until(lambda: server.channel.stats.intruders == 1)
        assert server.channel.send(name, [b"secret"]) is SendResult.UNREACHABLE
        assert not thief.poll(200)
        assert [text for _, text in server.heard] == [b"mine"]
        events.close(0)
        thief.close(0)


def dealer_options(socket, keys: CurveKeys, identity: bytes) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.servers[0])
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def test_the_same_key_may_come_back_under_its_name(loop, drive, other_context, folder, server):
    keys = KeyRing(folder, "client").connecting("router")
    for count in (1, 2):
        peer = Peer(loop, other_context, server.channel.endpoint, keys)
        drive.until(lambda peer=peer: peer.channel.connected)
        peer.channel.send([b"hi"])
        drive.until(lambda peer=peer: peer.heard)
        peer.channel.close()
        drive.until(lambda count=count: len(server.gone) == count)
    assert server.channel.stats.intruders == 0


# ------------------------------------------------------------------------------ changes


def test_a_key_added_later_gets_in_and_a_revoked_one_is_gone(
    loop, drive, other_context, folder, server
):
    ring = KeyRing(folder, "client")
    peer = Peer(loop, other_context, server.channel.endpoint, ring.connecting("router"))
    drive.until(lambda: peer.channel.connected)
    peer.channel.send([b"hi"])
    drive.until(lambda: peer.heard)
    revoke(folder, "client")
    drive.until(lambda: server.gone == [peer.channel.identity])
    peer.channel.send([b"still there"])
    drive.until(lambda: server.channel.stats.intruders)
    assert [text for _, text in server.heard] == [b"hi"]
    assert server.channel.send(peer.channel.identity, [b"x"]) is SendResult.UNREACHABLE
    late = add_key(folder, "client", ["alice"])
    pair = keyring.read_pair(folder / "alice.key")
    keys = CurveKeys(
        public=pair.public.encode(), secret=pair.secret.encode(), server=server.ring.public
    )
    alice = Peer(loop, other_context, server.channel.endpoint, keys, b"alice")
    drive.until(lambda: alice.channel.connected)
    assert late.public == pair.public


def test_a_peer_that_does_not_know_yet_finds_a_rotated_server(
    loop, drive, context, other_context, folder
):
    """First the server uses the old key while the list prefers the new key; then the reverse."""
    old = Server(loop, context, folder)
    rotate(folder, "router")
    keys = KeyRing(folder, "client").connecting("router")
    assert len(keys.servers) == 2
    peer = Peer(loop, other_context, old.channel.endpoint, keys)
    drive.until(lambda: peer.channel.connected)
    peer.channel.close()
    old.channel.close()
    old.doors.close()
    with zmq.Context() as restarted:
        new = Server(loop, restarted, folder)
        peer = Peer(loop, other_context, new.channel.endpoint, keys, b"again")
        drive.until(lambda: peer.channel.connected)
        assert not peer.refusals
        retire(folder, "router")
        assert len(KeyRing(folder, "client").connecting("router").servers) == 1
        new.channel.close()
        new.doors.close()


def test_a_late_word_of_a_failed_handshake_leaves_no_dead_connection_behind(
    loop, drive, context, other_context, folder, monkeypatch
):
    """libzmq tries the first key twice before its failure is read; then the second key works."""
    server = Server(loop, context, folder)
    rotate(folder, "router")
    keys = KeyRing(folder, "client").connecting("router")
    peer = Peer(loop, other_context, server.channel.endpoint, keys)
    monitor, held = peer.channel._monitor, []
    reading, succeeded = monitor.read, zmq.EVENT_HANDSHAKE_SUCCEEDED

    def read():
        while (report := reading()) is not None:
            if held or report[0] & HANDSHAKE_FAILURES:
                held.append(report)
            if len(held) < 2:
                return report
        if succeeded in [event for event, _ in held]:  # now repeat the report of the first failure
            monitor.read = lambda: held.pop(0) if held else reading()
            return monitor.read()
        return None

    monkeypatch.setattr(monitor, "read", read)
    drive.until(lambda: monitor.read is not read)
    drive.until(lambda: peer.channel.send([b"hi"]) and peer.heard)
    assert peer.channel.connected
    peer.channel.close()
    server.channel.close()
    server.doors.close()


def test_a_connection_that_stands_finds_a_server_that_came_back_with_another_key(
    loop, drive, context, other_context, folder
):
    """It also works if the list is copied only after the server's restart."""
    old = Server(loop, context, folder)
    mine = folder.parent / "mine"
    shutil.copytree(folder, mine)
    ring = KeyRing(mine, "client")
    endpoint = old.channel.endpoint
    peer = Peer(loop, other_context, endpoint, keyring.keys_for(ring, endpoint, "router"))
    drive.until(lambda: peer.ups == 1)
    rotate(folder, "router")
    old.channel.close()
    old.doors.close()
    drive.until(lambda: is_free(endpoint))  # libzmq closes sockets on its I/O thread
    with zmq.Context() as restarted:
        new = Server(loop, restarted, folder, endpoint)
        drive.until(lambda: peer.refusals)
        assert peer.ups == 1
        shutil.copy(folder / "allowed.toml", mine)
        drive.until(lambda: peer.ups == 2)
        new.channel.close()
        new.doors.close()


def is_free(endpoint: str) -> bool:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, int(port)))
        except OSError:
            return False
    return True


def test_keys_that_are_all_wrong_are_not_tried_without_a_rest(
    loop, drive, other_context, folder, server, monkeypatch
):
    monkeypatch.setattr(dealer, "REFUSED_PAUSE_S", 0.3)
    pair = KeyRing(folder, "client").pair
    wrong = CurveKeys(
        public=pair.public, secret=pair.secret,
        server=(zmq.curve_keypair()[0], zmq.curve_keypair()[0]),
    )  # fmt: skip
    peer = Peer(loop, other_context, server.channel.endpoint, wrong)
    drive.spin(0.75)
    assert 2 <= len(peer.refusals) <= 8  # two per round, with a pause of 0.3 s after each round


# ------------------------------------------------------------------------------ ZAP by itself

KEY, OTHER_KEY = bytes(range(1, 33)), bytes(range(2, 34))
ENTRY = KeyEntry(public=z85.encode(KEY).decode(), role="client")
DOMAINS = {b"clients": Callers(lambda: AllowedKeys([ENTRY]), frozenset({"client"})),
           b"workers": Callers(lambda: AllowedKeys([ENTRY]), frozenset({"decode"}))}  # fmt: skip
GOOD = [b"r", b"", b"1.0", b"7", b"clients", b"10.0.0.1", b"id", b"CURVE", KEY]


def test_zap_says_yes_to_one_request_only():
    assert answer(GOOD, DOMAINS) == [
        b"r", b"", b"1.0", b"7", b"200", b"OK", ENTRY.public.encode(), b"",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("at", "value"),
    [(4, b""), (4, b"*"), (4, b"workers"), (4, b"clients\0"), (7, b"NULL"), (7, b"PLAIN"),
     (7, b"curve"), (8, KEY[:-1]), (8, KEY + b"\0"), (8, b""), (8, OTHER_KEY),
     (8, ENTRY.public.encode())],
)  # fmt: skip
def test_zap_says_no_to_all_others(at, value):
    reply = answer([*GOOD[:at], value, *GOOD[at + 1 :]], DOMAINS)
    assert reply is not None
    assert reply[3:5] == [b"7", b"400"]
    assert reply[6] == b""


@pytest.mark.parametrize("frames", [[], [b"r"], GOOD[:3], [b"r", b"x", b"1.0", b"7"],
                                    [b"r", b"", b"2.0", b"7", *GOOD[4:]]])  # fmt: skip
def test_what_is_no_request_is_not_answered(frames):
    assert answer(frames, DOMAINS) is None


FRAMES = st.lists(
    st.binary(max_size=64) | st.sampled_from([*GOOD, b"workers", OTHER_KEY]), max_size=12
)


@settings(max_examples=2000)
@given(FRAMES)
def test_zap_admits_nothing_but_the_right_request(frames):
    reply = answer(frames, DOMAINS)
    admitted = reply is not None and reply[4] == b"200"
    assert admitted == (
        len(frames) == 9
        and [frames[i] for i in (1, 2, 4, 7, 8)] == [GOOD[i] for i in (1, 2, 4, 7, 8)]
    )


@settings(max_examples=200)
@given(st.lists(FRAMES, min_size=1, max_size=5))
def test_any_zap_message_leaves_the_doorkeeper_alive(messages):
    handler = Doorkeeper.__new__(Doorkeeper)
    with zmq.Context() as context:
        handler._domains = DOMAINS
        handler._socket = context.socket(zmq.ROUTER)
        handler._socket.bind("inproc://zap")
        asker = context.socket(zmq.DEALER)
        asker.connect("inproc://zap")
        for frames in messages:
            if frames:
                asker.send_multipart(frames)
        asker.send_multipart(GOOD[1:])
        while handler._pump():
            pass
        replies = []
        while asker.poll(0):
            replies.append(asker.recv_multipart())
        assert replies[-1][3] == b"200"
        asker.close(0)
        handler._socket.close(0)
