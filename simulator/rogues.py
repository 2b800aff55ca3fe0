"""Rogues of a simulated cluster: processes with a valid key that send every message of its role.

A rogue has captured every message of the cluster except secrets. It replays them over its own
connections, unchanged or with other requests, attempts, incarnations, grants, proofs and tickets,
makes messages of every kind of its union, and sends damaged envelopes and KV frames.
It must receive nothing that belongs to others (:meth:`Rogue.received`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, get_args

import msgspec
import numpy as np

from baton.decode_worker.prefill_sockets import refusal as peer_refusal
from baton.proto.errors import ProtocolError
from baton.proto.ids import request_key, worker_incarnation
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import (
    Assign,
    ClientToRouter,
    Committed,
    Credit,
    DecodeToPrefill,
    Grant,
    GrantRef,
    Heartbeat,
    Hello,
    KVFrame,
    Message,
    Open,
    PrefillToDecode,
    Refused,
    RequestState,
    Reserve,
    Resume,
    Revoke,
    StatusReport,
    Submit,
    Submitted,
    Terminal,
    TokenRun,
    Tokens,
    Welcome,
    WorkerLoad,
    WorkerToRouter,
)
from baton.router.authorization import client_refusals
from baton.router.events import ClientInputRejected, FromClient, FromWorker, WorkerInputRejected
from baton.runtime.keys.allowed import CLIENT, PREFILL

from .envelopes import Envelope
from .keys import ALLOWED, key_behind, key_of, refusal
from .nodes import DecodePeer, Node, RouterNode, World
from .records import FINISHED
from .violation import Violation

KEPT = 48
"""Maximum number of captured values of a field, and of captured messages of a kind."""
BURST = 12
"""Most messages of a rogue in a tick of 0.05 s; each is sent up to :data:`REPEATED` times."""
REPEATED = 3
UNIONS: dict[str, Any] = {
    CLIENT: ClientToRouter, "worker": WorkerToRouter, PREFILL: PrefillToDecode,
}  # fmt: skip
KINDS: dict[str, tuple[type[Message], ...]] = {
    name: get_args(union) for name, union in UNIONS.items()
}
SECRETS = frozenset({"secret", "key", "decode_key"})
"""Fields that a rogue cannot capture: connections are encrypted, and these are not shown to
processes with its key."""
SHARED = frozenset({
    "request", "attempt", "position", "incarnation", "nonce", "grant", "ticket", "proof",
    "endpoint", "worker", "router", "context", "requests", "runs", "deadline", "num_tokens",
    "hashes", "serial", "seal", "growth",
})  # fmt: skip
"""Fields whose values are taken from messages of any kind."""


class Captured:
    """The messages that the rogues of a cluster have captured."""

    def __init__(self) -> None:
        self.messages: defaultdict[type, deque[Any]] = defaultdict(lambda: deque(maxlen=KEPT))
        self.values: defaultdict[str, deque[Any]] = defaultdict(lambda: deque(maxlen=KEPT))
        self.recent: deque[Any] = deque(maxlen=KEPT // 2)

    def add(self, message: Any) -> None:
        """Keep a message, and the values of its fields."""
        hidden = dict.fromkeys(SECRETS.intersection(message.__struct_fields__), b"?" * 16)
        message = msgspec.structs.replace(message, **hidden)
        self.messages[type(message)].append(message)
        self.recent.append(message)
        self._take(message)

    def _take(self, part: Any) -> None:
        for name in part.__struct_fields__:
            value = getattr(part, name)
            if name in SECRETS or value is None:
                continue
            if isinstance(value, GrantRef):
                self.values["grant"].append(value)
            if name in SHARED:
                self.values[f"{name}:{type(value).__name__}"].append(value)
            if name in ("runs", "requests") and value and isinstance(value, list):
                for one in value[:4]:
                    if isinstance(one, TokenRun | RequestState):
                        self._take(one)


class Forger:
    """Draws messages of a role, with its own, captured and guessed ids."""

    def __init__(self, random: Random, captured: Captured, key: bytes, card: Any) -> None:
        self._random = random
        self._captured = captured
        self._key = key
        self._card = card
        self.nonce, self.incarnation = b"", 0
        self.new_life()

    def new_life(self) -> None:
        """Take a new incarnation."""
        self.nonce = self._random.randbytes(16)
        self.incarnation = worker_incarnation(self._key, self.nonce)

    def message(self, union: str) -> Any:
        """Return a message of a union: a captured message, unchanged or with other fields."""
        random = self._random
        kind = random.choice(KINDS[union])
        seen = self._captured.messages[kind]
        base = random.choice(seen) if seen else self._blank(kind)
        if random.random() < 0.3:
            return self._mine(base)
        if self._captured.recent and random.random() < 0.4:
            return self._mine(self._about(base, random.choice(self._captured.recent)))
        changes = {
            field: self._value(field, getattr(base, field))
            for field in base.__struct_fields__
            if random.random() < 0.4
        }
        return self._mine(msgspec.structs.replace(base, **changes))

    @staticmethod
    def _about(message: Any, seen: Any) -> Any:
        """Return the message with the request, attempt, grant and so on of another message."""
        common = SHARED.intersection(message.__struct_fields__, seen.__struct_fields__)
        taken = {name: getattr(seen, name) for name in sorted(common)}
        fits = {n: v for n, v in taken.items() if isinstance(v, type(getattr(message, n)))}
        return msgspec.structs.replace(message, **fits)

    def _mine(self, message: Any) -> Any:
        """Return the message, often with its own incarnation, so that it passes the first check."""
        if isinstance(message, Submit | Resume):
            return message
        own = {"incarnation": self.incarnation, "nonce": self.nonce}
        if self._random.random() < 0.6 and isinstance(message, Hello | Open | Heartbeat):
            fields = message.__struct_fields__
            return msgspec.structs.replace(message, **{n: v for n, v in own.items() if n in fields})
        return message

    def _value(self, name: str, old: Any) -> Any:
        """Return another value of a field: captured, guessed or its own."""
        random, values = self._random, self._captured.values
        if name == "grant" and random.random() < 0.3:
            known = [ref.incarnation for ref in values["grant"]] or [1]
            return GrantRef(random.choice(known), random.randrange(6), random.randrange(4))
        if name == "attempt":
            return random.choice((0, 1, 2, 3, old + 1 if isinstance(old, int) else 1, 1 << 20))
        if name in ("proof", "ticket", "seal", "secret") and random.random() < 0.3:
            return random.choice((b"", random.randbytes(16)))
        pool = values["grant" if name == "grant" else f"{name}:{type(old).__name__}"]
        if pool and random.random() < 0.8:
            return random.choice(pool)
        if name == "incarnation":
            return random.choice((self.incarnation, random.getrandbits(63)))
        if isinstance(old, bool):
            return random.random() < 0.5
        if isinstance(old, int) and name not in ("arrays", "version"):
            return random.choice((0, 1, old, old + 1, random.randrange(5000)))
        return old

    def _blank(self, kind: type[Message]) -> Any:
        """Return a message of a kind of which none was captured yet."""
        fields = msgspec.structs.fields(kind)
        return kind(**{field.name: self._plain(field.name) for field in fields if field.required})

    def _plain(self, name: str) -> Any:
        random, values = self._random, self._captured.values
        plain: dict[str, Any] = {
            "grant": GrantRef(1, 0, 0), "model": self._card, "transports": ["zmq"], "runs": [],
            "requests": [], "hashes": [], "incarnation": self.incarnation, "context": None,
            "request": random.randbytes(16), "secret": random.randbytes(16), "load": WorkerLoad(),
            "version": PROTOCOL_VERSION, "deadline": 30.0, "role": "decode",
            "endpoint": "ipc:///simulated/rogue", "decode": "decode-0",
        }  # fmt: skip
        if name in plain:
            pool = values["grant" if name == "grant" else f"{name}:{type(plain[name]).__name__}"]
            return random.choice(pool) if pool else plain[name]
        if name in _TEXTS:
            return _TEXTS[name]
        return 1

    def frame(self) -> tuple[KVFrame, bytes]:
        """Return a KV frame for a grant, captured or changed, with any payload."""
        random, frames = self._random, self._captured.messages[KVFrame]
        base = random.choice(frames) if frames else KVFrame(GrantRef(1, 0, 0), 0, 0, 1, 0, 1, 8, 0)
        changes: dict[str, Any] = {}
        if self._captured.values["grant"] and random.random() < 0.6:
            changes["grant"] = self._value("grant", base.grant)
        for name in ("index", "layer_start", "layer_count", "block_start", "block_count"):
            if random.random() < 0.1:
                changes[name] = random.randrange(4)
        if random.random() < 0.1:
            changes["shared"] = not base.shared
        frame = msgspec.structs.replace(base, **changes)
        return frame, random.randbytes(frame.nbytes)


_TEXTS = {
    "worker": "decode-0", "router": "router-0", "prefill": "prefill-0", "transport": "zmq",
    "code": "internal", "message": "", "field": "", "ours": "", "theirs": "", "request_id": "0",
    "data_endpoint": "",
}  # fmt: skip


LATEST = 4
"""Number of the last captured Reserves, whose attempts have probably not ended yet."""


class Rogue(Node):
    """A process with the rogue key of its role: ``rogue-client``, ``rogue-prefill``, ...

    ``greedy``: it also registers as a worker that takes requests.
    """

    def __init__(
        self, cluster: World, captured: Captured, role: str, card: Any, *, greedy: bool
    ) -> None:
        super().__init__(cluster, f"rogue-{role}")
        self._captured = captured
        self.role = role
        self.greedy = greedy
        self._card = card
        self._connection = 0
        self._encoder = EnvelopeEncoder()
        self._decoders = {name: EnvelopeDecoder[Any](union) for name, union in UNIONS.items()}
        self._answers = EnvelopeDecoder[Any](DecodeToPrefill, digest=Envelope.digest)
        self.forger: Forger

    def _name_connection(self) -> None:
        self.identity = f"{self.name}:{self.incarnation:x}:{self._connection}".encode()

    def boot(self) -> None:
        """Seed its generator with its incarnation, so that equal seeds give equal messages."""
        self._name_connection()
        self._random = Random(self.incarnation)  # noqa: S311
        self.forger = Forger(self._random, self._captured, key_of(self.name), self._card)

    def leave(self) -> None:
        """Close all connections and stop sending."""
        self._reconnect()
        self.alive = False

    # ------------------------------------------------------------------ messages sent

    def tick(self) -> None:
        """Send a burst."""
        random = self._random
        if random.random() < 0.05:
            self._reconnect()
        if random.random() < 0.1:
            self.forger.new_life()
        for _ in range(random.randrange(BURST)):
            for _ in range(random.choice((1, 1, 1, REPEATED))):
                random.choice(self._targets())()

    def _targets(self) -> list[Callable[[], None]]:
        cluster = self.cluster
        union = CLIENT if self.role == CLIENT else "worker"
        router = self._random.choice(cluster.routers)
        targets: list[Callable[[], None]] = [partial(self._to_router, router, union)]
        if self.role == PREFILL:
            decode = self._random.choice(cluster.decodes)
            targets += [partial(self._to_decode, decode), partial(self._frame_to, decode)]
            if self.greedy:
                targets.append(partial(self._ask_more, decode))
        return targets

    def _to_router(self, router: RouterNode, union: str) -> None:
        message = self._tame(self.forger.message(union))
        if message is None:
            return
        identity, decoder = self.identity, self._decoders[union]
        frames = self._encoded(message)
        arrive = at_clients if self.role == CLIENT else at_workers
        self.transmit(router, lambda: arrive(router, identity, decoder, frames))

    def _tame(self, message: Message) -> Message | None:
        """Return None for a message without a context; drain unless the rogue is greedy."""
        if isinstance(message, Hello) and not self.greedy:
            return msgspec.structs.replace(message, draining=True)
        if getattr(message, "context", True) is None:
            return None  # nothing was captured yet
        return message

    def _to_decode(self, decode: DecodePeer) -> None:
        message, identity = self._tame(self.forger.message(PREFILL)), self.identity
        if message is None:
            return
        frames = self._encoded(message, EnvelopeEncoder(digest=Envelope.digest))
        self.transmit(decode, lambda: at_peers(self, decode, identity, frames))

    def _ask_more(self, decode: DecodePeer) -> None:
        """Repeat a Reserve with more growth, perhaps the Reserve of a worker with the same key."""
        seen = self._captured.messages[Reserve]
        if seen:
            base, more = self._random.choice([*seen][-LATEST:]), self._random.choice((1, 16, 64))
            message = msgspec.structs.replace(
                base, growth=base.growth + more, serial=base.serial + 1000, deadline=1e6
            )
            frames = self._encoded(message, EnvelopeEncoder(digest=Envelope.digest))
            identity = self.identity
            self.transmit(decode, lambda: at_peers(self, decode, identity, frames))

    def _frame_to(self, decode: DecodePeer) -> None:
        frame, content = self.forger.frame()
        payload, key = np.frombuffer(content, np.uint8), key_of(self.name)
        self.transmit(decode, lambda: decode.data(frame, payload.copy(), key))

    def _encoded(self, message: Message, encoder: EnvelopeEncoder | None = None) -> list[Any]:
        """Return the envelope, sometimes with a changed byte."""
        frames = (encoder or self._encoder).encode([message])
        if self._random.random() < 0.03:
            body = bytearray(frames[0])
            body[self._random.randrange(len(body))] ^= 1 << self._random.randrange(8)
            return [bytes(body), *frames[1:]]
        return frames

    def _reconnect(self) -> None:
        old, self._connection = self.identity, self._connection + 1
        self._name_connection()
        for router in self.cluster.routers:
            gone = router.client_gone if self.role == CLIENT else router.worker_gone
            self.cluster.network.after(0.002, router.when_up(partial(gone, old)))
        for decode in self.cluster.decodes:
            self.cluster.network.after(0.002, decode.when_up(partial(decode.peer_gone, old)))

    # ------------------------------------------------------------------ messages received

    def has_connection(self, identity: bytes) -> bool:
        """True if its present connection has the routing identity."""
        return identity == self.identity

    def from_peer(self, endpoint: str, envelope: Envelope) -> None:
        """Receive a control message from a decode worker."""
        for message in envelope.read(self._answers, self.cluster.stats):
            self.received(message)

    def received(self, message: Message) -> None:
        """Check that a message reveals nothing that belongs to others."""
        self.cluster.stats[f"rogue_received {type(message).__name__}"] += 1
        if isinstance(message, Assign):
            self.cluster.watcher.surrender(message.request)
        private = self._private_requests(message)
        for request in private:
            if not self.cluster.watcher.is_surrendered(request):
                raise Violation(f"{self.name} receives {message}")

    def _private_requests(self, message: Message) -> list[bytes]:
        """Return the requests whose grants, tokens or secrets a message reveals."""
        match message:
            case Tokens(runs=runs):
                return [run.request for run in runs]
            case Submitted() | Grant() | Committed() | Refused():
                return [message.request]
            case Terminal() if message.status in FINISHED:
                return [message.request]
            case Credit(grant=grant) | Revoke(grant=grant):
                held = [d.receiver.attempt_of(grant) for d in self.cluster.decodes if d.alive]
                return [attempt[0] for attempt in held if attempt is not None]
            case Welcome(key=key):
                if key in self.cluster.watcher.ticket_keys():
                    raise Violation(f"{self.name} receives another worker's key for tickets")
            case StatusReport(report=report):
                return [key for key in self.cluster.watcher.names if key.hex().encode() in report]
            case _:
                pass
        return []


# ---------------------------------------------------------------------- at the sockets


def _decoded(
    router: RouterNode,
    decoder: EnvelopeDecoder[Any],
    frames: list[Any],
    rejected: Callable[[ProtocolError], ClientInputRejected | WorkerInputRejected],
) -> list[Any]:
    """Decode an envelope. A malformed envelope is fed to the router as rejected: no messages."""
    try:
        return list(decoder.decode(frames))
    except ProtocolError as error:
        router.cluster.stats["rogue_malformed"] += 1
        router.feed(rejected(error))
        return []


def at_workers(
    router: RouterNode, identity: bytes, decoder: EnvelopeDecoder[Any], frames: list[Any]
) -> None:
    """Pass an envelope through the checks of a router's socket for workers."""
    messages = _decoded(router, decoder, frames, partial(WorkerInputRejected, identity))
    passed = []
    for message in messages:
        refused = refusal(identity, message)
        if refused is None:
            passed.append(message)
        else:
            router.cluster.stats["rogue_refused"] += 1
            router.feed(WorkerInputRejected(identity, refused))
    if messages:
        router.feed(FromWorker(identity, passed))


def at_clients(
    router: RouterNode, identity: bytes, decoder: EnvelopeDecoder[Any], frames: list[Any]
) -> None:
    """Pass an envelope through the checks of a router's socket for clients."""
    messages = _decoded(router, decoder, frames, partial(ClientInputRejected, identity))
    for message in messages:
        if isinstance(message, Submit):
            own = request_key(identity, message.request_id, message.serial)
            router.cluster.watcher.surrender(own)
    if messages and not client_refusals(ALLOWED.get(key_behind(identity)), messages):
        router.feed(FromClient(identity, messages))


def at_peers(rogue: Rogue, decode: DecodePeer, identity: bytes, frames: list[Any]) -> None:
    """Pass an envelope through the checks of a decode worker's socket."""
    try:
        messages = decode.decoder.decode(frames)
    except ProtocolError:
        decode.cluster.stats["rogue_malformed"] += 1
        return
    for message in messages:
        if peer_refusal(ALLOWED, ALLOWED.get(key_behind(identity)), message) is None:
            decode.hear(rogue, identity, message)
        else:
            decode.cluster.stats["rogue_refused"] += 1
