"""The invariants of every simulated run while it runs. A violation names the broken rule.

After every event, the counters of the node that handled it must match its state. In every message,
a token must be the model's answer at its position. Every user must get each token once, in order.
:mod:`.end_checks` checks the end of a run.
"""

from __future__ import annotations

from baton.client import events as client
from baton.proto.wire.messages import Message, Reserve, TokenRun, Tokens
from baton.proto.wire.proofs import Holder, worker_key

from .keys import is_rogue
from .nodes import DecodePeer, RouterNode, Watched, WorkerPeer, World
from .records import Record
from .toy_model import expected_media, expected_tokens
from .violation import Violation

GRANT_S = 8.0
"""Seconds within which a grant without a handoff is freed, from the resumption of its worker."""


class Watcher:
    """Observes a cluster while it runs.

    ``every``: a node's books are checked after every n-th of its events, and after each exception
    that was planted there. 1 names the event that broke them.
    """

    def __init__(self, cluster: World, every: int = 1) -> None:
        self._cluster = cluster
        self._every = every
        self._truth: dict[int, list[int]] = {}
        self._media: dict[int, dict[int, bytes]] = {}
        self._named: dict[bytes, list[Record]] = {}
        self._surrendered: set[bytes] = set()  # requests that rogues may harm
        self._empty: set[int] = set()  # incarnations whose pool was empty at the last check
        self._unused: dict[tuple[int, int, int], float] = {}  # grants without a handoff, since when

    # ------------------------------------------------------------------ books

    def router(self, node: RouterNode) -> None:
        """Check a router after an event."""
        if self._is_due(node):
            node.core.check_integrity()

    def worker(self, node: WorkerPeer) -> None:
        """Check a worker after an event; a pool that stays empty is checked once."""
        if not self._is_due(node):
            return
        if node.blocks_used:
            self._empty.discard(node.incarnation)
        elif node.incarnation in self._empty:
            return
        else:
            self._empty.add(node.incarnation)
        node.core.check_integrity()

    def _is_due(self, node: Watched) -> bool:
        node.unchecked += 1
        due = node.unchecked >= self._every
        if due:
            node.unchecked = 0
        return due

    def grants(self, node: DecodePeer) -> None:
        """Check that grants end with their handoffs, and are no larger than their requests."""
        now = self._cluster.network.now
        before, self._unused = (
            self._unused,
            {grant: since for grant, since in self._unused.items() if grant[0] != node.incarnation},
        )
        for slot in node.receiver.ungiven():
            if slot.reserve is not None:
                self._check_size(node, slot.reserve)
            if slot.reserve is None or self._is_handed_over(slot.reserve) or is_rogue(slot.key):
                continue
            grant = (node.incarnation, slot.index, slot.generation)
            # A stopped worker cannot free anything.
            since = self._unused[grant] = max(before.get(grant, now), node.resumed_at)
            if now > since + GRANT_S:
                raise Violation(f"{node.name} holds an unused grant for {now - since:.1f} s")

    def _check_size(self, node: DecodePeer, reserve: Reserve) -> None:
        asked, known = reserve.num_tokens + reserve.growth, self._named.get(reserve.request)
        if self._cluster.shape.draws or not known:
            return  # a request of a rogue
        needed = max(len(one.prompt) + one.max_new_tokens for one in known)
        if asked > needed:
            raise Violation(f"{node.name} grants {asked} tokens to a request of {needed}")

    def _is_handed_over(self, reserve: Reserve) -> bool:
        key = (reserve.request, reserve.attempt)
        return any(
            node.alive and node.incarnation == reserve.incarnation and key in node.sender
            for node in self._cluster.prefills
        )

    # ------------------------------------------------------------------ tokens

    def surrender(self, request: bytes) -> None:
        """Note that a request was assigned to a rogue or came from one."""
        self._surrendered.add(request)

    def is_surrendered(self, request: bytes) -> bool:
        """True if a rogue has a right to a request."""
        return request in self._surrendered

    def is_exempt(self, record: Record) -> bool:
        """True if a rogue served a request for a while: its tokens may be wrong."""
        return any(
            record in records and self.is_surrendered(key) for key, records in self._named.items()
        )

    @property
    def names(self) -> list[bytes]:
        """Keys of the requests that no rogue has a right to."""
        return [key for key in self._named if key not in self._surrendered]

    def ticket_keys(self) -> set[bytes]:
        """Return the keys with which the cluster's own decode workers check tickets."""
        return {
            worker_key(router.cluster_key, Holder(node.incarnation, node.key), router.incarnation)
            for router in self._cluster.routers
            for node in self._cluster.decodes
            if router.alive and not is_rogue(node.key)
        }

    def named(self, key: bytes, record: Record) -> None:
        """Record the key under which a client submits a request."""
        records = self._named.setdefault(key, [])
        if record not in records:
            records.append(record)

    def expected(self, record: Record) -> list[int]:
        """Return the model's answer to a request."""
        known = self._truth.get(id(record))
        if known is None and record.embed:
            known = self._truth[id(record)] = []
        elif known is None and record.draws:
            known = self._truth[id(record)] = list(range(record.max_new_tokens + 1))
        elif known is None:
            known = expected_tokens(record.prompt, record.max_new_tokens)
            self._truth[id(record)] = known
        return known

    def media(self, record: Record) -> dict[int, bytes]:
        """Return the previews and the picture of a request, by the steps that are done."""
        known = self._media.get(id(record))
        if known is None:
            size = self._cluster.shape.sizes.block_size
            known = self._media[id(record)] = expected_media(record.picture(), size)
        return known

    def to_router(self, node: WorkerPeer, message: Message) -> None:
        """Check a message from a worker to a router."""
        if isinstance(message, Tokens):
            for run in message.runs:
                self._check_run(node.name, run)

    def to_client(self, node: RouterNode, identity: bytes, message: Message) -> None:
        """Check a message from a router to a client."""
        if isinstance(message, Tokens):
            for run in message.runs:
                self._check_run(node.name, run)

    def _check_run(self, speaker: str, run: TokenRun) -> None:
        if self.is_surrendered(run.request):
            return
        for record in self._named.get(run.request, ()):
            start = run.position - len(record.prompt)
            if start >= 0 and self.expected(record)[start : start + len(run.tokens)] == run.tokens:
                return
        raise Violation(f"{speaker} sends wrong tokens {run}")

    def streamed(self, record: Record, new: client.NewTokens) -> None:
        """Check tokens that a user receives."""
        if new.position != len(record.prompt) + len(record.tokens):
            raise Violation(f"{record.request_id}: token {new.position} is out of order")
        record.tokens += new.tokens
        if self._surrendered and self.is_exempt(record):
            return
        if record.tokens != self.expected(record)[: len(record.tokens)]:
            raise Violation(f"{record.request_id}: wrong tokens {record.tokens}")
        if record.draws and new.tokens:
            last, steps = record.tokens[-1], record.max_new_tokens
            wanted = self.media(record).get(last) if last < steps else None
            if new.media != wanted:
                raise Violation(f"{record.request_id}: wrong preview after {last} steps")
            self._cluster.stats["previews"] += wanted is not None
