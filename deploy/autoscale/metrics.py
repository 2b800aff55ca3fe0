"""The autoscaler's observation of a cluster at one moment.

Counters are cumulative since the start of their process, so a lost observation loses no counts. A
process is identified by its incarnation, so a restart does not look like a negative rate. Pure
data: the source may be the routers' reports or a replayed trace.
"""

from __future__ import annotations

from dataclasses import dataclass

ROLES = ("prefill", "decode")
STALE_S = 5.0
"""Maximum age in seconds of a worker's heartbeat; older data is unusable."""
MOST = 2**53
"""Maximum plausible count. Comparisons with it also reject NaN."""
LONGEST_STEP_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """The state of one worker in its last heartbeat.

    ``prompt_tokens``: prompt tokens computed since start. ``cached_tokens``: prompt tokens taken
    from the prefix cache since start. ``compute_seconds``: time in steps since start. ``step_s``:
    seconds of the current or last step. ``kv_used``, ``kv_total``: blocks. ``tokens_waiting``:
    prompt tokens not yet computed. ``encode_seconds``: the part of ``compute_seconds`` that encoded
    images; ``image_tokens``: of computed prompts, since start. ``encoder_tokens``: of the encoded
    prompts of pictures since start. ``step_rows``: rows of pictures' steps computed since start.
    ``heard_s_ago``: age of the heartbeat in seconds.
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
    encode_seconds: float = 0.0
    image_tokens: int = 0
    encoder_tokens: int = 0
    step_rows: int = 0
    step_s: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether the worker accepts requests and its metrics are recent and plausible."""
        if not self.ready or self.role not in ROLES:
            return False
        counts = (
            self.kv_used, self.kv_total, self.running, self.waiting, self.tokens_waiting,
            self.prompt_tokens, self.cached_tokens, self.compute_seconds, self.step_rows,
            self.encode_seconds, self.image_tokens, self.encoder_tokens,
        )  # fmt: skip
        if not all(0 <= count <= MOST for count in counts) or self.kv_used > self.kv_total:
            return False
        return 0 <= self.heard_s_ago <= STALE_S and 0 <= self.step_s <= LONGEST_STEP_S


@dataclass(frozen=True, slots=True)
class RouterSample:
    """One router's counters.

    ``life``: differs between restarts of a router. ``submitted``: requests received.
    ``started_tokens``: prompt tokens of requests with a first token. ``queued_tokens``: prompt
    tokens of requests that have no first token yet. ``image_tokens``: of the images of all prompts
    received; ``queued_image_tokens``: of the queued ones. ``encoder_tokens``: of the prompts of all
    pictures received; ``queued_encoder_tokens``: of those without a first token. ``picture_rows``:
    rows of the steps of all pictures received; ``queued_rows``: of the steps not yet computed.
    """

    name: str
    life: float
    submitted: int = 0
    started_tokens: int = 0
    queued_tokens: int = 0
    image_tokens: int = 0
    queued_image_tokens: int = 0
    encoder_tokens: int = 0
    queued_encoder_tokens: int = 0
    picture_rows: int = 0
    queued_rows: int = 0

    @property
    def usable(self) -> bool:
        """Whether the metrics are plausible."""
        counts = (
            self.submitted, self.started_tokens, self.queued_tokens,
            self.picture_rows, self.queued_rows, self.image_tokens, self.queued_image_tokens,
            self.encoder_tokens, self.queued_encoder_tokens,
        )  # fmt: skip
        return all(0 <= count <= MOST for count in counts)


@dataclass(frozen=True, slots=True)
class Metrics:
    """The cluster: each worker and each router once."""

    workers: tuple[WorkerSample, ...] = ()
    routers: tuple[RouterSample, ...] = ()
