"""The status report: workers, handoffs and the router's own figures, as JSON.

Handoffs are kept here, so they survive the workers that made them.
"""

from __future__ import annotations

from collections import deque

import msgspec

from ..proto.messages import HandoffReport
from .lifecycle import Lifecycle
from .registry import Worker
from .request import State

KEEP_HANDOFFS = 256


class Handoffs:
    """Totals of all handoffs and the latest ones."""

    def __init__(self) -> None:
        self.count = self.bytes_sent = self.bytes_received = 0
        self._last: deque[HandoffReport] = deque(maxlen=KEEP_HANDOFFS)

    def add(self, report: HandoffReport) -> None:
        """One more handoff was committed."""
        self.count += 1
        self.bytes_sent += report.bytes_sent
        self.bytes_received += report.bytes_received
        self._last.append(report)

    def listed(self, most: int) -> dict[str, object]:
        """Totals and up to ``most`` recent handoffs, the latest last."""
        recent = list(self._last)[-most:] if most > 0 else []
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


class Reporter:
    """Writes the report."""

    def __init__(self, life: Lifecycle, handoffs: Handoffs, started_at: float) -> None:
        self._life = life
        self._handoffs = handoffs
        self._started_at = started_at

    def report(self, handoffs: int, now: float) -> bytes:
        """JSON text of the whole report with up to ``handoffs`` recent handoffs."""
        self._life.admission.roll(now)
        workers = self._life.registry.listed()
        return msgspec.json.encode(
            {
                "workers": [_worker(worker, now) for worker in workers],
                "handoffs": self._handoffs.listed(handoffs),
                "router": self._router(now),
            }
        )

    def _router(self, now: float) -> dict[str, object]:
        life = self._life
        admission, counters = life.admission, life.counters
        return {
            "name": life.config.name,
            "policy": life.config.policy.name,
            "uptime_s": round(now - self._started_at, 3),
            "model": life.registry.card.name if life.registry.card else "",
            "task": life.registry.card.task if life.registry.card else "",
            "clients": len(life.clients),
            "requests": {
                "in_flight": admission.requests,
                "queued": len(life.queued),
                "unacknowledged": sum(r.state is State.ENDED for r in life.requests.values()),
                "submitted": counters.submitted,
                "finished": counters.finished,
                "failed": counters.failed,
                "cancelled": counters.cancelled,
                "refused": admission.refused,
                "replayed": counters.replayed,
            },
            "latency": {
                "first_token_s": life.first_tokens.summary(now),
                "between_tokens_s": life.between_tokens.summary(now),
            },
            "dropped": dict(counters.dropped),
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
