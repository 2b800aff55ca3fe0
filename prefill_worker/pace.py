"""The prefill speed of this worker, learned from its steps."""

from __future__ import annotations

NEW = 0.1
"""Weight of the latest step. A smaller step weighs less, in proportion to the usual step size."""


class Pace:
    """Seconds per prompt token; 0 before the first step."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self._usual = 0.0  # typical number of tokens per step

    def learn(self, tokens: int, seconds: float) -> None:
        """Update the average: a step of ``tokens`` prompt tokens took ``seconds``."""
        if tokens <= 0 or not seconds > 0:
            return
        if not self.seconds_per_token:
            self.seconds_per_token, self._usual = seconds / tokens, float(tokens)
            return
        weight = NEW * min(1.0, tokens / self._usual)
        self._usual += NEW * (tokens - self._usual)
        self.seconds_per_token += weight * (seconds / tokens - self.seconds_per_token)
