"""Rogues: peers with valid keys that send messages about requests of others.

A rogue's messages are made from the message unions, so a new kind of message is sent as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import zmq
from msgspec.structs import replace

from baton.kv_transfer.checksums import envelope_digest
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import GrantRef, Message, RequestState, TokenRun

from .raw import SEALED, RawPeer, golden

FORGED = 7
ATTEMPTS = (1, 2, 1 << 20)
"""The attempt that runs, the next one, and one above whatever a router counts."""
Request = tuple[bytes, int]
"""A request's key and where its tokens begin."""


def samples(union: object) -> Iterator[Message]:
    """A message of every kind of a union, with all fields."""
    recorded = golden()
    decoder: EnvelopeDecoder[Message] = EnvelopeDecoder(union)
    for kind in get_args(union):
        yield decoder.decode(recorded[kind.__name__][0])[0]


def hostile(
    union: object, request: Request, attempt: int, position: int, own: dict[str, Any]
) -> Iterator[Message]:
    """Every message of a union about another client's ``request``; ``own``: the rogue's fields."""
    key, _ = request
    about: dict[str, Any] = {
        "request": key, "attempt": attempt, "position": position, "decode_full": True,
        "runs": [TokenRun(key, attempt, position, [FORGED] * 3)], "deadline": 60.0,
        "secret": b"?" * 16, "proof": b"?" * 16, "ticket": b"?" * 16, **own,
    }  # fmt: skip
    held = RequestState(key, attempt, position, 1, router="router", proof=b"?" * 16)
    special: dict[str, dict[str, Any]] = {
        "Terminal": {"code": None, "status": "end_of_sequence"},
        "FinalAck": {"requests": [key]},
        "TerminalAck": {"requests": [(key, attempt)]},
        "Hello": {"requests": [held]},
    }
    for message in samples(union):
        fields = about | special.get(type(message).__name__, {})
        yield replace(
            message, **{n: v for n, v in fields.items() if n in message.__struct_fields__}
        )


class Rogue:
    """Sends all messages again and again on a separate thread, and gives false answers.

    ``speech(key)``: messages about a request; ``first``: messages of every round.
    """

    def __init__(
        self,
        peer: RawPeer,
        victims: dict[bytes, int],
        speech: Callable[[Request], Iterator[Message]],
        first: Callable[[], list[Message]] = list,
        *,
        sealed: bool = False,
        answer: Callable[[dict], list[Message]] | None = None,
    ) -> None:
        self._peer, self._victims, self._sealed = peer, victims, sealed
        self._speech, self._first, self._answer = speech, first, answer
        self._encoder = EnvelopeEncoder(digest=envelope_digest) if sealed else EnvelopeEncoder()
        self._end = threading.Event()
        self.said = 0
        self.heard: set[str] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.2):
            self._say(*self._first())
            for request in list(self._victims.items())[-8:]:
                for message in self._speech(request):
                    self._say(message)
            self._listen()

    def _listen(self) -> None:
        while self._peer._socket.poll(5):
            first = self._peer._socket.recv_multipart()[0]
            body = first[11 if first.startswith(SEALED) else 3 :]
            for message in msgspec.msgpack.decode(body):
                self.heard.add(message["type"])
                if self._answer is not None:
                    self._say(*self._answer(message))

    def _say(self, *messages: Message) -> None:
        for message in messages:
            try:
                self._peer._socket.send_multipart(self._encoder.encode([message]), zmq.NOBLOCK)
                self.said += 1
            except zmq.Again:
                return

    def end(self) -> None:
        self._end.set()
        self._thread.join(10)
        self._peer.__exit__()


def grants(incarnation: int) -> list[GrantRef]:
    """The first grants of a decode worker's life, as an attacker may guess them."""
    return [GrantRef(incarnation, slot, generation) for slot in range(8) for generation in range(3)]
