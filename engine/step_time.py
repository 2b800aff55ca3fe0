"""How long a step will take, learned from the steps before: what tells slow from hung.

Sizes are grouped by powers of two. A size not seen yet is predicted from the nearest smaller
one as if time grew in proportion (it grows more slowly), else from the nearest larger one.
Predictions are for patience, so they follow a slow step at once and a quick one slowly.
"""

from __future__ import annotations

UNKNOWN_S = 60.0
"""Prediction before anything was measured."""
FORGET = 0.1
"""Share of the distance to a quicker step a prediction moves."""


class StepTime:
    """Predicts seconds from tokens."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[int, float]] = {}  # size group -> tokens, seconds

    def learn(self, tokens: int, seconds: float) -> None:
        """A step of ``tokens`` tokens took ``seconds``."""
        group = tokens.bit_length()
        known = self._seconds.get(group)
        if known is not None and seconds < known[1]:
            seconds = known[1] + FORGET * (seconds - known[1])
        self._seconds[group] = (tokens, seconds)

    def predict(self, tokens: int) -> float:
        """Seconds a step of ``tokens`` tokens may take."""
        group = tokens.bit_length()
        smaller = [g for g in self._seconds if g <= group]
        if smaller:
            seen, seconds = self._seconds[max(smaller)]
            return seconds * max(1.0, tokens / max(seen, 1))
        larger = min(self._seconds, default=None)
        return UNKNOWN_S if larger is None else self._seconds[larger][1]
