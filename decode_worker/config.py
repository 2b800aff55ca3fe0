"""Settings of a decode worker process."""

from __future__ import annotations

from typing import Literal

import msgspec

from baton.engine.loading.runner_config import RunnerConfig
from baton.kv_transfer.timeout import HANDOFF_TIMEOUT_S
from baton.runtime.liveness import DEFAULT_WORKER_TIMEOUT_S
from baton.runtime.process.log import Level


class DecodeWorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one decode worker.

    ``endpoint``: control address this worker binds; a ``target_endpoint`` names it.
    ``data_endpoint``: address for KV frames; empty: next to ``endpoint`` (``ipc``) or any
    free port of the same host (``tcp``). ``routers``: router name to worker-side address.
    ``max_batch``: maximum requests decoded in one step. ``token_budget``: maximum tokens per step
    for requests that are recomputed after a preemption. ``step_seconds``: target duration of a step
    with such tokens (0: no target). ``slo_ttft``: TTFT target in seconds, for the order in which
    local prompts start (:mod:`baton.worker.start_order`); 0: in arrival order. ``window`` and
    ``credit_budget``: bytes that a single handoff and all handoffs may have in flight.
    ``handoff_timeout_s``: seconds without an answer after which a prefill worker is unreachable and
    its grants are freed. ``drain_grace_s``: seconds that requests may continue after SIGTERM; then
    other workers take them over. ``worker_timeout_s``: must equal the routers'; connections to them
    time out within it. ``keys``: key folder; if set, TCP sockets require CURVE. ``labels``: as
    :mod:`baton.worker.labels` parses them. ``kv_events``, ``kv_events_topic``: see
    :mod:`baton.worker.kv_publisher`. ``kv_transport``, ``extensions``: as of prefill workers.
    """

    role: Literal["decode"] = "decode"
    worker_id: str
    endpoint: str
    routers: dict[str, str]
    runner: RunnerConfig
    data_endpoint: str = ""
    pool: str = "default"
    max_batch: int = 32
    token_budget: int = 256
    step_seconds: float = 0.05
    slo_ttft: float = 0.0
    window: int = 32 << 20
    credit_budget: int = 256 << 20
    handoff_timeout_s: float = HANDOFF_TIMEOUT_S
    drain_grace_s: float = 30.0
    worker_timeout_s: float = DEFAULT_WORKER_TIMEOUT_S
    log_format: str = "json"
    log_level: Level = "info"
    keys: str = ""
    labels: str = ""
    kv_transport: str = ""
    extensions: str = ""
    kv_events: str = ""
    kv_events_topic: str = "kv-events"
