"""Test bench: a router core with scripted workers and clients, on a simulated clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec.structs import replace

from baton.proto.ids import request_key
from baton.proto.layout import KVLayout, ModelCard
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.messages import (
    Aborted,
    Accepted,
    Adopt,
    Assign,
    FinalAck,
    HandoffReport,
    Heartbeat,
    Hello,
    Message,
    RequestState,
    Resume,
    Submit,
    Submitted,
    Terminal,
    TokenRun,
    Tokens,
    WorkerTimes,
)
from baton.proto.wire.proofs import Holder, assignment_proof
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens
from baton.router.config import RouterConfig
from baton.router.core import RouterCore
from baton.router.events import (
    ClientGone,
    Fault,
    FromClient,
    FromWorker,
    Log,
    Tick,
    ToClient,
    ToWorker,
    WorkersGone,
)
from baton.router.records import ANYBODY, Authentication, Caller
from baton.router.states import State

M = TypeVar("M", bound=Message)

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16)
CARD = ModelCard(
    name="tiny",
    architecture="LlamaForCausalLM",
    fingerprint="weights-1",
    numerics="cpu-float32",
    vocab_size=1000,
    max_length=4096,
    eos_token_ids=[2],
    layout=LAYOUT,
    features=["logit_bias"],
)


def make_config(**settings: Any) -> RouterConfig:
    base = {
        "client_address": "ipc:///run/clients",
        "worker_address": "ipc:///run/workers",
        "cluster_key": "5c" * 32,
    }
    return RouterConfig(**{**base, **settings})


def make_context(prompt: int = 10, new: int | None = 20, **fields: Any) -> WireContext:
    tokens = (np.arange(prompt, dtype=np.int32) * 7 + 3) % 1000
    fields.setdefault("max_length", 4096)
    return WireContext(
        tokens=WireTokens(tokens), sampling=WireSampling(max_new_tokens=new), **fields
    )


@dataclass
class Played:
    """A scripted worker: sends the messages that a test asks for."""

    bench: Bench
    identity: bytes
    hello: Hello

    @property
    def id(self) -> str:
        return self.hello.worker

    @property
    def endpoint(self) -> str:
        return self.hello.endpoint

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.bench.hear(self.identity, self._proven(message))

    def _proven(self, message: Message) -> Message:
        """Add the proofs of assignment to the requests of a Hello."""
        if isinstance(message, Hello):
            held = [replace(one, proof=self.proof(one)) for one in message.requests]
            return replace(message, requests=held)
        return message

    def proof(self, held: RequestState | TokenRun | Terminal) -> bytes:
        """Return the proof that the attempt was assigned to this worker."""
        holder = Holder(self.hello.incarnation)
        return assignment_proof(self.bench.config.key, held.request, held.attempt, holder)

    def adopt(self, *messages: Tokens | Terminal) -> None:
        """Answer an Adopt: send the proof before the messages."""
        first = messages[0].runs[0] if isinstance(messages[0], Tokens) else messages[0]
        proof = self.proof(first)
        self.say(Accepted(request=first.request, attempt=first.attempt, proof=proof), *messages)

    def beat(self, progress: int = 0, **fields: Any) -> None:
        self.say(Heartbeat(incarnation=self.hello.incarnation, progress=progress, **fields))

    def gone(self) -> None:
        self.bench.feed(WorkersGone([self.identity]))

    def accept(self, assign: Assign) -> None:
        self.say(Accepted(request=assign.request, attempt=assign.attempt))

    def tokens(self, key: bytes, position: int, *tokens: int, attempt: int = 1) -> None:
        self._send(key, Tokens(runs=[TokenRun(key, attempt, position, list(tokens))]))

    def end(self, key: bytes, position: int, attempt: int = 1, **fields: Any) -> None:
        if "code" not in fields:
            fields.setdefault("status", "end_of_sequence")
        self._send(key, Terminal(request=key, attempt=attempt, position=position, **fields))

    def _send(self, key: bytes, message: Tokens | Terminal) -> None:
        """Send a message, with a proof if the router is still searching for the request."""
        request = self.bench.core.table.requests.get(key)
        server = None if request is None else request.attempt.server
        if request is not None and request.state is State.RECOVERING and server is None:
            self.adopt(message)
        else:
            self.say(message)

    def report(self, assign: Assign, nbytes: int = 100, times: WorkerTimes | None = None) -> None:
        self.say(
            HandoffReport(
                request=assign.request,
                attempt=assign.attempt,
                prefill=self.id,
                decode=assign.decode,
                transport="zmq",
                bytes_sent=nbytes,
                bytes_received=nbytes,
                blocks=3,
                cached_tokens=16,
                seconds=0.002,
                times=times,
            )
        )


KEY = request_key(b"client", "r")


class Bench:
    """Feeds events to the core, and sorts its messages by receiver."""

    def __init__(self, config: RouterConfig, **core: Any) -> None:
        self.config = config
        self.now = 100.0
        self.core = RouterCore(config, incarnation=77, now=self.now, **core)
        self.sent: dict[bytes, list[Message]] = defaultdict(list)
        self.logs: list[Log] = []
        self.workers: list[Played] = []
        self._incarnation = 1000
        self.faulty = False  # the test plants exceptions in the core's code

    # ------------------------------------------------------------------ events

    def feed(self, event: Any) -> None:
        self._perform(self.core.handle(event, self.now))

    def hear(self, identity: bytes, *messages: Message) -> None:
        """Pass one envelope from a worker to the core."""
        self.feed(FromWorker(identity, messages))

    def _perform(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, ToClient | ToWorker):
                self.sent[action.identity].append(action.message)
            elif isinstance(action, Log):
                self.logs.append(action)
            elif isinstance(action, Fault) and not self.faulty:
                raise action.error

    def client(self, message: Message, identity: bytes = b"client") -> None:
        self.feed(FromClient(identity, [message]))

    def client_gone(self, identity: bytes = b"client") -> None:
        self.feed(ClientGone(identity))

    def advance(self, seconds: float, *, beats: bool = True) -> None:
        """Advance the clock, with a Tick whenever the core's next timer is due."""
        end = self.now + seconds
        while True:
            at = max(self.now, self.core.next_timer())
            if at > end:
                break
            self.now = max(at, self.now + 1e-4)
            if beats:
                self.beat_all()
            self.feed(Tick())
        self.now = end

    def beat_all(self) -> None:
        for worker in self.workers:
            found = self.core.registry.by_identity(worker.identity)
            if found is not None and found.incarnation == worker.hello.incarnation:
                worker.beat()

    # ------------------------------------------------------------------ peers

    def join(
        self,
        role: str,
        number: int = 0,
        *,
        requests: list[RequestState] | None = None,
        model: ModelCard = CARD,
        identity: bytes | None = None,
        **fields: Any,
    ) -> Played:
        self._incarnation += 1
        settings = {
            "version": PROTOCOL_VERSION,
            "worker": f"{role}-{number}",
            "role": fields.pop("said_role", role),
            "incarnation": self._incarnation,
            "pid": 4000 + self._incarnation,
            "endpoint": f"ipc:///run/{role}-{number}",
            "max_batch": 16,
        }
        hello = Hello(model=model, requests=requests or [], **{**settings, **fields})
        name = identity or f"{hello.worker}:{hello.incarnation}".encode()
        worker = Played(self, name, hello)
        self.workers.append(worker)
        worker.say(hello)
        return worker

    def pair(self) -> tuple[Played, Played]:
        return self.join("prefill"), self.join("decode")

    def take(self, peer: bytes | Played, kind: type[M]) -> list[M]:
        """Remove and return the messages of one type for a peer."""
        identity = peer if isinstance(peer, bytes) else peer.identity
        found = [m for m in self.sent[identity] if isinstance(m, kind)]
        self.sent[identity] = [m for m in self.sent[identity] if not isinstance(m, kind)]
        return found

    def one(self, peer: bytes | Played, kind: type[M]) -> M:
        found = self.take(peer, kind)
        assert len(found) == 1, (found, dict(self.sent))
        return found[0]

    def find(self, kind: type[M]) -> tuple[Played, M]:
        """Remove and return the only message of a type for any worker, with the worker."""
        found = [(w, m) for w in self.workers for m in self.take(w, kind)]
        assert len(found) == 1, found
        return found[0]

    def decode_of(self, assign: Assign) -> Played:
        """Return the decode worker that an Assign names."""
        return next(w for w in self.workers if w.endpoint == assign.decode)

    # ------------------------------------------------------------------ requests

    def submit(self, request_id: str = "r", identity: bytes = b"client", **fields: Any) -> bytes:
        context = fields.pop("context", None) or make_context(
            fields.pop("prompt", 10),
            fields.pop("new", 20),
            target_endpoint=fields.pop("target_endpoint", None),
        )
        self.client(Submit(request_id=request_id, context=context, **fields), identity)
        return request_key(identity, request_id)

    def run(self, request_id: str = "r", **fields: Any) -> tuple[bytes, Assign]:
        """Submit a request, and accept its Assign."""
        key = self.submit(request_id, **fields)
        worker, assign = self.find(Assign)
        worker.accept(assign)
        return key, assign

    def resume_message(
        self, submitted: Submitted, emitted: list[int], attempt: int = 1, **fields: Any
    ) -> Resume:
        context = fields.pop("context", None) or make_context()
        settings = {
            "request_id": submitted.request_id,
            "request": submitted.request,
            "secret": submitted.secret,
            "position": len(context.tokens) + len(emitted),
            "attempt": attempt,
            "context": context,
            "emitted": emitted,
        }
        return Resume(**{**settings, **fields})

    def deny(self, key: bytes) -> None:
        """Deny a request at all workers, in both rounds of the search."""
        for _ in range(2):
            for worker in self.workers:
                if self.take(worker, Adopt):
                    worker.say(Aborted(request=key, attempt=0))

    def ack(self, key: bytes, identity: bytes = b"client") -> None:
        self.client(FinalAck(requests=[key]), identity)

    def streamed(self, key: bytes, identity: bytes = b"client") -> list[tuple[int, int]]:
        """Return ``(position, token)`` of all tokens sent to a client for a request."""
        return [
            (run.position + i, token)
            for message in self.sent[identity]
            if isinstance(message, Tokens)
            for run in message.runs
            if run.request == key
            for i, token in enumerate(run.tokens)
        ]

    def terminals(self, key: bytes, identity: bytes = b"client") -> list[Terminal]:
        return [m for m in self.sent[identity] if isinstance(m, Terminal) and m.request == key]

    def assert_nothing_kept(self) -> None:
        core = self.core
        assert not core.table.requests
        assert not core.table.queued
        assert len(core.table.timers) == 0
        assert len(core.clients) == 0
        admission = core.admission
        assert (admission.requests, admission.queued_tokens, admission.context_bytes) == (0, 0, 0)
        for worker in core.registry.live():
            assert not worker.requests
            assert worker.outstanding == 0


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    def make(
        files: dict[str, bytes] | None = None,
        caller_of: Callable[[bytes], Caller] = lambda _: ANYBODY,
        fresh_stories: bool = False,
        **settings: Any,
    ) -> Bench:
        config = make_config(**settings)
        return Bench(
            config,
            files=files,
            authentication=Authentication(client=caller_of),
            fresh_stories=fresh_stories,
        )

    return make


@pytest.fixture
def submitted(make_bench: Callable[..., Bench]) -> Submitted:
    """What a router that is gone now answered to request "r" of the client, key ``KEY``."""
    old = make_bench()
    old.pair()
    assert old.run()[0] == KEY
    return old.one(b"client", Submitted)


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


@pytest.fixture
def served(bench: Bench) -> Bench:
    """A bench with two prefill and two decode workers."""
    for number in range(2):
        bench.join("prefill", number)
        bench.join("decode", number)
    return bench


@pytest.fixture
def context() -> Callable[..., WireContext]:
    return make_context


@pytest.fixture
def card() -> ModelCard:
    return CARD


@pytest.fixture
def config() -> Callable[..., RouterConfig]:
    return make_config
