"""Settings of a prefill worker process."""

from __future__ import annotations

from typing import Literal

import msgspec

from baton.engine.loading.runner_config import RunnerConfig
from baton.kv_transfer.timeout import HANDOFF_TIMEOUT_S
from baton.runtime.liveness import DEFAULT_WORKER_TIMEOUT_S
from baton.runtime.process.log import Level


class PrefillWorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one prefill worker.

    ``endpoint``: control address this worker binds; a ``target_endpoint`` names it.
    ``routers``: router name to worker-side address. ``token_budget``: maximum prompt tokens per
    step (0: a whole prompt). ``step_seconds``: target duration of such a step (0: no target).
    ``slo_ttft``: TTFT target in seconds. Prompts start in the order that meets it
    (:mod:`baton.worker.start_order`); 0: in arrival order. ``max_active``: maximum requests that
    hold blocks on decode workers at a time. ``max_queue``: queue length at which an Assign is
    answered Busy. ``stream_tokens``: a prompt with at least this many uncached tokens is sent layer
    by layer. ``share_pool``: decode workers of this host may read the pool; they get a ticket.
    ``handoff_timeout_s``: seconds without an answer after which a decode worker is unreachable.
    ``drain_grace_s``: seconds that requests may continue after SIGTERM; then other workers take
    them over. ``worker_timeout_s``: must equal the routers'; connections to them time out within
    it. ``keys``: key folder; if set, TCP sockets require CURVE. ``labels``: as
    :mod:`baton.worker.labels` parses them. ``order``: ``module:Class`` that orders waiting prompts;
    empty: as ``slo_ttft`` says. ``kv_transport``: ``module:Class`` that moves KV payloads.
    ``kv_events``, ``kv_events_topic``: see :mod:`baton.worker.kv_publisher`.
    ``extensions``: folder in which such a module is looked for
    last.
    """

    role: Literal["prefill"] = "prefill"
    worker_id: str
    endpoint: str
    routers: dict[str, str]
    runner: RunnerConfig
    pool: str = "default"
    token_budget: int = 512
    step_seconds: float = 0.05
    slo_ttft: float = 0.0
    max_active: int = 16
    max_queue: int = 1024
    max_reserve_tries: int = 3
    stream_tokens: int = 512
    frame_bytes: int = 2 << 20
    share_pool: bool = True
    handoff_timeout_s: float = HANDOFF_TIMEOUT_S
    drain_grace_s: float = 30.0
    worker_timeout_s: float = DEFAULT_WORKER_TIMEOUT_S
    log_format: str = "json"
    log_level: Level = "info"
    keys: str = ""
    labels: str = ""
    kv_events: str = ""
    kv_events_topic: str = "kv-events"
    order: str = ""
    kv_transport: str = ""
    extensions: str = ""


CURVE_FRAME_BYTES = 1 << 20
"""Largest KV frame on an encrypted link, in bytes.

Larger frames do not stay in the processor's caches between encryption and the socket
(docs/operations/security.md has the results)."""


def kv_frame_bytes(config: PrefillWorkerConfig) -> int:
    """Return the KV frame size for the link: smaller if frames are encrypted."""
    encrypted = config.keys and config.endpoint.startswith("tcp://")
    return min(config.frame_bytes, CURVE_FRAME_BYTES) if encrypted else config.frame_bytes
