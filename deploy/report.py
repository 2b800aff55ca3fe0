"""The router's status report, as the supervisor and the ``baton`` command read it.

The router writes the object that ``baton status --json`` prints. Only the keys used here are
declared. Unknown keys are ignored, so a newer router can report more.
"""

from __future__ import annotations

import msgspec

from baton.proto.errors import DecodeFailed
from baton.runtime.process.memory import size_text

ALIVE_STATES = frozenset({"ready", "draining"})
DEAD = "dead"
DRAINED = "drained"
"""Reason of a worker that exited after its last request."""
NO_PROGRESS = "no progress"
"""Beginning of the reason of a worker that sends heartbeats but makes no progress."""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles in seconds over the last minutes; ``count``: number since the start."""

    count: int = 0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class ExtensionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of a user's own class since the start of its process; ``error``: the last one."""

    point: str = ""
    name: str = ""
    calls: int = 0
    failures: int = 0
    skipped: int = 0
    error: str = ""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. Token counts are since its start."""

    id: str
    role: str
    pid: int = 0
    state: str = ""
    reason: str = ""  # why the worker is dead or was rejected
    endpoint: str = ""
    device: str = ""  # "cuda:1 GPU-...", as the worker numbers it, or "cpu, 2 threads (REASON)"
    shared_weights: int = 0  # bytes of weights that it maps with other workers of its host
    labels: dict[str, str] = {}
    kv_events: list[str] = []  # addresses of the events of its cache and of their replay
    incarnation: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    tokens_waiting: int = 0
    compute_seconds: float = 0.0
    encode_seconds: float = 0.0  # the part of compute_seconds that encoded images
    image_tokens: int = 0
    encoder_tokens: int = 0  # of the encoded prompts of pictures
    step_rows: int = 0  # rows of the computed steps of pictures
    step_s: float = 0.0  # seconds of the current or last step
    heard_s_ago: float = 0.0
    generated_tokens: int = 0
    first_token_s: Percentiles | None = None  # prefill workers only
    between_tokens_s: Percentiles | None = None  # decode workers only
    dropped: dict[str, int] = {}
    extensions: list[ExtensionReport] = []  # users' classes in the worker
    restarts: int = 0  # successors of this name after deaths
    handoff_bytes: int = 0  # sent or received for requests of this router
    handoff_seconds: float = 0.0

    @property
    def device_title(self) -> str:
        """The device with the start of its UUID: ``cuda:1 GPU-5e2f90a1``, or ``cpu, 2 threads``."""
        if self.device.startswith("cpu"):
            return self.device.partition(" (")[0]
        device, _, uuid = self.device.partition(" ")
        return f"{device} {uuid[:12]}".strip() or "cpu"

    @property
    def threads(self) -> str:
        """``2 threads per worker (REASON)``; empty for a worker with a GPU."""
        device, _, threads = self.device.partition(", ")
        count, _, reason = threads.partition(" (")
        return f"{count} per worker ({reason}" if device == "cpu" else ""

    @property
    def stuck(self) -> bool:
        """Whether the worker was declared dead for lack of progress, not of heartbeats."""
        return self.state == DEAD and self.reason.startswith(NO_PROGRESS)

    @property
    def alive(self) -> bool:
        """Whether the router reports the worker as ready or draining."""
        return self.state in ALIVE_STATES


class HandoffRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One handoff."""

    prefill: str = ""
    decode: str = ""
    transport: str = ""
    bytes_sent: int = 0
    bytes_received: int = 0
    blocks: int = 0
    cached_tokens: int = 0
    milliseconds: float = 0.0


class HandoffTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of all handoffs, and the recent handoffs, the latest last."""

    count: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    last: list[HandoffRecord] = []


class FailedPairRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A live prefill worker and a live decode worker that cannot reach each other.

    ``next_try_s``: seconds until a request uses this pair again, if other pairs can serve.
    """

    prefill: str = ""
    decode: str = ""
    reason: str = ""
    failures: int = 0
    failing_s: float = 0.0
    next_try_s: float = 0.0


class LatencyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of all requests, measured at the router."""

    first_token_s: Percentiles = Percentiles()
    between_tokens_s: Percentiles = Percentiles()


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests now, and since the router's start.

    ``finished``, ``failed``, ``cancelled``: admitted requests that ended. ``disconnected``: those
    whose client disconnected without a Cancel. ``refused``: requests that were not admitted, each
    once, however often its client sends it again. ``replayed``, ``moved``: attempts made again,
    waiting requests moved.
    ``local``: attempts that decode workers got alone, with their prompts.
    """

    in_flight: int = 0
    queued: int = 0
    submitted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    disconnected: int = 0
    refused: int = 0
    refused_by_reason: dict[str, int] = {}
    replayed: int = 0
    moved: int = 0
    local: int = 0


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput of one router, as a mean of the last seconds."""

    requests_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The router itself.

    ``task``: task of the served model, "generate" or "embed". ``architecture``, ``numerics`` and
    ``kv_dtype``: model and arithmetic of the workers. These four are empty before the first worker
    registers. ``dropped``: dropped messages by reason. ``prompt_tokens``: prompt tokens of requests
    with a first token, since the router's start. ``queued_tokens``: prompt tokens of requests
    without a first token. ``image_tokens``: tokens of all admitted prompts that stand for images;
    ``queued_image_tokens``: of those without a first token. ``encoder_tokens``: tokens that the
    last text encoder reads for all admitted pictures; ``queued_encoder_tokens``: of those without
    a first token. ``picture_rows``: work of the steps of all admitted pictures;
    ``queued_picture_rows``: of the steps not yet computed.
    ``cached_tokens``: prompt tokens of finished requests that came from a prefix cache.
    ``restarts``: of all workers. ``mode``: how requests are distributed over prefill and decode
    workers. ``extensions``: users' classes in the router. ``serving``: whether requests are served
    at once, or wait for workers.
    """

    name: str = ""
    model: str = ""
    mode: str = "disaggregated"
    extensions: list[ExtensionReport] = []
    serving: bool = False
    uptime_s: float = 0.0
    clients: int = 0
    rates: Rates = Rates()
    restarts: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    requests: RequestCounts = RequestCounts()
    prompt_tokens: int = 0
    queued_tokens: int = 0
    image_tokens: int = 0
    queued_image_tokens: int = 0
    encoder_tokens: int = 0
    queued_encoder_tokens: int = 0
    picture_rows: int = 0
    queued_picture_rows: int = 0
    task: str = ""
    architecture: str = ""
    numerics: str = ""
    kv_dtype: str = ""
    latency: LatencyReport = LatencyReport()
    dropped: dict[str, int] = {}


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cluster."""

    workers: list[WorkerReport] = []
    handoffs: HandoffTotals = HandoffTotals()
    failed_pairs: list[FailedPairRecord] = []
    router: RouterReport = RouterReport()

    def of_role(self, role: str) -> list[WorkerReport]:
        """Workers of one pool."""
        return [worker for worker in self.workers if worker.role == role]

    @property
    def shared_weights(self) -> str:
        """Bytes of the weights that workers share, and how many share them; empty if none does."""
        sizes = [worker.shared_weights for worker in self.workers if worker.alive]
        sharers = sum(size > 0 for size in sizes)
        if not sharers:
            return ""
        count = f"{sharers} of {len(sizes)} workers"
        return f"{size_text(max(sizes))} in memory that {count} share"

    @property
    def threads(self) -> str:
        """Compute threads on CPUs and their reason; by pool if they differ; empty without any."""
        found: dict[str, list[str]] = {}
        for worker in sorted(self.workers, key=lambda worker: worker.role, reverse=True):
            title = worker.threads
            if title and worker.alive and worker.role not in found.setdefault(title, []):
                found[title].append(worker.role)
        if len(found) < 2:
            return next(iter(found), "")
        return "; ".join(f"{' and '.join(roles)}: {title}" for title, roles in found.items())


def parse_report(data: bytes) -> ClusterReport:
    """Decode a report from JSON. Raises DecodeFailed."""
    try:
        return msgspec.json.decode(data, type=ClusterReport)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise DecodeFailed(f"the router sent no readable status report: {problem}") from problem
