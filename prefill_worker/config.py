"""Settings of a prefill worker process."""

from __future__ import annotations

import msgspec

from ..engine.runner import RunnerConfig
from ..kv_transfer.timeout import HANDOFF_TIMEOUT_S
from ..runtime.liveness import DEFAULT_WORKER_TIMEOUT_S
from ..runtime.log import Level


class PrefillWorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One frozen struct, parsed once.

    ``endpoint``: control address this worker binds (what ``target_endpoint`` names).
    ``routers``: router name to worker-side address. ``token_budget``: most prompt tokens per
    step (0: a whole prompt); ``step_seconds``: how long such a step should take (0: any time).
    ``slo_ttft``: seconds that first tokens should keep, prompts begin in the order that keeps it
    (:mod:`.start_order`); 0: in the order of their coming. ``max_active``: requests that hold
    blocks on the decode side at a time. ``max_queue``: requests beyond which an Assign is answered
    Busy.
    ``stream_tokens``: prompts with at least this many uncached tokens are sent layer by layer.
    ``share_pool``: decode workers of this host may read the pool; they are told where it is.
    ``handoff_timeout_s``: seconds without an answer after which a decode worker is unreachable.
    ``drain_grace_s``: how long requests may run on after SIGTERM; others then take them over.
    ``worker_timeout_s``: as the routers'; connections to them time out within it.
    ``keys``: key folder; with it TCP sockets demand CURVE.
    """

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


CURVE_FRAME_BYTES = 1 << 20
"""Largest KV frame where it is encrypted: larger ones no longer fit the processor's caches between
encryption and the socket (docs/operations/security.md has the figures)."""


def kv_frame_bytes(config: PrefillWorkerConfig) -> int:
    """How large KV frames may be, by where they travel."""
    encrypted = config.keys and config.endpoint.startswith("tcp://")
    return min(config.frame_bytes, CURVE_FRAME_BYTES) if encrypted else config.frame_bytes
