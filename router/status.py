"""The status report as JSON: workers, handoffs, failed pairs, and the router's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import msgspec
from msgspec.structs import replace

from baton.proto.wire.messages import ExtensionCounts, Status
from baton.runtime.metrics.families import Family

from .families import Sources, families_of
from .handoffs import Transferred
from .history import History
from .metrics import CANCELLED, DISCONNECTED, FAILED, OK
from .pairs import FailedPair
from .records import ANYBODY, Caller, Worker
from .state import RouterState
from .states import State
from .stories import Story, names, story_of
from .story_report import Record, story_record

MAX_REPORTED_REQUESTS = 1000
"""Most ended and most unfinished requests in one report; each has about 1.5 KB."""


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
    """Builds the status report. ``extensions``: counts the calls of users' classes."""

    def __init__(
        self,
        state: RouterState,
        history: History,
        extensions: Callable[[], list[ExtensionCounts]],
    ) -> None:
        self._config = state.config
        self._table = state.table
        self._registry = state.registry
        self._failed_pairs = state.placement.failed_pairs
        self._admission = state.admission
        self._clients = state.clients
        self._metrics = state.metrics
        self._handoffs = state.handoffs
        self._stories = state.stories
        self._history = history
        self._started_at = state.started_at
        self._extensions = extensions

    def report(self, asked: Status, now: float, caller: Caller = ANYBODY) -> bytes:
        """Return the report as JSON text, with as many handoffs and requests as asked for.

        A caller without operator rights sees only its own requests and their handoffs.
        """
        self._admission.roll(now)
        restarts, handed = self._registry.totals.restarts, self._handoffs.metrics.by_worker
        report: dict[str, object] = {
            "workers": [
                _worker(worker, now)
                | {"restarts": restarts[worker.id, worker.role]}
                | _handed_over(handed.get(worker.id))
                | {"extensions": _shown(worker.extensions, caller)}
                for worker in self._registry.listed()
            ],
            "handoffs": self._handoffs.listed(asked.handoffs, caller),
            "failed_pairs": [_failed_pair(pair, now) for pair in self._failed_pairs.listed(now)],
            "router": self._router(now) | {"extensions": _shown(self._extensions(), caller)},
            "requests": self._requests(asked, now, caller),
        }
        if asked.failed:
            report["failed"] = self._records(self._stories.failed(asked.failed, caller), now)
        if asked.history:
            report["history"] = self._history.report(asked.history, now)
        if asked.metrics:
            report["metrics"] = self.families(now)
        return msgspec.json.encode(report)

    def families(self, now: float) -> list[Family]:
        """Return all metrics of this router and its workers."""
        self._admission.roll(now)
        return families_of(
            Sources(
                config=self._config,
                registry=self._registry,
                admission=self._admission,
                metrics=self._metrics,
                handoffs=self._handoffs.metrics,
                queued=len(self._table.queued),
                clients=len(self._clients),
                failed_pairs=sum(1 for _ in self._failed_pairs.listed(now)),
                uptime_s=now - self._started_at,
            )
        )

    def _requests(self, asked: Status, now: float, caller: Caller) -> list[Record]:
        """Return the records of the requests asked for, oldest first, then unfinished ones."""
        found: list[Story] = []
        running = (
            request
            for request in self._table.requests.values()
            if not request.done and (caller.operator or request.owner == caller.key)
        )
        if asked.request:
            name = asked.request
            named = (one for one in running if names(name, one.key, one.request_id))
            found = self._stories.find(name, MAX_REPORTED_REQUESTS, caller)
            found += [story_of(one, now) for one in islice(named, MAX_REPORTED_REQUESTS)]
        elif asked.requests:
            most = min(asked.requests, MAX_REPORTED_REQUESTS)
            found = self._stories.last(most, caller)
            found += [story_of(one, now) for one in islice(running, most)]
        return self._records(found, now)

    def _records(self, found: Iterable[Story], now: float) -> list[Record]:
        policy = self._config.policy.name
        return [story_record(story, policy, now) for story in found]

    def _queued_rows(self) -> int:
        """Return the rows of the steps that the files of this router still need."""
        if not self._admission.file_rows:
            return 0
        return sum(r.rows_left for r in self._table.requests.values() if not r.done)

    def _router(self, now: float) -> dict[str, object]:
        admission, metrics, card = self._admission, self._metrics, self._registry.card
        return {
            "name": self._config.name,
            "policy": self._config.policy.name,
            "mode": self._config.mode,
            "serving": not self._registry.missing(self._registry.roles),
            "uptime_s": round(now - self._started_at, 3),
            "model": card.name if card else "",
            "task": card.task if card else "",
            "architecture": card.architecture if card else "",
            "numerics": card.numerics if card else "",
            "kv_dtype": " and ".join(self._registry.kv_types) if card else "",
            "clients": len(self._clients),
            "batch_slots": self._registry.slots,
            "requests": {
                "in_flight": admission.requests,
                "limit": admission.limit(self._registry.slots, self._registry.others),
                "queued": len(self._table.queued),
                "unacknowledged": sum(
                    r.state is State.ENDED for r in self._table.requests.values()
                ),
                "submitted": metrics.submitted,
                "finished": metrics.total(OK),
                "failed": metrics.total(FAILED),
                "cancelled": metrics.total(CANCELLED),
                "disconnected": metrics.total(DISCONNECTED),
                "refused": metrics.refused.total(),
                "refused_by_reason": dict(metrics.refused),
                "replayed": metrics.replayed,
                "moved": metrics.moved,
                "local": metrics.local.total(),
            },
            "latency": {
                "first_token_s": self._metrics.first_tokens.summary(now),
                "between_tokens_s": self._metrics.between_tokens.summary(now),
            },
            "dropped": dict(metrics.dropped),
            "queued_tokens": admission.queued_tokens,
            "prompt_tokens": admission.prompt_tokens.total,
            "image_tokens": admission.encoded,
            "queued_image_tokens": admission.queued_encoded,
            "encoder_tokens": admission.encoder_tokens,
            "queued_encoder_tokens": admission.queued_encoder_tokens,
            "picture_rows": admission.file_rows,
            "queued_picture_rows": self._queued_rows(),
            "cached_tokens": metrics.served.cached_tokens,
            "generated_tokens": admission.tokens.total,
            "restarts": self._registry.totals.restarts.total(),
            "context_bytes": admission.context_bytes,
            "rates": {
                "requests_per_s": round(admission.ended.rate, 3),
                "prompt_tokens_per_s": round(admission.prompt_tokens.rate, 3),
                "generated_tokens_per_s": round(admission.tokens.rate, 3),
            },
        }


def _shown(counts: list[ExtensionCounts], caller: Caller) -> list[ExtensionCounts]:
    """Return the counts; errors of users' classes, which may name requests, for operators only."""
    return counts if caller.operator else [replace(one, error="") for one in counts]


def _handed_over(found: Transferred | None) -> dict[str, object]:
    """Bytes that a worker sent or received in handoffs, and the seconds of these handoffs."""
    if found is None:
        return {"handoff_bytes": 0, "handoff_seconds": 0.0}
    return {"handoff_bytes": found.bytes, "handoff_seconds": round(found.seconds, 6)}


def _worker(worker: Worker, now: float) -> dict[str, object]:
    load = worker.load
    waited = "first_token_s" if worker.role == "prefill" else "between_tokens_s"
    return {
        "id": worker.id,
        "role": worker.role,
        "pid": worker.pid,
        "state": worker.state.value,
        "reason": worker.reason,
        "finished": worker.finished,
        "endpoint": worker.endpoint,
        "device": worker.device,
        "shared_weights": worker.shared_weights,
        "labels": worker.labels,
        "kv_events": worker.kv_events,
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
        "encode_seconds": round(load.encode_seconds, 6),
        "image_tokens": load.image_tokens,
        "encoder_tokens": load.encoder_tokens,
        "step_rows": load.step_rows,
        "assigned_requests": len(worker.requests),
        "outstanding_tokens": worker.outstanding,
        "dropped": worker.dropped,
        waited: worker.latency.summary(now),
        "heard_s_ago": round(max(0.0, now - worker.seen_at), 3),
    }
