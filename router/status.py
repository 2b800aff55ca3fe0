"""The status report as JSON: workers, handoffs, failed pairs, and the router's metrics.

The router keeps the handoff reports, so they survive the workers that sent them.
"""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from ..proto.wire.messages import HandoffReport, Terminal
from .admission import Admission
from .authorization import ANYBODY, Caller
from .clients import Clients
from .config import RouterConfig
from .latency import Latency
from .pairs import FailedPair, FailedPairs
from .registry import Registry
from .request_table import RequestTable
from .requests import State
from .workers import Worker

KEEP_HANDOFFS = 256


class Metrics:
    """Numbers of requests by outcome since the start, and their latencies.

    ``dropped``: messages and token runs without effect, by reason. ``first_tokens``: TTFT;
    ``between_tokens``: ITL.
    """

    __slots__ = (
        "between_tokens", "cancelled", "dropped", "failed", "finished", "first_tokens", "moved",
        "replayed", "submitted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.submitted = self.finished = self.failed = self.cancelled = 0
        self.replayed = self.moved = 0
        self.dropped: Counter[str] = Counter()
        self.first_tokens = Latency()
        self.between_tokens = Latency()

    def count(self, terminal: Terminal) -> None:
        """Count a terminal by its outcome."""
        if terminal.status == "cancelled" or terminal.code == "cancelled":
            self.cancelled += 1
        elif terminal.code:
            self.failed += 1
        else:
            self.finished += 1


class Handoffs:
    """Totals of all handoffs, and the latest reports."""

    def __init__(self) -> None:
        self.count = self.bytes_sent = self.bytes_received = 0
        self._last: deque[tuple[HandoffReport, bytes]] = deque(maxlen=KEEP_HANDOFFS)

    def add(self, report: HandoffReport, owner: bytes = b"") -> None:
        """Add a committed handoff; ``owner``: key of the request's client."""
        self.count += 1
        self.bytes_sent += report.bytes_sent
        self.bytes_received += report.bytes_received
        self._last.append((report, owner))

    def listed(self, most: int, caller: Caller = ANYBODY) -> dict[str, object]:
        """Return totals and up to ``most`` recent handoffs that the caller may see, latest last."""
        seen = [one for one, owner in self._last if caller.operator or owner == caller.key]
        recent = seen[-most:] if most > 0 else []
        return {
            "count": self.count,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "last": [_handoff(report) for report in recent],
        }


def _handoff(report: HandoffReport) -> dict[str, object]:
    return {
        "request": report.request.hex(),
        "attempt": report.attempt,
        "prefill": report.prefill,
        "decode": report.decode,
        "transport": report.transport,
        "bytes": report.bytes_sent,
        "bytes_sent": report.bytes_sent,
        "bytes_received": report.bytes_received,
        "blocks": report.blocks,
        "cached_tokens": report.cached_tokens,
        "frames": report.frames,
        "resent_frames": report.resent_frames,
        "milliseconds": round(report.seconds * 1000, 3),
    }


def _failed_pair(pair: FailedPair, now: float) -> dict[str, object]:
    return {
        "prefill": pair.prefill,
        "decode": pair.decode,
        "reason": pair.reason,
        "failures": pair.failures,
        "failing_s": round(now - pair.since, 3),
        "next_try_s": round(max(0.0, pair.next_try - now), 3),
    }


class Reporter:
    """Builds the status report."""

    def __init__(
        self,
        config: RouterConfig,
        table: RequestTable,
        registry: Registry,
        failed_pairs: FailedPairs,
        admission: Admission,
        clients: Clients,
        metrics: Metrics,
        handoffs: Handoffs,
        started_at: float,
    ) -> None:
        self._config = config
        self._table = table
        self._registry = registry
        self._failed_pairs = failed_pairs
        self._admission = admission
        self._clients = clients
        self._metrics = metrics
        self._handoffs = handoffs
        self._started_at = started_at

    def report(self, handoffs: int, now: float, caller: Caller = ANYBODY) -> bytes:
        """Return the report as JSON text, with up to ``handoffs`` recent handoffs.

        A caller without operator rights sees only handoffs of requests with its key.
        """
        self._admission.roll(now)
        workers = self._registry.listed()
        return msgspec.json.encode(
            {
                "workers": [_worker(worker, now) for worker in workers],
                "handoffs": self._handoffs.listed(handoffs, caller),
                "failed_pairs": [
                    _failed_pair(pair, now) for pair in self._failed_pairs.listed(now)
                ],
                "router": self._router(now),
            }
        )

    def _router(self, now: float) -> dict[str, object]:
        admission, metrics, card = self._admission, self._metrics, self._registry.card
        return {
            "name": self._config.name,
            "policy": self._config.policy.name,
            "uptime_s": round(now - self._started_at, 3),
            "model": card.name if card else "",
            "task": card.task if card else "",
            "architecture": card.architecture if card else "",
            "numerics": card.numerics if card else "",
            "kv_dtype": card.layout.dtype if card else "",
            "clients": len(self._clients),
            "requests": {
                "in_flight": admission.requests,
                "queued": len(self._table.queued),
                "unacknowledged": sum(
                    r.state is State.ENDED for r in self._table.requests.values()
                ),
                "submitted": metrics.submitted,
                "finished": metrics.finished,
                "failed": metrics.failed,
                "cancelled": metrics.cancelled,
                "refused": admission.refused,
                "replayed": metrics.replayed,
                "moved": metrics.moved,
            },
            "latency": {
                "first_token_s": self._metrics.first_tokens.summary(now),
                "between_tokens_s": self._metrics.between_tokens.summary(now),
            },
            "dropped": dict(metrics.dropped),
            "queued_tokens": admission.queued_tokens,
            "prompt_tokens": admission.prompt_tokens.total,
            "context_bytes": admission.context_bytes,
            "rates": {
                "requests_per_s": round(admission.ended.rate, 3),
                "prompt_tokens_per_s": round(admission.prompt_tokens.rate, 3),
                "generated_tokens_per_s": round(admission.tokens.rate, 3),
            },
        }


def _worker(worker: Worker, now: float) -> dict[str, object]:
    load = worker.load
    waited = "first_token_s" if worker.role == "prefill" else "between_tokens_s"
    return {
        "id": worker.id,
        "role": worker.role,
        "pid": worker.pid,
        "state": worker.state.value,
        "reason": worker.reason,
        "endpoint": worker.endpoint,
        "pool": worker.pool,
        "incarnation": worker.incarnation,
        "kv_blocks_total": load.kv_blocks_total,
        "kv_blocks_used": load.kv_blocks_used,
        "kv_blocks_cached": load.kv_blocks_cached,
        "requests_running": load.requests_running,
        "requests_waiting": load.requests_waiting,
        "tokens_waiting": load.tokens_waiting,
        "prefix_hit_tokens": load.prefix_hit_tokens,
        "prompt_tokens": load.prompt_tokens,
        "step_s": round(worker.step_s, 6),
        "generated_tokens": load.generated_tokens,
        "preemptions": load.preemptions,
        "compute_seconds": round(load.compute_seconds, 6),
        "assigned_requests": len(worker.requests),
        "outstanding_tokens": worker.outstanding,
        "dropped": worker.dropped,
        waited: worker.latency.summary(now),
        "heard_s_ago": round(max(0.0, now - worker.seen_at), 3),
    }
