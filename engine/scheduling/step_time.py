"""Predicts the duration of a step from earlier steps, to distinguish slow steps from hung ones.

Sizes are grouped by powers of two. The duration of a new size is predicted from the nearest smaller
size, in proportion (real durations grow more slowly), but it is never longer than the longer of its
two neighbours. Without a smaller size it is that of the nearest larger size.
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
        below = max((g for g in self._seconds if g <= group), default=None)
        above = min((g for g in self._seconds if g > group), default=None)
        if below is None:
            return UNKNOWN_S if above is None else self._seconds[above][1]
        seen, seconds = self._seconds[below]
        predicted = seconds * max(1.0, tokens / max(seen, 1))
        if above is None:
            return predicted
        # One stall in a small step must not multiply: a hang would go unnoticed for minutes.
        return min(predicted, max(seconds, self._seconds[above][1]))
