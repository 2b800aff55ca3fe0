"""Settings of one router process, parsed once in ``__main__``."""

from __future__ import annotations

import math

import msgspec

from baton.extend import is_extension
from baton.proto.errors import ConfigError, InputError
from baton.proto.limits import (
    DEFAULT_DEADLINE_S,
    DESCRIBED_MARGIN,
    MAX_DEADLINE_S,
    MAX_DESCRIBED_BYTES,
)
from baton.proto.wire.endpoints import check_endpoint
from baton.runtime.keys.allowed_names import AllowedNames
from baton.runtime.keys.api_keys import check_http_access
from baton.runtime.liveness import DEFAULT_WORKER_TIMEOUT_S
from baton.runtime.metrics.vllm import METRICS_COMPAT
from baton.runtime.process.log import Level

MAX_TRACE_REQUESTS = 100_000
"""Bound of ``trace_requests``: 45 MB of stories, more if many requests were replayed."""
MODES = ("disaggregated", "colocated", "adaptive")
"""How requests are distributed over the two kinds of workers (:mod:`.decider`)."""
MAX_EXTENSIONS = 16
"""Metrics of users' own in one router."""
STEP_SHARE = 0.8
"""Part of the ITL limit that a step with prompt tokens may take.

The rest is for the wait of a new stream: for its handoff and the end of a step."""
POLICIES = ("round_robin", "least_loaded", "prefix_aware")


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the policy that chooses workers.

    ``name``: one of :data:`POLICIES`, or ``module:Class`` of a user's own (:mod:`.custom`), whose
    default is prefix_aware with these numbers.
    ``block_tokens``: tokens per block of the router's prefix index; ``index_blocks``: maximum
    blocks remembered per worker; ``match_blocks``: maximum blocks hashed per prompt;
    ``prefill_load`` and ``decode_load``: cost of one token of load, in uncached tokens;
    ``half_life``: number of placements after which assigned work counts half as load.
    """

    name: str = "prefix_aware"
    block_tokens: int = 64
    index_blocks: int = 16_384
    match_blocks: int = 256
    prefill_load: float = 0.25
    decode_load: float = 1.0
    half_life: float = 100.0


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Admission limits; a request above one of them is rejected at once.

    ``max_requests``: unfinished requests; ``requests_per_slot``: unfinished requests per batch
    slot of the decode workers (0 = unlimited); ``max_queued_tokens``: prompt tokens of requests
    without a first token; ``max_context_bytes``: memory of all records, in bytes;
    ``min_retry_s`` and ``max_retry_s``: bounds of the retry delay in seconds.
    """

    max_requests: int = 16_384
    requests_per_slot: float = 8.0
    max_queued_tokens: int = 8 << 20
    max_context_bytes: int = 1 << 30
    min_retry_s: float = 0.05
    max_retry_s: float = 30.0


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one router. All times are in seconds.

    ``client_address``, ``worker_address``: bind addresses of the two sockets. ``name``: must not
    change in a restart, since workers keep requests for this name. ``cluster_key``: hex text,
    equal at all routers and after a restart; with another key Resume fails. ``model_folder``:
    folder whose text files Describe returns.

    ``mode``: one of :data:`MODES`. ``enforce_disaggregation``: requests wait for a prefill worker,
    even if no prefill worker is ready. Of mode adaptive, ``step_time_s``: target seconds of decode
    workers' steps with prompt tokens (0: none), ``slo_ttft_s``, ``slo_itl_s``: limits of
    requests that have none of their own (0: none).

    ``start_grace_s``: longest wait of a request before the first worker is ready;
    ``worker_grace_s``: longest wait after the last ready worker was lost.
    ``recovery_s``: after its start the router waits this long for workers' Hello before it
    replays a resumed request. ``orphan_grace_s``: after its start the router lets requests that
    workers report run this long without a client; a later Resume leads to a replay.
    ``resume_window_s``: requests of a lost connection run on for this long. 0 aborts them at
    once, which frees their blocks within milliseconds; a later Resume leads to a replay.

    ``trace_requests``: number of ended requests whose stories are kept; 0 keeps none.
    ``otlp_endpoint``: URL of an OpenTelemetry collector for spans of all requests (extra ``otel``).
    ``worker_timeout_s``: a worker without heartbeat or progress for this time is declared dead.
    ``slow_step_factor``: a step counts as hung only if it also takes this many times its
    predicted duration. ``keys``: key folder; if set, TCP sockets require CURVE.
    ``metrics_host``, ``metrics_port``: where to serve ``/metrics`` for Prometheus; port 0: nowhere.
    ``metrics_keys``: SHA-256 digests of API keys in hexadecimal, required for a host that other
    machines reach. ``allowed_hosts``: names of this machine that scrapes without a key may use.
    ``metrics_compat``: "vllm" also exports vLLM's metric names.
    ``decider``: ``module:Class`` that decides in mode adaptive; ``metrics``: the same of further
    metrics; ``extensions``: folder in which such modules are looked for last.
    """

    client_address: str
    worker_address: str
    name: str = "router"
    cluster_key: str = ""
    model_folder: str = ""
    policy: PolicyConfig = PolicyConfig()
    mode: str = "disaggregated"
    enforce_disaggregation: bool = False
    step_time_s: float = 0.05
    slo_ttft_s: float = 0.0
    slo_itl_s: float = 0.0
    admission: AdmissionConfig = AdmissionConfig()

    default_deadline_s: float = DEFAULT_DEADLINE_S
    max_deadline_s: float = MAX_DEADLINE_S
    start_grace_s: float = 60.0
    worker_grace_s: float = 30.0
    recovery_s: float = 2.5
    orphan_grace_s: float = 5.0
    resume_window_s: float = 0.0
    trace_requests: int = 1000
    otlp_endpoint: str = ""

    worker_timeout_s: float = DEFAULT_WORKER_TIMEOUT_S
    slow_step_factor: float = 5.0

    assign_retry_s: float = 0.2
    abort_retry_s: float = 0.2
    adopt_retry_s: float = 0.5
    terminal_retry_s: float = 1.0
    retry_ceiling_s: float = 2.0
    doubt_retry_s: float = 0.2
    busy_backoff_s: float = 0.05
    busy_ceiling_s: float = 1.0
    decode_tries: int = 3
    max_attempts: int = 8
    poison_deaths: int = 2
    log_level: Level = "info"
    keys: str = ""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    metrics_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    metrics_compat: str = ""
    decider: str = ""
    metrics: tuple[str, ...] = ()
    extensions: str = ""
    max_described_bytes: int = MAX_DESCRIBED_BYTES - DESCRIBED_MARGIN

    def __post_init__(self) -> None:
        """Raise ConfigError, with the name of the field, for an invalid value."""
        try:
            check_endpoint(self.client_address)
            check_endpoint(self.worker_address)
        except InputError as error:
            raise ConfigError(str(error)) from error
        if self.policy.name not in POLICIES and not is_extension(self.policy.name):
            known = ", ".join((*POLICIES, "module:Class"))
            raise ConfigError(f"policy.name must be one of {known}, not {self.policy.name!r}")
        if self.mode not in MODES:
            raise ConfigError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if self.decider and self.mode != "adaptive":
            raise ConfigError(f"decider needs mode adaptive, not {self.mode}")
        if self.metrics and not self.metrics_port:
            raise ConfigError("metrics needs metrics_port")
        if len(self.metrics) > MAX_EXTENSIONS:
            raise ConfigError(f"{len(self.metrics)} metrics, limit {MAX_EXTENSIONS}")
        if self.trace_requests > MAX_TRACE_REQUESTS:
            raise ConfigError(
                f"trace_requests is {self.trace_requests}, limit {MAX_TRACE_REQUESTS}"
            )
        if self.metrics_compat not in METRICS_COMPAT:
            raise ConfigError(f"metrics_compat must be vllm or empty, not {self.metrics_compat!r}")
        if not 0 <= self.metrics_port < 1 << 16:
            raise ConfigError(f"metrics_port must be 0 to 65535, not {self.metrics_port}")
        AllowedNames(self.allowed_hosts)
        if self.metrics_port:
            check_http_access(self.metrics_host, self.metrics_keys, "--metrics-host")
        try:
            bytes.fromhex(self.cluster_key)
        except ValueError as error:
            raise ConfigError("cluster_key must be hexadecimal text") from error
        if self.max_described_bytes > MAX_DESCRIBED_BYTES - DESCRIBED_MARGIN:
            most = MAX_DESCRIBED_BYTES - DESCRIBED_MARGIN
            raise ConfigError(f"max_described_bytes is {self.max_described_bytes}, limit {most}")
        for part in (self, self.policy, self.admission):
            _check_numbers(part)

    @property
    def serves_locally(self) -> bool:
        """Whether decode workers may serve requests without a prefill worker."""
        return self.mode != "disaggregated" or not self.enforce_disaggregation

    @property
    def key(self) -> bytes:
        """Return the cluster key as bytes."""
        return bytes.fromhex(self.cluster_key)


_MAY_BE_ZERO = {
    "metrics_port",
    "requests_per_slot", "resume_window_s", "recovery_s", "orphan_grace_s",
    "start_grace_s", "worker_grace_s",
    "prefill_load", "decode_load", "trace_requests", "step_time_s",
    "slo_ttft_s", "slo_itl_s",
}  # fmt: skip


def _check_numbers(part: msgspec.Struct) -> None:
    for field in part.__struct_fields__:
        value = getattr(part, field)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and field not in _MAY_BE_ZERO):
            raise ConfigError(f"{field} is {value}; it must be a positive number")
