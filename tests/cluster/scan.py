"""What a stranger tries at a listening socket with keys; each check raises where he gets anywhere.

``test_scan.py`` shows that each check fails at a socket without the checked property.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Collection
from pathlib import Path

import msgspec
import zmq

from baton.runtime.keys.curve import CurveKeys
from baton.runtime.keys.keyring import read_pair

from ..processes import wait_until
from .listening import replies
from .raw import RawPeer, envelope, golden

GREETING_BYTES = 64
SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
DENIED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)


def keys_of(folder: Path, file: str, server: str) -> CurveKeys:
    """The pair of a file, and the newest key of the server's file."""
    pair = read_pair(folder / f"{file}.key")
    expected = read_pair(folder / f"{server}.key").public
    return CurveKeys(
        public=pair.public.encode(), secret=pair.secret.encode(), server=expected.encode()
    )


def unlisted(server: bytes) -> CurveKeys:
    """An unlisted pair, for a server whose key is known."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public=public, secret=secret, server=server)


def events_of(peer: RawPeer) -> set[int]:
    """Kinds of what happened to the peer's connections."""
    kinds = set()
    while peer.events.poll(0):
        head, _ = peer.events.recv_multipart()
        kinds.add(int.from_bytes(head[:2], "little"))
    return kinds


def check_garbage(port: int) -> None:
    """Whatever bytes come, nothing but the start of ZeroMQ's greeting goes back."""
    draw = random.Random(port)
    message = b"BT\x03" + msgspec.msgpack.encode([{"type": "Status"}])
    zmtp = b"\xff" + bytes(8) + b"\x7f"
    sent = [
        b"\0", b"GET / HTTP/1.1\r\n\r\n", message, draw.randbytes(64), draw.randbytes(100_000),
        bytes([len(message) + 1, 0]) + message,  # ZMTP 1, which has no mechanisms
        b"\x01\x00" + bytes([len(message) + 1, 0]) + message,
        zmtp + b"\x01\x05" + b"\0\0" + bytes([0, len(message)]) + message,  # ZMTP 2, neither
        zmtp + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32) + b"\0" + bytes([len(message)])
        + message,
        zmtp + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\0" + bytes([len(message)])
        + message,
        zmtp + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO\x01\0"
        + draw.randbytes(192),
    ]  # fmt: skip
    replies(port, sent, check_reply)


def check_reply(reply: bytes) -> None:
    """What came so far is a greeting that asks for CURVE, or the start of one."""
    assert len(reply) <= GREETING_BYTES
    wanted = b"CURVE".ljust(20, b"\0")
    assert wanted.startswith(reply[12:32]) or not reply[12:].strip(b"\0"), reply
    assert reply[11:12] <= b"\x01" or len(reply) == 12, reply  # with ZMTP 2 a message would follow


def check_strangers(port: int, server: bytes, listed: CurveKeys) -> None:
    """No mechanism, an unknown key, a wrong server key: no handshake ends, no message comes back.

    ``server``: the socket's public key; ``listed``: a pair that is let in.
    """
    address = f"tcp://127.0.0.1:{port}"
    wrong = CurveKeys(public=listed.public, secret=listed.secret, server=zmq.curve_keypair()[0])
    strangers = [
        RawPeer(address),
        RawPeer(address, keys=unlisted(server)),
        RawPeer(address, keys=wrong),
    ]
    said = [frames for forms in golden().values() for frames in forms]
    try:
        for stranger in strangers:
            for frames in said:
                with contextlib.suppress(zmq.Again):  # where ZeroMQ has given up
                    stranger._socket.send_multipart(frames, zmq.NOBLOCK)
        time.sleep(0.5)
        for stranger in strangers:
            assert SUCCEEDED not in events_of(stranger)
            assert not stranger._socket.poll(0)
    finally:
        for stranger in strangers:
            stranger.__exit__()


def check_roles(
    port: int, server: str, folder: Path, files: Collection[str], let_in: Collection[str]
) -> None:
    """Of the pairs of ``files`` those ``let_in`` end a handshake; the others are denied."""
    peers = {
        file: RawPeer(f"tcp://127.0.0.1:{port}", keys=keys_of(folder, file, server))
        for file in files
    }
    try:
        for file, peer in peers.items():
            seen: set[int] = set()
            wait_until(lambda: seen.update(events_of(peer)) or {SUCCEEDED, DENIED} & seen)  # noqa: B023
            expected = SUCCEEDED if file in let_in else DENIED
            assert {SUCCEEDED, DENIED} & seen == {expected}, (port, file)
    finally:
        for peer in peers.values():
            peer.__exit__()


def heard_kinds(peer: RawPeer) -> set[str]:
    """Kinds of all that still comes (or of enough); anybody may be asked whether it lives."""
    kinds = set()
    for _ in range(100):
        if not peer._socket.poll(100):
            break
        first = peer._socket.recv_multipart()[0]
        kinds |= {message["type"] for message in msgspec.msgpack.decode(first[3:])}
    return kinds


def check_stolen_identity(address: str, thief: CurveKeys, identity: bytes, tries: int = 40) -> None:
    """A client with a key asks for another's identity again and again, and receives nothing."""
    for _ in range(tries):
        with RawPeer(address, keys=thief, identity=identity) as peer:
            peer.send(envelope({"type": "Ping", "nonce": 1}))
            assert heard_kinds(peer) <= {"Pong", "Ping"}
