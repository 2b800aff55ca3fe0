"""Settings of one router process; parsed once in ``__main__`` and passed down."""

from __future__ import annotations

import math

import msgspec

from ..proto.endpoints import check_endpoint
from ..proto.errors import ConfigError, InputError
from ..proto.limits import (
    DEFAULT_DEADLINE_S,
    DESCRIBED_MARGIN,
    MAX_DEADLINE_S,
    MAX_DESCRIBED_BYTES,
)
from ..runtime.liveness import DEFAULT_WORKER_TIMEOUT_S
from ..runtime.log import Level

POLICIES = ("round_robin", "least_loaded", "prefix_aware")


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How workers are chosen.

    ``block_tokens``: granularity of the router's own prefix index; ``index_blocks``: most
    blocks remembered per worker; ``match_blocks``: most blocks hashed of one prompt;
    ``prefill_load`` and ``decode_load``: how many uncached tokens one token of load is worth;
    ``half_life``: placements after which assigned work counts half as load.
    """

    name: str = "prefix_aware"
    block_tokens: int = 64
    index_blocks: int = 16_384
    match_blocks: int = 256
    prefill_load: float = 0.25
    decode_load: float = 1.0
    half_life: float = 100.0


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the router takes on; beyond it requests are refused at once.

    ``max_requests``: unfinished requests; ``requests_per_slot``: further cap, this many times
    the decode workers' batch slots (0: off); ``max_queued_tokens``: prompt tokens of requests
    that have no token yet; ``max_context_bytes``: memory of everything kept for requests.
    ``min_retry_s`` and ``max_retry_s`` bound the retry hint.
    """

    max_requests: int = 16_384
    requests_per_slot: float = 8.0
    max_queued_tokens: int = 8 << 20
    max_context_bytes: int = 1 << 30
    min_retry_s: float = 0.05
    max_retry_s: float = 30.0


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One router.

    ``client_address``, ``worker_address``: where the two sockets bind. ``name`` is stable over
    restarts: workers keep streams for it. ``cluster_key``: hex text, shared by all routers and
    kept over restarts, or Resume fails. ``model_folder``: whose text files Describe hands out.

    ``start_grace_s``, ``worker_grace_s``: how long requests wait while no worker was ever
    ready, or none is any more. ``recovery_s``: how long after its own start the router waits
    for workers' Hello before it runs a resumed request again. ``orphan_grace_s``: how long after
    its start it lets requests run on that workers report and no client has resumed; a client
    that comes still later is served by replay. ``resume_window_s``: how long the
    requests of a vanished client run on; 0 aborts them at once, so their blocks are free
    within milliseconds, and a client that does come back is served by replay.
    ``worker_timeout_s``: how long a worker may show no heartbeat or no progress before it is
    declared dead; ``slow_step_factor``: a step is a hang only after this many times its
    predicted duration as well.
    ``keys``: key folder; with it TCP sockets demand CURVE.
    """

    client_address: str
    worker_address: str
    name: str = "router"
    cluster_key: str = ""
    model_folder: str = ""
    policy: PolicyConfig = PolicyConfig()
    admission: AdmissionConfig = AdmissionConfig()

    default_deadline_s: float = DEFAULT_DEADLINE_S
    max_deadline_s: float = MAX_DEADLINE_S
    start_grace_s: float = 60.0
    worker_grace_s: float = 30.0
    recovery_s: float = 2.5
    orphan_grace_s: float = 5.0
    resume_window_s: float = 0.0

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
    max_described_bytes: int = MAX_DESCRIBED_BYTES - DESCRIBED_MARGIN

    def __post_init__(self) -> None:
        """Refuse what cannot work, with the field's name."""
        try:
            check_endpoint(self.client_address)
            check_endpoint(self.worker_address)
        except InputError as error:
            raise ConfigError(str(error)) from error
        if self.policy.name not in POLICIES:
            known = ", ".join(POLICIES)
            raise ConfigError(f"policy.name is {self.policy.name!r}; known are {known}")
        try:
            bytes.fromhex(self.cluster_key)
        except ValueError as error:
            raise ConfigError("cluster_key must be hexadecimal text") from error
        if self.max_described_bytes > MAX_DESCRIBED_BYTES - DESCRIBED_MARGIN:
            most = MAX_DESCRIBED_BYTES - DESCRIBED_MARGIN
            raise ConfigError(f"max_described_bytes is {self.max_described_bytes}, at most {most}")
        for part in (self, self.policy, self.admission):
            _check_numbers(part)

    @property
    def key(self) -> bytes:
        """The cluster key's bytes."""
        return bytes.fromhex(self.cluster_key)


_MAY_BE_ZERO = {
    "requests_per_slot", "resume_window_s", "recovery_s", "orphan_grace_s",
    "start_grace_s", "worker_grace_s",
    "prefill_load", "decode_load",
}  # fmt: skip


def _check_numbers(part: msgspec.Struct) -> None:
    for field in part.__struct_fields__:
        value = getattr(part, field)
        if not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and field not in _MAY_BE_ZERO):
            raise ConfigError(f"{field} is {value}; it must be a positive number")
