"""The router's metrics for Prometheus, of itself and of the workers.

Series of requests are this router's own: the cluster's number is their sum over all routers.
Series of workers (``baton_worker_...``) are in the metrics of every router that the workers
registered with: use ``max by (worker)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import product

import msgspec

from baton.runtime.metrics.families import (
    GAP_S,
    LATENCY_S,
    STEP_SECONDS,
    STEP_TOKENS,
    Bounds,
    Family,
    Histogram,
    Labels,
    Row,
    Values,
    counter,
    gauge,
    histogram,
)
from baton.runtime.metrics.latency import Latency, cumulated

from .admission import Admission
from .config import RouterConfig
from .handoffs import HandoffMetrics
from .metrics import CANCELLED, DISCONNECTED, MISSED, OK, OWNERS, Metrics
from .placement import NO_PREFILL
from .records import Worker
from .registry import Registry
from .states import WorkerState
from .worker_totals import COUNTERS, WorkerTotals

_WORKER = ("worker", "role")
_COUNTER_TEXTS = dict(
    zip(
        COUNTERS,
        (
            "Prompt tokens computed.",
            "Tokens sampled.",
            "Prompt tokens found in the worker's prefix cache.",
            "Requests that lost their KV blocks and are computed again.",
            "Time spent in engine steps.",
        ),
        strict=True,
    )
)


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """What the metrics are made from. ``queued``: requests without workers."""

    config: RouterConfig
    registry: Registry
    admission: Admission
    metrics: Metrics
    handoffs: HandoffMetrics
    queued: int
    clients: int
    failed_pairs: int
    uptime_s: float


def families_of(sources: Sources) -> list[Family]:
    """Return all families; the rates of ``sources.admission`` must be current."""
    live = sources.registry.live()
    return [
        *_router(sources),
        *_requests(sources),
        *_latencies(sources.metrics),
        *_handoffs(sources),
        *_workers(live, sources.registry.listed()),
        *_extensions(sources.registry.totals, live),
        *_totals(sources.registry, live),
    ]


def _router(sources: Sources) -> list[Family]:
    config, card = sources.config, sources.registry.card
    info = (config.name, card.name if card else "", config.policy.name)
    return [
        gauge("baton_router_info", "The router.", {info: 1}, ("router", "model_name", "policy")),
        gauge("baton_router_uptime_seconds", "Time since the router's start.", sources.uptime_s),
        gauge("baton_router_clients", "Clients with requests.", sources.clients),
        gauge(
            "baton_router_context_bytes",
            "Memory charged for the contexts of requests.",
            sources.admission.context_bytes,
        ),
        counter(
            "baton_router_dropped_messages_total",
            "Messages and runs of tokens without effect.",
            _by_one(sources.metrics.dropped),
            ("reason",),
        ),
    ]


def _requests(sources: Sources) -> list[Family]:
    metrics, admission = sources.metrics, sources.admission
    early = ((one, one) for one in (CANCELLED, DISCONNECTED))
    outcomes = _numbers(metrics.outcomes, (OK, "stop"), (OK, "length"), *early)
    return [
        gauge("baton_requests_in_flight", "Admitted requests that run.", admission.requests),
        gauge("baton_requests_queued", "Requests that wait for workers.", sources.queued),
        gauge(
            "baton_queued_prompt_tokens",
            "Prompt tokens of requests without a first token.",
            admission.queued_tokens,
        ),
        counter("baton_requests_submitted_total", "Requests admitted.", metrics.submitted),
        counter(
            "baton_requests_total",
            "Admitted requests that ended, by outcome and by finish reason or error code.",
            outcomes,
            ("outcome", "reason"),
        ),
        counter(
            "baton_requests_limits_total",
            "Finished requests by whose latency limits they have, and by the limits they missed.",
            {key: metrics.served.kept[key] for key in product(OWNERS, MISSED)},
            ("limits", "missed"),
        ),
        counter(
            "baton_requests_refused_total",
            "Requests that were not admitted, by error code; one that is sent again counts once.",
            {("overloaded",): 0, ("input",): 0} | _by_one(metrics.refused),
            ("reason",),
        ),
        counter(
            "baton_requests_replayed_total",
            "Attempts made again after a worker or a handoff was lost.",
            metrics.replayed,
        ),
        counter(
            "baton_requests_moved_total",
            "Waiting requests moved away from suspect workers.",
            metrics.moved,
        ),
        counter(
            "baton_requests_local_total",
            "Attempts that a decode worker got alone, with its prompt, by reason.",
            {(NO_PREFILL,): 0} | _by_one(metrics.local),
            ("reason",),
        ),
        counter(
            "baton_prompt_tokens_total",
            "Prompt tokens of requests with a first token.",
            admission.prompt_tokens.total,
        ),
        counter(
            "baton_cached_prompt_tokens_total",
            "Prompt tokens of finished requests that came from a prefix cache.",
            metrics.served.cached_tokens,
        ),
        counter(
            "baton_generated_tokens_total", "Tokens relayed to clients.", admission.tokens.total
        ),
    ]


def _latencies(metrics: Metrics) -> list[Family]:
    served = metrics.served
    return [
        _latency(
            "baton_time_to_first_token_seconds",
            "Time from the request's arrival at the router to its first token.",
            LATENCY_S,
            metrics.first_tokens,
            metrics.first_tokens_s,
        ),
        _latency(
            "baton_time_to_first_audio_seconds",
            "Time from the arrival of a request for speech to its first samples.",
            LATENCY_S,
            metrics.first_piece,
            metrics.first_piece_s,
        ),
        _latency(
            "baton_inter_token_latency_seconds",
            "Time between two tokens of a request at the router.",
            GAP_S,
            metrics.between_tokens,
            metrics.between_tokens_s,
        ),
        histogram(
            "baton_time_per_output_token_seconds",
            "Mean time per token after the first one, of finished requests.",
            served.per_token,
        ),
        histogram(
            "baton_request_duration_seconds",
            "Time from arrival to end, of finished requests.",
            served.durations,
        ),
        histogram(
            "baton_request_queue_seconds",
            "Time from arrival until a prefill worker began to compute.",
            served.queues,
        ),
        histogram(
            "baton_request_prefill_seconds",
            "Time a prefill worker took to compute the first token.",
            served.prefills,
        ),
        histogram(
            "baton_request_decode_seconds",
            "Time from the first to the last token, of finished requests.",
            served.decoding,
        ),
        histogram("baton_request_prompt_tokens", "Length of prompts.", served.prompts),
        histogram("baton_request_generated_tokens", "Length of answers.", served.generated),
    ]


def _latency(name: str, text: str, bounds: Bounds, latency: Latency, total: float) -> Family:
    row = Row((), total, cumulated(latency.counts, bounds))
    return Family(name, "histogram", text, (), [row], bounds)


def _handoffs(sources: Sources) -> list[Family]:
    found = {(name,): one for name, one in sources.handoffs.by_transport.items()}
    label = ("transport",)
    return [
        counter(
            "baton_handoffs_total",
            "Finished handoffs of KV blocks.",
            {key: one.count for key, one in found.items()},
            label,
        ),
        counter(
            "baton_handoff_bytes_total",
            "Bytes of KV blocks handed over.",
            {key: one.bytes for key, one in found.items()},
            label,
        ),
        histogram(
            "baton_handoff_seconds",
            "Time from Reserve to Committed. Blocks travel while the prompt is computed.",
            {key: one.seconds for key, one in found.items()},
            label,
        ),
        histogram(
            "baton_handoff_size_bytes",
            "Bytes of one handoff.",
            {key: one.sizes for key, one in found.items()},
            label,
        ),
        histogram(
            "baton_handoff_throughput_bytes_per_second",
            "Bytes of one handoff per second of it.",
            {key: one.bytes_per_s for key, one in found.items()},
            label,
        ),
        gauge(
            "baton_failed_pairs",
            "Pairs of live workers that cannot reach each other.",
            sources.failed_pairs,
        ),
    ]


def _extensions(totals: WorkerTotals, live: list[Worker]) -> list[Family]:
    """Calls of users' classes in workers; no family without such a class."""
    failed: Counter[Labels] = Counter()
    skipped: Counter[Labels] = Counter()
    for worker in live:
        for one in worker.extensions:
            key = (*totals.owner(worker), *totals.extension(one))
            failed[key] += one.failures
            skipped[key] += one.skipped
    if not failed:
        return []
    labels = (*_WORKER, "extension", "name")
    return [
        counter(
            "baton_worker_extension_failures_total",
            "Calls of an extension in the worker that raised or returned nonsense.",
            failed,
            labels,
        ),
        counter(
            "baton_worker_extension_skipped_calls_total",
            "Calls of an extension in the worker that were not made: it had taken too long.",
            skipped,
            labels,
        ),
    ]


def _workers(live: list[Worker], listed: list[Worker]) -> list[Family]:
    states = Counter((worker.role, worker.state.value) for worker in listed)
    roles = dict.fromkeys(("prefill", "decode", *(worker.role for worker in listed)))
    all_states = ((role, state.value) for role in roles for state in WorkerState)
    owners = [((worker.id, worker.role), worker.load) for worker in live]

    def of_workers(name: str, text: str, field: str) -> Family:
        return gauge(name, text, {key: getattr(load, field) for key, load in owners}, _WORKER)

    usage: Values = {
        key: load.kv_blocks_used / max(1, load.kv_blocks_total) for key, load in owners
    }
    return [
        gauge(
            "baton_workers",
            "Workers by state; dead ones that have no successor yet are among them.",
            _numbers(states, *all_states),
            ("role", "state"),
        ),
        gauge(
            "baton_worker_kv_usage_ratio",
            "Share of the KV blocks that requests own; cached blocks are free.",
            usage,
            _WORKER,
        ),
        of_workers("baton_worker_kv_blocks", "KV blocks of the worker.", "kv_blocks_total"),
        of_workers("baton_worker_kv_blocks_used", "KV blocks of requests.", "kv_blocks_used"),
        of_workers(
            "baton_worker_kv_blocks_cached",
            "Free KV blocks with cached prefixes.",
            "kv_blocks_cached",
        ),
        of_workers("baton_worker_requests_running", "Requests in the batch.", "requests_running"),
        of_workers(
            "baton_worker_requests_waiting",
            "Requests at the worker that wait to be computed.",
            "requests_waiting",
        ),
        of_workers(
            "baton_worker_tokens_waiting", "Prompt tokens not yet computed.", "tokens_waiting"
        ),
    ]


def _totals(registry: Registry, live: list[Worker]) -> list[Family]:
    totals = registry.totals
    sums = totals.sums(live)
    restarts = _numbers(totals.restarts, *sums)
    shown = [
        counter(
            f"baton_worker_{name}_total",
            _COUNTER_TEXTS[name],
            {owner: values[index] for owner, values in sums.items()},
            _WORKER,
        )
        for index, name in enumerate(COUNTERS)
    ]
    shown.append(
        counter(
            "baton_worker_restarts_total",
            "Registrations of a successor after a worker was declared dead.",
            restarts,
            _WORKER,
        )
    )
    shown.append(
        counter(
            "baton_worker_role_changes_total",
            "Registrations in this role of a worker that had the other one.",
            _numbers(totals.role_changes, *sums),
            _WORKER,
        )
    )
    found = totals.histograms(live)
    for name, text in (
        (STEP_SECONDS, "Time of an engine step."),
        (STEP_TOKENS, "Tokens computed by an engine step."),
    ):
        series: dict[Labels, Histogram] = {
            (role,): one for (found_name, role), one in found.items() if found_name == name
        }
        shown.append(histogram(f"baton_worker_{name}", text, series, ("role",)))
    return shown


def _numbers(counts: Mapping[tuple[str, str], int], *always: tuple[str, str]) -> Values:
    """The counts by labels; ``always``: labels that are shown even without a count."""
    zeros: dict[Labels, float] = dict.fromkeys(always, 0)
    return zeros | dict(counts)


def _by_one(counts: Mapping[str, int]) -> dict[Labels, float]:
    return {(name,): count for name, count in counts.items()}
