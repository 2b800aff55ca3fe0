"""The invariants of every simulated run. A violation names the seed and the broken rule.

After every event, the counters of the node that handled it must match its state. In every message,
a token must be the model's answer at its position. Every user must get each token once, in order,
and one correct end. After the faults, every request must end in time and nothing may be held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.client import events as client
from baton.proto.wire.messages import Message, Reserve, TokenRun, Tokens
from baton.proto.wire.proofs import Holder, worker_key
from baton.router.records import WorkerState

from .keys import is_rogue
from .toy_model import expected_media, expected_tokens, expected_vector

if TYPE_CHECKING:
    from .clients import Record
    from .cluster import Cluster
    from .decode_nodes import DecodeNode
    from .nodes import Node, RouterNode
    from .workers import WorkerNode

GRANT_S = 8.0
"""Seconds within which a grant without a handoff is freed, from the resumption of its worker."""
FINISHED = ("end_of_sequence", "maximum_length")
LATE_S = 1.0
"""Seconds after its deadline within which a request must end."""
CLIENT_LATE_S = 2.2
"""The same if the router could not report the end."""


class Violation(Exception):
    """An invariant does not hold."""


class Watcher:
    """Observes a cluster while it runs.

    ``every``: a node's books are checked after every n-th of its events, and after each exception
    that was planted there. 1 names the event that broke them.
    """

    def __init__(self, cluster: Cluster, every: int = 1) -> None:
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

    def worker(self, node: WorkerNode[Any]) -> None:
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

    def _is_due(self, node: Node) -> bool:
        node.unchecked += 1
        due = node.unchecked >= self._every
        if due:
            node.unchecked = 0
        return due

    def grants(self, node: DecodeNode) -> None:
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

    def _check_size(self, node: DecodeNode, reserve: Reserve) -> None:
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

    def to_router(self, node: WorkerNode[Any], message: Message) -> None:
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


def check_request(cluster: Cluster, record: Record, allowed: frozenset[str], calm: float) -> None:
    """Check one request's history from its user's side."""
    name, want = record.request_id, cluster.watcher.expected(record)
    if record.orphaned:
        return
    if len(record.ends) != 1:
        raise Violation(f"{name}: {len(record.ends)} ends, {len(record.tokens)} tokens")
    if cluster.rogues and cluster.watcher.is_exempt(record):
        cluster.stats["surrendered"] += 1
        return
    end = record.ends[0]
    if record.embed and end.status in FINISHED:
        _check_vector(record, end)
    elif end.status in FINISHED:
        complete = record.tokens == want and (end.status == FINISHED[0]) == (want[-1] == 0)
        if not complete and not record.stopped:
            raise Violation(f"{name}: {end.status} after {len(record.tokens)} of {len(want)}")
        if record.draws and complete:
            if end.media != cluster.watcher.media(record)[record.max_new_tokens]:
                raise Violation(f"{name}: another picture")
            cluster.stats["pictures"] += 1
    elif end.status is not None:
        if end.status != "cancelled" or not record.stopped:
            raise Violation(f"{name}: ended {end.status}")
    elif end.error is not None and not _is_allowed(record, end.error.code, allowed):
        raise Violation(f"{name}: {end.error.code}: {end.error}")
    _check_time(record, calm)


def _check_vector(record: Record, end: client.Ended) -> None:
    """Check that a text has its own embedding, or none if the model cannot embed it."""
    found = None if end.embedding is None else end.embedding.tolist()
    if record.mute or found != expected_vector(record.prompt).tolist():
        raise Violation(f"{record.request_id}: {found} is not the embedding of its text")


def _is_allowed(record: Record, code: str, allowed: frozenset[str]) -> bool:
    if code == "deadline_exceeded" and code not in allowed:
        due = record.deadline is not None and record.started + record.deadline
        return bool(due) and record.ended_at >= due - 1e-6
    expected = (code == "poisoned" and record.poison) or (code == "internal" and record.mute)
    return expected or code in allowed


def _check_time(record: Record, calm: float) -> None:
    if record.deadline is None:
        return
    due = record.started + record.deadline
    latest = due + LATE_S if due > calm else max(due, calm) + CLIENT_LATE_S
    if record.ended_at > latest:
        text = f"ended {record.ended_at - due:.2f} s after its deadline"
        raise Violation(f"{record.request_id}: {text}, {record.ends}")


def check_quiet(cluster: Cluster) -> None:
    """Check that nothing is held after the faults ended and all requests ended."""
    for node in cluster.workers:
        if not node.alive:
            raise Violation(f"{node.name} was not restarted")
        if node.blocks_used:
            raise Violation(f"{node.name} leaks {node.blocks_used} blocks")
        if not node.core.idle:
            raise Violation(f"{node.name} is not idle")
        node.core.check_integrity()
        if node.member.unacknowledged:
            raise Violation(f"{node.name} keeps {node.member.unacknowledged} terminals")
    for router in cluster.routers:
        router.core.check_integrity()
        if router.core.unfinished:
            raise Violation(f"{router.name} keeps {router.core.unfinished} unfinished requests")


def check_forgotten(cluster: Cluster) -> None:
    """Check, long after the last request, that no table still has an entry."""
    for node in cluster.workers:
        if node.core.remembered:
            raise Violation(f"{node.name} never removes {node.core.remembered} entries")
    for router in cluster.routers:
        core = router.core
        if core.kept or len(core.clients) or len(core.table.timers):
            raise Violation(f"{router.name} keeps ended requests")
        for worker in core.registry.live():
            if is_rogue(worker.key):
                continue  # it has left and confirmed nothing; its record ends with it
            if worker.requests or worker.aborts or worker.outstanding:
                raise Violation(f"{router.name} still counts load on {worker.id}")
            if worker.state is WorkerState.DRAINING:
                raise Violation(f"{worker.id} was drained and never ended")
