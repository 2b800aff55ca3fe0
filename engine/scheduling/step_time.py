"""What earlier steps show about the next: how long it may take, and how many tokens it may have.

The cost of a step depends on the model, the machine and its load, so it is learned. Pure: durations
are passed in.
"""

from __future__ import annotations

UNKNOWN_S = 60.0
"""Prediction before the first measurement, seconds."""
FORGET = 0.1
"""Fraction by which a prediction moves towards a faster step."""
GRAIN = 16
"""Budgets are multiples of this number, because kernels work on tiles of rows."""
LEAST = 32
"""Smallest budget: with fewer rows, reading the weights dominates."""
FIRST = 64
"""Budget before the first measurement."""
_NEW = 0.25
_UNBOUNDED = 1 << 62


class StepTime:
    """Predicts seconds from the number of tokens, to distinguish slow steps from hung ones.

    Sizes are grouped by powers of two. The duration of a new size is predicted from the nearest
    smaller size, in proportion (real durations grow more slowly), but it is never longer than the
    longer of its two neighbours. Without a smaller size it is that of the nearest larger size.
    Predictions are used for timeouts, so they follow a slow step at once and a fast step slowly.
    The first step of a size is an exception: it may include the capture of a GPU's launches, so it
    is learned as no slower than smaller sizes predict.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[int, float]] = {}  # size group -> tokens, seconds

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn that a step of ``tokens`` tokens took ``seconds``."""
        group = tokens.bit_length()
        known = self._seconds.get(group)
        if known is None and any(smaller < group for smaller in self._seconds):
            seconds = min(seconds, self.predict(tokens))
        elif known is not None and seconds < known[1]:
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


class ChunkBudget:
    """The prompt token budget of the next step, chosen so that a step takes its target time.

    Long steps delay others: a cancelled request keeps its blocks until its step ends, and in a
    decode worker every request waits for the step. Generated tokens do not depend on how a prompt
    is cut into chunks (``docs/architecture.md``, Determinism).

    ``most``: maximum tokens, 0 = unlimited. ``seconds``: target duration of a step, 0 = none.
    Invariant: with a target, the budget at most doubles from one step to the next.
    """

    def __init__(self, most: int = 0, seconds: float = 0.0) -> None:
        self._most = most or _UNBOUNDED
        self._seconds = seconds
        self._per_token = 0.0
        self.tokens = min(self._most, FIRST) if seconds else self._most

    def learn(self, tokens: int, seconds: float, rows: int = 0) -> None:
        """Learn from a step that took ``seconds``.

        ``tokens``: of prompts and decode rows; ``rows``: the latter, for which the next step needs
        a part of its time too.
        A small step within the target time is ignored: its tokens cause little of its time.
        """
        if not self._seconds or tokens <= 0:
            return
        if 2 * tokens < self.tokens and seconds <= self._seconds:
            return
        rate = seconds / tokens
        known = self._per_token
        self._per_token = known + _NEW * (rate - known) if known else rate
        fitting = self._most
        if self._per_token > 0:
            fitting = (int(self._seconds / self._per_token) - rows) // GRAIN * GRAIN
        self.tokens = min(self._most, max(LEAST, min(fitting, 2 * self.tokens)))
