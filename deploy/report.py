"""The router's status report as the supervisor and the ``baton`` command read it.

The router writes the object ``baton status --json`` prints; only the keys needed here are
declared, and unknown ones are ignored, so a newer router can say more.
"""

from __future__ import annotations

import msgspec

from ..proto.errors import DecodeFailed

ALIVE_STATES = frozenset({"ready", "draining"})
DEAD = "dead"
DRAINED = "drained"
"""Reason of a worker that finished what it had and left."""
NO_PROGRESS = "no progress"
"""How the reason begins of a worker that is heard and gets nothing done."""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds; ``count`` since the start, the others of the last minutes."""

    count: int = 0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker; token counts since its start."""

    id: str
    role: str
    pid: int = 0
    state: str = ""
    reason: str = ""  # why it is dead or refused
    endpoint: str = ""
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
    step_s: float = 0.0  # of the step that runs or ran last
    heard_s_ago: float = 0.0
    generated_tokens: int = 0
    first_token_s: Percentiles | None = None  # of a prefill worker
    between_tokens_s: Percentiles | None = None  # of a decode worker
    dropped: dict[str, int] = {}

    @property
    def stuck(self) -> bool:
        """Whether it was declared dead for getting nothing done, not for its silence."""
        return self.state == DEAD and self.reason.startswith(NO_PROGRESS)

    @property
    def alive(self) -> bool:
        """Whether the router hears it, ready or draining."""
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
    """All handoffs the router knows of, the recent ones last."""

    count: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    last: list[HandoffRecord] = []


class FailedPairRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill and a decode worker that live and could not reach each other.

    ``next_try_s``: seconds until a request tries them again, where other pairs can serve.
    """

    prefill: str = ""
    decode: str = ""
    reason: str = ""
    failures: int = 0
    failing_s: float = 0.0
    next_try_s: float = 0.0


class LatencyReport(msgspec.Struct, frozen=True, kw_only=True):
    """How long clients wait, as the router sees it."""

    first_token_s: Percentiles = Percentiles()
    between_tokens_s: Percentiles = Percentiles()


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests since the router's start."""

    submitted: int = 0


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The router itself.

    ``task``: of the served model, "generate" or "embed". ``architecture``, ``numerics`` and
    ``kv_dtype``: what its workers compute, and how. All are empty before the first worker
    registers.
    ``dropped``: messages it could not use, by reason. ``prompt_tokens``: of requests that began to
    be answered, since its start; ``queued_tokens``: of those that wait.
    """

    requests: RequestCounts = RequestCounts()
    prompt_tokens: int = 0
    queued_tokens: int = 0
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


def parse_report(data: bytes) -> ClusterReport:
    """Decode the JSON text; DecodeFailed when it is not a report."""
    try:
        return msgspec.json.decode(data, type=ClusterReport)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise DecodeFailed(f"the router sent no readable status report: {problem}") from problem
