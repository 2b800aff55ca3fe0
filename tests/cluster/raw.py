"""Peers that speak to a process's sockets by hand, well or badly."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

from baton.proto.ids import new_nonce, worker_incarnation
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.envelope import EnvelopeEncoder
from baton.runtime.keys.curve import CurveKeys, apply_client_keys
from baton.runtime.keys.identity_owners import key_tag

PREFIX, SEALED = b"BT\x03", b"BS\x03"
GOLDEN = Path(__file__).resolve().parents[1] / "proto" / "golden" / "envelopes.json"


def envelope(*messages: Any) -> bytes:
    """First frame of an envelope, also of messages that no struct would allow."""
    return PREFIX + msgspec.msgpack.encode(messages)


def identity_of(keys: CurveKeys) -> bytes:
    """A new routing identity, as a socket with keys demands it of this pair."""
    return key_tag(keys.public) + os.urandom(8)


def life_of(keys: CurveKeys) -> dict[str, Any]:
    """A new incarnation of a worker with this pair, and the nonce it is made of."""
    nonce = new_nonce()
    return {"incarnation": worker_incarnation(keys.public, nonce), "nonce": nonce}


class RawPeer:
    """A DEALER; answers come back as plain maps."""

    def __init__(
        self,
        address: str,
        timeout: float = 10.0,
        keys: CurveKeys | None = None,
        identity: bytes | None = None,
    ) -> None:
        self._context: zmq.Context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))
        apply_client_keys(self._socket, keys)
        if identity is None and keys is not None:
            identity = identity_of(keys)
        if identity is not None:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self.events = self._socket.get_monitor_socket()
        self._socket.connect(address)
        self._pending: list[dict] = []
        self._asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def send(self, *frames: Any) -> None:
        self._socket.send_multipart(frames)

    def say(self, *messages: Any) -> None:
        """Send structs as a well-behaved peer does."""
        self.send(*EnvelopeEncoder().encode(messages))

    def hear(self) -> dict:
        """The next message; zmq.Again when none comes. Any peer may be asked whether it lives."""
        while not self._pending:
            first = self._socket.recv_multipart()[0]
            messages = msgspec.msgpack.decode(first[11 if first.startswith(SEALED) else 3 :])
            self._pending += [m for m in messages if m["type"] != "Ping"]
        return self._pending.pop(0)

    def hear_until(self, wanted: Callable[[dict], bool]) -> list[dict]:
        """Messages up to the first that is ``wanted``, which is the last."""
        heard = [self.hear()]
        while not wanted(heard[-1]):
            heard.append(self.hear())
        return heard

    def answers(self) -> list[dict]:
        """The answers to all messages sent before."""
        self._asked += 1
        pong = {"type": "Pong", "nonce": self._asked}
        self.send(envelope({"type": "Ping", "nonce": self._asked}))
        return self.hear_until(lambda message: message == pong)[:-1]


class RawWorker(RawPeer):
    """A peer of a router's worker socket, which accepts messages only after a Hello."""

    def __init__(self, address: str, hello: dict) -> None:
        super().__init__(address)
        self._hello = hello

    def answers(self) -> list[dict]:
        self._asked += 1
        name = f"asked-{self._asked}-"
        self.send(envelope({**self._hello, "version": 99, "worker": name}))
        return self.hear_until(lambda message: name in message.get("message", ""))[:-1]


def send_bytes(address: str, chunks: Sequence[bytes]) -> None:
    """Connect without ZeroMQ, write, and hang up."""
    if address.startswith("ipc://"):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(address.removeprefix("ipc://"))
    else:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        raw = socket.create_connection((host, int(port)))
    with raw:
        for chunk in chunks:
            try:
                raw.sendall(chunk)
            except OSError:  # refused half-way: also well
                return


def golden(*without: str) -> dict[str, list[list[bytes]]]:
    """Envelopes of every kind of message by its name."""
    samples = json.loads(GOLDEN.read_text())
    return {
        kind: [[bytes.fromhex(frame) for frame in entry[form]] for form in ("full", "least")]
        for kind, entry in samples.items()
        if kind not in ("KVFrame", *without)
    }


def hello_map() -> dict:
    """A worker's first message, as a map."""
    frame = golden()["Hello"][0][0]
    right = {"version": PROTOCOL_VERSION, "endpoint": "ipc:///nowhere/worker"}
    return msgspec.msgpack.decode(frame[3:])[0] | right
