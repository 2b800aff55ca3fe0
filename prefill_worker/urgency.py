"""By when a prompt must begin for its first token to be in time, and how much begins ahead."""

from __future__ import annotations

import math

from ..engine.cache import PagedCache
from .job import Job
from .pace import Pace
from .start_order import latest_start

AHEAD = 0.05
"""Prompts get a slot when the engine has less left than this part of the limit: a slot's prompt can
be overtaken no more."""
AHEAD_S = 0.1
"""The same, at most: long beside the round trip of a reservation."""


class Urgency:
    """What the service level ``slo_ttft`` (seconds, above 0) asks of a worker with this cache."""

    def __init__(self, slo_ttft: float, cache: PagedCache) -> None:
        self._slo_ttft = slo_ttft
        self._ahead = min(AHEAD_S, AHEAD * slo_ttft)
        self._cache = cache
        self.pace = Pace()

    def start_by(self, job: Job) -> float:
        """The last moment at which ``job`` can begin and be in time, by this worker's clock."""
        if job.assign.emitted:
            return math.inf  # its client has that token: it is in the midst of its answer
        sequence, size = job.sequence, self._cache.block_size
        most = (sequence.num_tokens - 1) // size
        cached = len(self._cache.match(sequence.extend_hashes(), most)) * size
        own = (sequence.num_tokens - cached) * self.pace.seconds_per_token
        return latest_start(job.asked, self._slo_ttft, own + self._ahead)

    def is_met(self, tokens_ahead: int) -> bool:
        """Whether the engine has work enough, so that prompts may wait where order can change."""
        return tokens_ahead * self.pace.seconds_per_token >= self._ahead
