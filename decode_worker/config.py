"""Settings of a decode worker process."""

from __future__ import annotations

import msgspec

from ..engine.runner import RunnerConfig
from ..kv_transfer.timeout import HANDOFF_TIMEOUT_S
from ..runtime.liveness import DEFAULT_WORKER_TIMEOUT_S
from ..runtime.log import Level


class DecodeWorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One frozen struct, parsed once.

    ``endpoint``: control address this worker binds (what ``target_endpoint`` names).
    ``data_endpoint``: address for KV frames; empty: next to ``endpoint`` (``ipc``) or any
    free port of the same host (``tcp``). ``routers``: router name to worker-side address.
    ``max_batch``: requests decoded in one step. ``token_budget``: tokens per step for
    requests that are recomputed after a preemption; ``step_seconds``: how long a step with such
    tokens should take (0: any time). ``window`` and ``credit_budget``: bytes a
    single handoff and all handoffs may have in flight. ``handoff_timeout_s``: seconds without an
    answer after which a prefill worker is unreachable and its grants are freed.
    ``drain_grace_s``: how long requests may run on after SIGTERM; others then take them over.
    ``worker_timeout_s``: as the routers'; connections to them time out within it.
    ``keys``: key folder; with it TCP sockets demand CURVE.
    """

    worker_id: str
    endpoint: str
    routers: dict[str, str]
    runner: RunnerConfig
    data_endpoint: str = ""
    pool: str = "default"
    max_batch: int = 32
    token_budget: int = 256
    step_seconds: float = 0.05
    window: int = 32 << 20
    credit_budget: int = 256 << 20
    handoff_timeout_s: float = HANDOFF_TIMEOUT_S
    drain_grace_s: float = 30.0
    worker_timeout_s: float = DEFAULT_WORKER_TIMEOUT_S
    log_format: str = "json"
    log_level: Level = "info"
    keys: str = ""
