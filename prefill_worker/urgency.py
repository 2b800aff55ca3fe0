"""Latest start times that meet the TTFT target, and how much work is started ahead of time."""

from __future__ import annotations

import math

from ..engine.cache.paged_cache import PagedCache
from .job import Job
from .pace import Pace
from .start_order import latest_start

AHEAD = 0.05
"""A prompt gets a slot when the engine has less work left than this part of the TTFT target.

Once a prompt has a slot, no other prompt can overtake it, so slots are assigned late."""
AHEAD_S = 0.1
"""Upper limit of the same in seconds; long compared with the round trip of a reservation."""


class Urgency:
    """Start times for the TTFT target ``slo_ttft`` (seconds, above 0), given this cache."""

    def __init__(self, slo_ttft: float, cache: PagedCache) -> None:
        self._slo_ttft = slo_ttft
        self._ahead = min(AHEAD_S, AHEAD * slo_ttft)
        self._cache = cache
        self.pace = Pace()

    def start_by(self, job: Job) -> float:
        """Return the latest time, by this worker's clock, at which ``job`` can start in time."""
        if job.assign.emitted:
            return math.inf  # the client already has the first token: TTFT no longer applies
        sequence, size = job.sequence, self._cache.block_size
        most = (sequence.num_tokens - 1) // size
        cached = len(self._cache.match(sequence.extend_hashes(), most)) * size
        own = (sequence.num_tokens - cached) * self.pace.seconds_per_token
        return latest_start(job.asked, self._slo_ttft, own + self._ahead)

    def is_met(self, tokens_ahead: int) -> bool:
        """True if the engine has enough work, so that prompts should stay in the queue."""
        return tokens_ahead * self.pace.seconds_per_token >= self._ahead
