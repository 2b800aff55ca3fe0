"""An order of waiting prompts of the user's own; see docs/extend.md.

If the extension fails or rests, a prompt has no rank and starts by its arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from baton.extend import ORDER, ExtensionError, Order, Prompt, resolve
from baton.extend.guard import Guard, Report

from .job import Job
from .queue import Urgency


class CustomOrder:
    """Ranks jobs by an extension. Raises ExtensionError if it cannot be loaded.

    ``name``: ``module:Class``. ``folder``, ``clock``, ``report``: see :func:`.resolve` and
    :class:`.Guard`.
    """

    def __init__(
        self, name: str, folder: str, report: Report, clock: Callable[[], float] | None = None
    ) -> None:
        self._order: Order = resolve(ORDER, name, folder)
        self.guard = Guard(ORDER, name, report, clock)

    def bound(self, urgency: Urgency) -> Callable[[Job, float], float | None]:
        """Return the function that ranks a job of this worker, or returns None."""
        return lambda job, now: self.guard.call(lambda: self._asked(job, urgency, now))

    def _asked(self, job: Job, urgency: Urgency, now: float) -> float:
        prompt = Prompt(
            request_id=job.assign.request_id,
            prompt_tokens=job.sequence.num_tokens,
            cached_tokens=urgency.cached(job),
            generated_tokens=len(job.assign.emitted),
            asked_s=job.asked,
            waited_s=max(0.0, now - job.asked),
            deadline_s=job.deadline - now,
            slo_ttft_s=urgency.limit(job),
            seconds_per_token=urgency.pace.seconds_per_token,
        )
        rank = self._order.rank(prompt)
        if not isinstance(rank, int | float) or math.isnan(rank):
            raise ExtensionError(f"rank() returned {rank!r:.80}, which is no number")
        return float(rank)
