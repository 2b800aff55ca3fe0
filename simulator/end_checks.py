"""The invariants at the end of a simulated run.

Every user must have got one correct end, in time. Nothing may be held after the faults, and no
table may still have an entry long after the last request.
"""

from __future__ import annotations

from baton.client import events as client
from baton.router.states import WorkerState

from .cluster import Cluster
from .keys import is_rogue
from .records import FINISHED, Record
from .toy_model import expected_vector
from .violation import Violation

LATE_S = 1.0
"""Seconds after its deadline within which a request must end."""
CLIENT_LATE_S = 2.2
"""The same if the router could not report the end."""


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
