"""Predicts the duration of a step from earlier steps, to distinguish slow steps from hung ones.

Sizes are grouped by powers of two. The duration of a new size is predicted from the nearest smaller
size, in proportion (real durations grow more slowly), else from the nearest larger size.
Predictions are used for timeouts, so they follow a slow step at once and a fast step slowly.
"""

from __future__ import annotations

UNKNOWN_S = 60.0
"""Prediction before the first measurement, seconds."""
FORGET = 0.1
"""Fraction by which a prediction moves towards a faster step."""


class StepTime:
    """Predicts seconds from the number of tokens."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[int, float]] = {}  # size group -> tokens, seconds

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn that a step of ``tokens`` tokens took ``seconds``."""
        group = tokens.bit_length()
        known = self._seconds.get(group)
        if known is not None and seconds < known[1]:
            seconds = known[1] + FORGET * (seconds - known[1])
        self._seconds[group] = (tokens, seconds)

    def predict(self, tokens: int) -> float:
        """Return the seconds that a step of ``tokens`` tokens may take."""
        group = tokens.bit_length()
        smaller = [g for g in self._seconds if g <= group]
        if smaller:
            seen, seconds = self._seconds[max(smaller)]
            return seconds * max(1.0, tokens / max(seen, 1))
        larger = min(self._seconds, default=None)
        return UNKNOWN_S if larger is None else self._seconds[larger][1]
