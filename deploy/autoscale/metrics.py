"""What the autoscaler sees of a cluster at one moment.

Counters are cumulative since their owner's start, so a lost observation loses nothing; an owner
is named by its incarnation, so a restart is no negative rate. Pure data: the caller decides
where it comes from (the routers' reports, a replayed trace).
"""

from __future__ import annotations

from dataclasses import dataclass

ROLES = ("prefill", "decode")
STALE_S = 5.0
"""A worker that was not heard for so long says nothing about the present."""
MOST = 2**53
"""Larger counts are damage, and so is what is no number: comparisons refuse both."""
LONGEST_STEP_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker as its last heartbeat described it.

    ``prompt_tokens``: computed since start, ``cached_tokens``: of prompts, found in the cache
    instead; ``compute_seconds``: spent in steps since start; ``step_s``: seconds of the step that
    runs or ran last. ``kv_used``, ``kv_total``: blocks. ``tokens_waiting``: prompt tokens not yet
    computed. ``heard_s_ago``: age of all of this.
    """

    name: str
    role: str
    incarnation: int
    ready: bool
    heard_s_ago: float = 0.0
    tokens_waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    compute_seconds: float = 0.0
    step_s: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether it takes work and its figures are numbers that can be true."""
        if not self.ready or self.role not in ROLES:
            return False
        counts = (
            self.kv_used, self.kv_total, self.running, self.waiting, self.tokens_waiting,
            self.prompt_tokens, self.cached_tokens, self.compute_seconds,
        )  # fmt: skip
        if not all(0 <= count <= MOST for count in counts) or self.kv_used > self.kv_total:
            return False
        return 0 <= self.heard_s_ago <= STALE_S and 0 <= self.step_s <= LONGEST_STEP_S


@dataclass(frozen=True, slots=True)
class RouterSample:
    """One router's counters: requests and prompt tokens that came, and began to be answered.

    ``queued_tokens``: prompt tokens of requests without a first token, now.
    ``started_at``: tells one life of a router from the next.
    """

    name: str
    life: float
    submitted: int = 0
    started_tokens: int = 0
    queued_tokens: int = 0

    @property
    def usable(self) -> bool:
        """Whether its figures are numbers that can be true."""
        counts = (self.submitted, self.started_tokens, self.queued_tokens)
        return all(0 <= count <= MOST for count in counts)


@dataclass(frozen=True, slots=True)
class Metrics:
    """The cluster: workers by name (each once), routers by name."""

    workers: tuple[WorkerSample, ...] = ()
    routers: tuple[RouterSample, ...] = ()
