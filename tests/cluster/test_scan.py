"""The scan's checks can fail: each catches the fault it looks for, planted in a real socket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from baton.runtime.keys import identity_owners, zap
from baton.runtime.keys.allowed import CLIENT, OPERATOR, ROLES
from baton.runtime.keys.keyring import KeyRing, add_key, make_folder, read_pair
from baton.runtime.keys.zap import Doorkeeper
from baton.runtime.net import sockets
from baton.runtime.net.loop import Loop
from baton.runtime.net.sockets import RouterChannel

from .raw import RawPeer, envelope, identity_of
from .scan import (
    check_garbage,
    check_roles,
    check_stolen_identity,
    check_strangers,
    keys_of,
)

pytestmark = pytest.mark.cluster

SECRET = envelope({"type": "Tokens"})


@contextmanager
def listening(folder) -> Iterator[int]:
    """Port of a socket of clients and operators, which sends secrets to a victim all the time."""
    ports: list[int] = []
    ready, loops = threading.Event(), []

    def serve() -> None:
        with zmq.Context() as context:
            loop = Loop()
            loops.append(loop)
            doors = Doorkeeper(context, KeyRing(folder, "router"))
            keys = doors.door("clients", CLIENT, OPERATOR)
            channel = RouterChannel(context, "tcp://127.0.0.1:0", keys=keys)
            heard: list[bytes] = []

            def tell() -> None:
                if heard:
                    channel.send(heard[0], [SECRET])  # the first peer is the victim
                loop.call_later(0.005, tell)

            doors.attach(loop)
            channel.attach(loop, lambda identity, _frames: heard.append(identity))
            loop.call_later(0.0, tell)
            ports.append(int(channel.endpoint.rpartition(":")[2]))
            ready.set()
            loop.run()
            channel.close()
            doors.close()
            loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(10)
    try:
        yield ports[0]
    finally:
        loops[0].post(loops[0].stop)
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k") / "keys"
    make_folder(folder)
    add_key(folder, CLIENT, ["thief"])
    return folder


def garbage(port: int, folder) -> None:
    check_garbage(port)


def strangers(port: int, folder) -> None:
    server = read_pair(folder / "router.key").public.encode()
    check_strangers(port, server, KeyRing(folder, OPERATOR).pair)


def roles(port: int, folder) -> None:
    check_roles(port, "router", folder, ROLES, {CLIENT, OPERATOR})


def identity(port: int, folder) -> None:
    address = f"tcp://127.0.0.1:{port}"
    keys = keys_of(folder, CLIENT, "router")
    name = identity_of(keys)
    with RawPeer(address, keys=keys, identity=name) as victim:
        victim.send(envelope({"type": "Ping", "nonce": 1}))
        assert msgspec.msgpack.decode(victim._socket.recv()[3:])[0]["type"] == "Tokens"
    check_stolen_identity(address, keys_of(folder, "thief", "router"), name, tries=10)


def without_curve(patch) -> None:
    patch.setattr(sockets, "apply_server_keys", lambda *_: None)


def without_zap(patch) -> None:
    def apply(socket, keys, _domain) -> None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)

    patch.setattr(sockets, "apply_server_keys", apply)
    patch.setattr(zap, "ADDRESS", "inproc://nobody-asks-here")


def with_any_key(patch) -> None:
    patch.setattr(zap, "_user", lambda frames, _domains: zap.z85.encode(frames[8]))


def with_any_role(patch) -> None:
    right = Doorkeeper.door
    patch.setattr(Doorkeeper, "door", lambda self, name, *_: right(self, name, *ROLES))


def with_free_names(patch) -> None:
    def heard(self, peer: bytes, key: bytes) -> str:
        self._key_of[peer] = key
        return ""

    patch.setattr(identity_owners.Callers, "heard", heard)


CHECKS: dict[str, Callable] = {c.__name__: c for c in (garbage, strangers, roles, identity)}
PLANTED = [
    (without_curve, "garbage"), (without_curve, "strangers"),
    (without_zap, "strangers"), (without_zap, "roles"),
    (with_any_key, "strangers"), (with_any_key, "roles"),
    (with_any_role, "roles"), (with_free_names, "identity"),
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_sound_socket_passes(folder, check):
    with listening(folder) as port:
        check(port, folder)


@pytest.mark.long
@pytest.mark.parametrize(("plant", "check"), PLANTED, ids=[f"{p.__name__}-{c}" for p, c in PLANTED])
def test_a_planted_fault_is_caught(folder, monkeypatch, plant, check):
    plant(monkeypatch)
    with listening(folder) as port, pytest.raises(AssertionError):
        CHECKS[check](port, folder)
