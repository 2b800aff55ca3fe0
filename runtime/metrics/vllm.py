"""vLLM's metric names for Baton's numbers, so that existing boards show them.

A name is exported only if Baton has a number with its meaning. ``engine`` is a worker's name, a
role, or "0" for numbers of the whole cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from .families import Family, Kind, Row

METRICS_COMPAT = ("", "vllm")
"""Values of the setting ``metrics_compat``: no further names, or vLLM's."""
PREFIX = "vllm:"
_SERIES = ("model_name", "engine")
_ALL = "0"
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}

_OF_WORKERS: tuple[tuple[str, Kind, tuple[str, ...], str], ...] = (
    ("num_requests_running", "gauge", ("baton_worker_requests_running",), "worker"),
    ("kv_cache_usage_perc", "gauge", ("baton_worker_kv_usage_ratio",), "worker"),
    ("num_preemptions_total", "counter", ("baton_worker_preemptions_total",), "worker"),
    ("prefix_cache_hits_total", "counter", ("baton_worker_prefix_hit_tokens_total",), "worker"),
    ("iteration_tokens_total", "histogram", ("baton_worker_step_tokens",), "role"),
)
"""vLLM's name, its kind, Baton's name, and the label that becomes ``engine``."""
_OF_REQUESTS: tuple[tuple[str, Kind, str], ...] = (
    ("prompt_tokens_total", "counter", "prompt_tokens_total"),
    ("generation_tokens_total", "counter", "generated_tokens_total"),
    ("time_to_first_token_seconds", "histogram", "time_to_first_token_seconds"),
    ("inter_token_latency_seconds", "histogram", "inter_token_latency_seconds"),
    ("request_time_per_output_token_seconds", "histogram", "time_per_output_token_seconds"),
    ("e2e_request_latency_seconds", "histogram", "request_duration_seconds"),
    ("request_queue_time_seconds", "histogram", "request_queue_seconds"),
    ("request_prefill_time_seconds", "histogram", "request_prefill_seconds"),
    ("request_decode_time_seconds", "histogram", "request_decode_seconds"),
    ("request_prompt_tokens", "histogram", "request_prompt_tokens"),
    ("request_generation_tokens", "histogram", "request_generated_tokens"),
)
"""vLLM's name, its kind, and the end of Baton's name."""


def vllm_families(families: Iterable[Family]) -> list[Family]:
    """Return the families under vLLM's names.

    Numbers of requests come from the gateway (``baton_gateway_...``) if it is among them.
    """
    known = {family.name: family for family in families}
    info = known.get("baton_router_info")
    model = info.rows[0].labels[info.labels.index("model_name")] if info and info.rows else ""
    made = [
        *(_renamed(known, model, *names) for names in _OF_WORKERS),
        *(
            _renamed(known, model, name, kind, (f"baton_gateway_{end}", f"baton_{end}"), "")
            for name, kind, end in _OF_REQUESTS
        ),
        _waiting(known, model),
        _queries(known, model),
        _success(known, model),
    ]
    return [family for family in made if family is not None]


def _renamed(
    known: Mapping[str, Family],
    model: str,
    name: str,
    kind: Kind,
    sources: tuple[str, ...],
    engine: str,
) -> Family | None:
    found = next((known[source] for source in sources if source in known), None)
    if found is None:
        return None
    at = found.labels.index(engine) if engine in found.labels else -1
    rows = [
        Row((model, row.labels[at] if at >= 0 else _ALL), row.value, row.counts)
        for row in found.rows
    ]
    return Family(PREFIX + name, kind, found.text, _SERIES, rows, found.bounds)


def _waiting(known: Mapping[str, Family], model: str) -> Family | None:
    """Requests that wait at workers, and at the router as the engine "router"."""
    queued = known.get("baton_requests_queued")
    found = _renamed(
        known, model, "num_requests_waiting", "gauge", ("baton_worker_requests_waiting",), "worker"
    )
    if found is not None and queued is not None:
        found.rows.append(Row((model, "router"), sum(row.value for row in queued.rows)))
    return found


def _queries(known: Mapping[str, Family], model: str) -> Family | None:
    """Prompt tokens looked up in prefix caches: those found and those computed."""
    sums: dict[str, float] = defaultdict(float)
    for name in ("baton_worker_prompt_tokens_total", "baton_worker_prefix_hit_tokens_total"):
        if name in known:
            at = known[name].labels.index("worker")
            for row in known[name].rows:
                sums[row.labels[at]] += row.value
    if not sums:
        return None
    rows = [Row((model, worker), value) for worker, value in sums.items()]
    text = "Prompt tokens looked up in prefix caches."
    return Family(f"{PREFIX}prefix_cache_queries_total", "counter", text, _SERIES, rows)


def _success(known: Mapping[str, Family], model: str) -> Family | None:
    found = known.get("baton_requests_total")
    if found is None:
        return None
    at = found.labels.index("reason")
    sums: dict[str, float] = defaultdict(float)
    for row in found.rows:
        sums[_REASONS.get(row.labels[at], "error")] += row.value
    rows = [Row((model, _ALL, name), value) for name, value in sums.items()]
    labels = (*_SERIES, "finished_reason")
    text = "Requests that ended, by reason."
    return Family(f"{PREFIX}request_success_total", "counter", text, labels, rows)
