"""What must hold in every simulated run; a violation names the seed's story.

During the run (checked by the nodes after every event): the books of every decode worker
balance. At the end: every request has exactly one terminal, its tokens are what the toy model
answers, in order and once; when faults have stopped, nothing is held anywhere.
"""

from __future__ import annotations

from .clients import Record
from .cluster import Cluster
from .toy_model import expected_tokens


class Violation(Exception):
    """An invariant does not hold."""


def check_request(record: Record) -> None:
    """One request's history, seen from its client."""
    if record.orphaned:
        return
    if not record.terminals:
        raise Violation(f"{record.request_id}: no terminal, {len(record.tokens)} tokens")
    want = expected_tokens(record.prompt, record.max_new_tokens)
    if record.tokens != want[: len(record.tokens)]:
        raise Violation(f"{record.request_id}: wrong tokens {record.tokens} for {want}")
    first = record.terminals[0]
    if any(other.code != first.code or other.status != first.status for other in record.terminals):
        raise Violation(f"{record.request_id}: two ends {record.terminals}")
    if first.status in ("end_of_sequence", "maximum_length") and record.tokens != want:
        raise Violation(f"{record.request_id}: ended {first.status} after {len(record.tokens)}")
    if first.status == "cancelled" and not record.cancelled:
        raise Violation(f"{record.request_id}: cancelled by nobody")


def check_quiet(cluster: Cluster) -> None:
    """After the faults have stopped and all requests ended: nothing is held."""
    for node in cluster.workers:
        if not node.alive:
            raise Violation(f"{node.name} was not restarted")
        if node.cache.pool.used:
            raise Violation(f"{node.name} leaks {node.cache.pool.used} blocks")
        if not node.core.idle:
            raise Violation(f"{node.name} is not idle")
    if cluster.router.core.unfinished:
        raise Violation(f"the router keeps {cluster.router.core.unfinished} unfinished requests")


def check_all(cluster: Cluster) -> None:
    """Everything, at the end of a run."""
    for client in cluster.clients:
        for record in client.history:
            check_request(record)
    check_quiet(cluster)
