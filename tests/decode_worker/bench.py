"""Bench: the core of a decode worker, without sockets, threads or a model."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from baton.decode_worker.core import DecodeCore
from baton.decode_worker.events import FrameStored, FromPeer, ToPeer
from baton.decode_worker.handoffs import GrantStore
from baton.decode_worker.voice import Codec
from baton.engine.cache.paged_cache import PagedCache
from baton.engine.grammar.constraint import CompileGrammar
from baton.engine.scheduling.plan import Sampled, StepPlan, StepResult
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduling.step_time import StepTime
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.receiver_grants import ReceiverConfig
from baton.proto.hashing import block_hashes, cache_salt
from baton.proto.layout import KVLayout, ModelCard
from baton.proto.wire.context_maps import grown_map
from baton.proto.wire.messages import (
    Commit,
    Committed,
    Grant,
    Hello,
    KVFrame,
    Message,
    Reserve,
    Tokens,
    Welcome,
)
from baton.proto.wire.proofs import Holder, Terms, reserve_ticket
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens
from baton.worker.events import (
    Fault,
    FromRouter,
    RouterUp,
    RunStep,
    StepDone,
    Tick,
    ToRouter,
)
from baton.worker.membership import Membership, WorkerIdentity

from ..model_cards import model_card

M = TypeVar("M", bound=Message)

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=1, block_size=4)

CARD = model_card(max_length=200, eos_token_ids=[0], layout=LAYOUT)

KEY, OTHER = b"r" * 16, b"s" * 16

ROUTER, PEER = "router", b"prefill-0:5"

PROMPT = 10

WORKER_KEY, PROOF = b"k" * 16, b"p" * 16
TERMS = Terms(tokens=200, issued=1000, seconds=600)


def make_context(prompt: int = PROMPT, new: int = 8) -> WireContext:
    return WireContext(
        tokens=WireTokens(np.arange(1, prompt + 1, dtype=np.int32)),
        max_length=200,
        sampling=WireSampling(temperature=0.0, max_new_tokens=new),
        eos_token_ids=[0],
    )


def ticket(key: bytes = KEY, attempt: int = 1, incarnation: int = 5) -> bytes:
    return reserve_ticket(WORKER_KEY, key, attempt, Holder(incarnation), TERMS)


def hashes_of(tokens: int) -> list[bytes]:
    return block_hashes(
        np.arange(1, tokens + 1, dtype=np.int32), 4, cache_salt(CARD.fingerprint, "")
    )


class Bench:
    """A core on a clock that tests move; its actions, sorted."""

    def __init__(
        self,
        blocks: int = 64,
        *,
        welcomed: bool = True,
        card: ModelCard = CARD,
        codec: Codec | None = None,
        slo_ttft: float = 0.0,
        **receiver,
    ) -> None:
        me = WorkerIdentity("decode-0", "decode", 9, 1, "ipc:///d", "default", card, 8)
        self.member = Membership(me, (ROUTER, "router-2"))
        self.cache = PagedCache(blocks, LAYOUT.block_size)
        config = SchedulerConfig(max_batch=8, token_budget=16, growth=4)
        self.scheduler = Scheduler(config, self.cache)
        store = GrantStore(self.cache, self.scheduler)
        self.receiver = Receiver(9, LAYOUT, store, ReceiverConfig(**receiver))
        times = StepTime()
        times.learn(8, 0.01)
        self.core = DecodeCore(
            self.member, self.scheduler, self.receiver, ("ipc:///data", 1 << 20), times, codec,
            slo_ttft,
        )  # fmt: skip
        self.now = 100.0
        self.said: list[Message] = []
        self.routers: list[tuple[str, Message]] = []
        self.peers: list[Message] = []
        self.plans: list[StepPlan] = []
        self.other: list[object] = []
        self.serial = 0
        self.faulty = False  # the test plants exceptions in the core's code
        self.feed(RouterUp(ROUTER))
        if welcomed:
            self.hear(Welcome(router=ROUTER, incarnation=3, key=WORKER_KEY))
        self.take(Hello)

    def feed(self, event) -> None:
        for action in self.core.handle(event, self.now):
            match action:
                case ToRouter(router=router, message=message):
                    self.said.append(message)
                    self.routers.append((router, message))
                case ToPeer(message=message):
                    self.peers.append(message)
                case Fault(error=error) if not self.faulty:
                    raise error
                case RunStep(plan=plan):
                    self.plans.append(plan)
                case _:
                    self.other.append(action)
        self.core.check_integrity()

    def take(self, kind: type[M]) -> list[M]:
        """Messages of one kind to routers, taken out."""
        found = [m for m in self.said if isinstance(m, kind)]
        self.said = [m for m in self.said if not isinstance(m, kind)]
        return found

    def one(self, kind: type[M]) -> M:
        found = self.take(kind)
        assert len(found) == 1, (found, self.said)
        return found[0]

    def to_peer(self, kind: type[M]) -> list[M]:
        found = [m for m in self.peers if isinstance(m, kind)]
        self.peers = [m for m in self.peers if not isinstance(m, kind)]
        return found

    def hear(self, message: Message, router: str = ROUTER) -> None:
        self.feed(FromRouter(router, message))

    def ask(self, message: Message, peer: bytes = PEER) -> None:
        self.feed(FromPeer(peer, message))

    def later(self, seconds: float, step: float = 0.05) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + step)
            self.feed(Tick())

    # ------------------------------------------------------------------ the usual way

    def reserve(
        self, key: bytes = KEY, attempt: int = 1, tokens: int = PROMPT, **fields
    ) -> Reserve:
        self.serial += 1
        message = Reserve(
            request=key,
            attempt=attempt,
            incarnation=5,
            hashes=hashes_of(tokens),
            num_tokens=tokens,
            growth=4,
            serial=self.serial,
            deadline=600.0,
            ticket=ticket(key, attempt),
            **fields,
        )
        self.ask(message)
        return message

    def send(self, grant: Grant, tokens: int = PROMPT) -> tuple[int, int, int]:
        """Deliver what the grant lacks in one frame; returns frames, bytes and digest."""
        first, last = grant.cached_tokens // 4, LAYOUT.blocks_for(tokens)
        if first == last:
            return 0, 0, 0
        size = 2 * (last - first) * LAYOUT.block_bytes
        frame = KVFrame(grant.grant, 0, 0, 2, first, last - first, size, 77)
        assert self.receiver.data.locate(frame) is not None
        self.feed(FrameStored(frame, True))
        return 1, size, 77

    def commit(self, grant: Grant, manifest: tuple[int, int, int], **fields) -> Commit:
        tokens = fields.pop("tokens", PROMPT)
        settings = {
            "request": grant.request,
            "attempt": grant.attempt,
            "context": grown_map(
                fields.pop("context", None) or make_context(tokens, fields.pop("new", 8)),
                fields.pop("emitted", [42]),
            ),
            "router": ROUTER,
            "deadline": 60.0,
            "prefill": "prefill-0",
            "proof": PROOF,
        }
        frames, nbytes, digest = manifest
        message = Commit(
            grant=grant.grant,
            frames=frames,
            bytes=nbytes,
            digest=digest,
            **{**settings, **fields},
        )
        self.ask(message)
        return message

    def run(self, key: bytes = KEY, attempt: int = 1, **fields) -> Commit:
        tokens = fields.get("tokens", PROMPT)
        self.reserve(key, attempt, tokens)
        (grant,) = self.to_peer(Grant)
        message = self.commit(grant, self.send(grant, tokens), **fields)
        assert self.to_peer(Committed)
        return message

    def step(self, token: int = 43) -> None:
        plan = self.plans.pop(0)
        drawn = tuple(Sampled(c.request, token) for c in plan.chunks if c.sample is not None)
        self.feed(StepDone(StepResult(plan.step, drawn, 0.01, plan.num_tokens)))

    def finish(self) -> None:
        """All steps that are out now."""
        for _ in range(len(self.plans)):
            self.step()

    def streamed(self) -> list[tuple[int, int]]:
        return [
            (run.position + i, token)
            for message in self.take(Tokens)
            for run in message.runs
            for i, token in enumerate(run.tokens)
        ]


def wanted(bench, kind: type = CompileGrammar) -> list:
    """Actions of a kind since the last look."""
    found = [action for action in bench.other if isinstance(action, kind)]
    bench.other = [action for action in bench.other if not isinstance(action, kind)]
    return found
