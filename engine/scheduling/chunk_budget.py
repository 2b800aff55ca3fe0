"""The number of prompt tokens per step, chosen so that a step takes its target time.

Long steps delay others: a cancelled request keeps its blocks until its step ends, and in a
decode worker every request waits for the step. The cost of a step depends on the model, the machine
and its load, so it is learned from earlier steps. Generated tokens do not depend on how a prompt
is cut into chunks (``docs/architecture.md``, Determinism).

Pure: durations are passed in.
"""

from __future__ import annotations

GRAIN = 16
"""Budgets are multiples of this number, because kernels work on tiles of rows."""
LEAST = 32
"""Smallest budget: with fewer rows, reading the weights dominates."""
FIRST = 64
"""Budget before the first measurement."""
_NEW = 0.25
_UNBOUNDED = 1 << 62


class ChunkBudget:
    """The prompt token budget of the next step.

    ``most``: maximum tokens, 0 = unlimited. ``seconds``: target duration of a step, 0 = none.
    Invariant: with a target, the budget at most doubles from one step to the next.
    """

    def __init__(self, most: int = 0, seconds: float = 0.0) -> None:
        self._most = most or _UNBOUNDED
        self._seconds = seconds
        self._per_token = 0.0
        self.tokens = min(self._most, FIRST) if seconds else self._most

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn from a step of ``tokens`` tokens (prompt and decode rows) that took ``seconds``.

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
            fitting = int(self._seconds / self._per_token) // GRAIN * GRAIN
        self.tokens = min(self._most, max(LEAST, min(fitting, 2 * self.tokens)))
