"""Clients of a simulated cluster: they submit, count tokens, cancel, die and resume.

Every request's history is kept for :mod:`.invariants`: tokens by position as they came, and
every terminal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..proto.ids import request_key
from ..proto.messages import (
    Cancel,
    ClientToRouter,
    FinalAck,
    Message,
    Resume,
    Submit,
    Submitted,
    Terminal,
    Tokens,
)
from ..proto.wire import WireContext, WireSampling
from ..router import events as routing
from .nodes import Node
from .toy_model import EOS, MAX_LENGTH

if TYPE_CHECKING:
    from .cluster import Cluster

REPEAT_S = 0.4


@dataclass(slots=True)
class Record:
    """One request as its client saw it."""

    request_id: str
    prompt: list[int]
    max_new_tokens: int
    deadline: float  # absolute
    endpoint: str | None = None
    key: bytes = b""
    secret: bytes = b""
    attempt: int = 1
    tokens: list[int] = field(default_factory=list)
    repeats: int = 0
    terminals: list[Terminal] = field(default_factory=list)
    cancelled: bool = False
    orphaned: bool = False  # its client died: nobody waits for it
    heard_at: float = 0.0

    @property
    def done(self) -> bool:
        """Whether its end is known here."""
        return bool(self.terminals) or self.orphaned

    def context(self) -> WireContext:
        """The request on the wire."""
        return WireContext(
            tokens=np.array(self.prompt, np.int32),
            max_length=MAX_LENGTH,
            sampling=WireSampling(temperature=0.0, max_new_tokens=self.max_new_tokens),
            eos_token_ids=[EOS],
            target_endpoint=self.endpoint,
        )


class ClientNode(Node):
    """A client process with any number of requests."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster, name)
        self.live: dict[str, Record] = {}
        self.by_key: dict[bytes, Record] = {}
        self.history: list[Record] = []

    def boot(self) -> None:
        """A new life knows nothing of the old one's requests."""
        for record in self.live.values():
            record.orphaned = True
        self.live.clear()
        self.by_key.clear()

    def submit(self, record: Record) -> None:
        """Begin a request."""
        record.key = request_key(self.identity, record.request_id)
        record.heard_at = self.cluster.network.now
        self.live[record.request_id] = record
        self.by_key[record.key] = record
        self.history.append(record)
        self._say_submit(record)

    def cancel(self, record: Record) -> None:
        """End a request early."""
        if not record.done:
            record.cancelled = True
            self._say(Cancel(request_id=record.request_id, request=record.key))

    def router_up(self) -> None:
        """The router is back: resume everything."""
        for record in self.live.values():
            self._again(record)

    def tick(self) -> None:
        """Repeat what was not answered for a while."""
        now = self.cluster.network.now
        for record in list(self.live.values()):
            if now - record.heard_at > REPEAT_S:
                record.heard_at = now
                self._again(record)

    def hear(self, message: Message) -> None:
        """The router said something."""
        match message:
            case Submitted(request=key, secret=secret):
                record = self.by_key.get(key)
                if record:
                    record.secret = secret
                    record.heard_at = self.cluster.network.now
            case Tokens(runs=runs):
                for run in runs:
                    self._tokens(run.request, run.attempt, run.position, run.tokens)
            case Terminal():
                self._terminal(message)
            case _:
                pass

    def _tokens(self, key: bytes, attempt: int, position: int, tokens: list[int]) -> None:
        record = self.by_key.get(key)
        if record is None or record.terminals:
            return
        record.heard_at = self.cluster.network.now
        record.attempt = max(record.attempt, attempt)
        expected = len(record.prompt) + len(record.tokens)
        skip = expected - position
        if skip < 0:
            self._again(record)
            return
        record.repeats += min(skip, len(tokens))
        record.tokens += tokens[skip:]

    def _terminal(self, message: Terminal) -> None:
        record = self.by_key.get(message.request)
        if record is None:
            self._say(FinalAck(requests=[message.request]))
            return
        missing = message.position > len(record.prompt) + len(record.tokens)
        if missing and message.code is None and not record.cancelled:
            self._again(record)
            return
        record.terminals.append(message)
        self.live.pop(record.request_id, None)
        self._say(FinalAck(requests=[message.request]))

    def _again(self, record: Record) -> None:
        if record.done:
            return
        if record.cancelled:
            self._say(Cancel(request_id=record.request_id, request=record.key))
        if not record.secret:
            self._say_submit(record)
            return
        self._say(
            Resume(
                request_id=record.request_id,
                request=record.key,
                secret=record.secret,
                position=len(record.prompt) + len(record.tokens),
                attempt=record.attempt,
                context=record.context(),
                emitted=list(record.tokens),
                deadline=record.deadline - self.cluster.network.now,
            )
        )

    def _say_submit(self, record: Record) -> None:
        left = record.deadline - self.cluster.network.now
        message = Submit(request_id=record.request_id, context=record.context(), deadline=left)
        self._say(message)

    def _say(self, message: ClientToRouter) -> None:
        router, identity = self.cluster.router, self.identity
        self.transmit(router, lambda: router.feed(routing.FromClient(identity, message)))
