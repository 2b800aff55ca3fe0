"""A rogue with one valid key, as a process of its own: ``python -m tests.cluster.attacker JSON``.

It floods a socket with claims on the workers of other keys, over new connections again and again,
until its input ends. Then it prints how much it sent, and the kinds of the messages it received.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec.structs import replace

from baton.kv_transfer.checksums import envelope_digest
from baton.proto.layout import ModelCard
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.envelope import EnvelopeEncoder
from baton.proto.wire.messages import (
    ClientToRouter,
    Hello,
    Message,
    Open,
    PrefillToDecode,
    WorkerToRouter,
)
from baton.runtime.keys.curve import CurveKeys
from baton.runtime.keys.identity_owners import key_tag

from .raw import SEALED, RawPeer, life_of
from .rogues import grants, hostile, samples
from .scan import keys_of

BATCH = 50
"""Messages between two looks at the answers."""
CONNECTION = 2_000
"""Messages over one connection."""


class Attack(msgspec.Struct):
    """What one rogue does: with the key of ``file`` at the socket of ``server``."""

    folder: str
    file: str
    server: str
    address: str
    role: str  # what it floods with: worker, link or client
    victims: list[dict[str, Any]]  # as `baton status` lists the workers
    name: str  # the name that it may use
    rate: float = 1e9  # messages per second at most


def worker_claims(attack: Attack, keys: CurveKeys) -> Iterator[Message]:
    """Hellos of its own, then with names, endpoints and incarnations of others."""
    (sample,) = (one for one in samples(WorkerToRouter) if isinstance(one, Hello))
    role = attack.file.partition("@")[0]
    own = replace(
        sample, worker=attack.name, role=role, draining=True, requests=[], **life_of(keys),
        endpoint="tcp://127.0.0.1:9", model=the_card(attack), version=PROTOCOL_VERSION,
    )  # fmt: skip
    while True:
        victim = random.choice(attack.victims)
        yield replace(own, **life_of(keys))
        yield replace(own, **life_of(keys), worker=victim["id"], endpoint=victim["endpoint"])
        yield replace(own, incarnation=victim["incarnation"], worker=victim["id"])
        yield replace(own, incarnation=victim["incarnation"], nonce=os.urandom(16))
        yield replace(own, incarnation=random.getrandbits(63))


def link_claims(attack: Attack, keys: CurveKeys) -> Iterator[Message]:
    """Opens of its own and with incarnations of others; messages about others' handoffs."""
    (sample,) = (one for one in samples(PrefillToDecode) if isinstance(one, Open))
    own = replace(
        sample, worker=attack.name, model=the_card(attack), transports=["zmq"],
        version=PROTOCOL_VERSION, pool=None, device_pool=None, **life_of(keys),
    )  # fmt: skip
    others = [one["incarnation"] for one in attack.victims]
    guesses = list(itertools.chain.from_iterable(map(grants, others)))
    while True:
        for _ in range(50):
            yield replace(own, **life_of(keys))
            yield replace(own, incarnation=random.choice(others))
        about = {"grant": random.choice(guesses), "incarnation": random.choice(others),
                 "hashes": [], "num_tokens": 40, "growth": 40, "grammar": None}  # fmt: skip
        yield from (
            one
            for one in hostile(PrefillToDecode, (os.urandom(16), 10), 1, 10, about)
            if not isinstance(one, Open)
        )


def client_claims(attack: Attack, keys: CurveKeys) -> Iterator[Message]:
    """Every message of clients, about requests of others that it can only guess."""
    while True:
        for one in hostile(ClientToRouter, (os.urandom(16), 10), 1, 10, {}):
            if type(one).__name__ not in ("Submit", "Describe"):
                yield one


def the_card(attack: Attack) -> Any:
    """The card of the served model, which every worker of the cluster has."""
    return msgspec.convert(attack.victims[0]["card"], ModelCard)


SPEECH = {"worker": worker_claims, "link": link_claims, "client": client_claims}


class Flood:
    """The connection of an attack, made anew after :data:`CONNECTION` messages."""

    def __init__(self, attack: Attack) -> None:
        self.attack = attack
        self.keys = keys_of(Path(attack.folder), attack.file, attack.server)
        sealed = attack.role == "link"
        self.encoder = EnvelopeEncoder(digest=envelope_digest) if sealed else EnvelopeEncoder()
        self.sent = 0
        self.began = time.monotonic()
        self.heard: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()

    def run(self) -> None:
        """Send until the input ends."""
        speech = SPEECH[self.attack.role](self.attack, self.keys)
        while not self.over:
            with self.connection() as peer:
                for _ in range(CONNECTION // BATCH):
                    self.send(peer, itertools.islice(speech, BATCH))
                    self.listen(peer)
                    if self.over:
                        break
                    self.pace()

    @property
    def over(self) -> bool:
        return bool(select.select([sys.stdin], [], [], 0)[0])

    def pace(self) -> None:
        """Wait until the rate allows more, or the input ends."""
        early = self.began + self.sent / self.attack.rate - time.monotonic()
        if early > 0:
            select.select([sys.stdin], [], [], early)

    def connection(self) -> RawPeer:
        """Now and then under an identity of another key, which no socket accepts."""
        identity = None
        if random.random() < 0.1:
            identity = key_tag(self.keys.servers[0]) + os.urandom(8)
        return RawPeer(self.attack.address, keys=self.keys, identity=identity)

    def send(self, peer: RawPeer, messages: Iterator[Message]) -> None:
        for message in messages:
            try:
                peer._socket.send_multipart(self.encoder.encode([message]), zmq.NOBLOCK)
                self.sent += 1
            except zmq.Again:  # the other end reads as fast as it can
                time.sleep(0.01)

    def listen(self, peer: RawPeer) -> None:
        while peer._socket.poll(1):
            with contextlib.suppress(msgspec.DecodeError):
                first = peer._socket.recv_multipart()[0]
                body = first[11 if first.startswith(SEALED) else 3 :]
                for message in msgspec.msgpack.decode(body):
                    code = message.get("code") or ""
                    # A Cancel of any request is answered with this status, known or not.
                    refused = code or message.get("status") == "cancelled"
                    self.heard[message["type"] + " refused" * bool(refused)] += 1
                    self.codes[code] += 1


def main() -> None:
    os.nice(19)  # a rogue has processors of its own: here it gets what the cluster leaves
    flood = Flood(msgspec.json.decode(sys.argv[1], type=Attack))
    print("begun", flush=True)
    flood.run()
    print(json.dumps({"sent": flood.sent, "heard": flood.heard, "codes": flood.codes}), flush=True)


if __name__ == "__main__":
    main()
