"""How many prompt tokens a step may compute, so that it takes about as long as it should.

A request that is cancelled keeps its blocks until the step that computes it is over, and in a
decode worker everybody waits for a step. What a step costs depends on the model, the machine and
who else runs on it, so it is learned from the steps before. Tokens do not depend on how a prompt
is cut (``docs/architecture.md``, Determinism).

Pure: durations come in as arguments.
"""

from __future__ import annotations

GRAIN = 16
"""Budgets are multiples of this: kernels work on tiles of rows."""
LEAST = 32
"""With fewer rows the weights are read for too little work."""
FIRST = 64
"""Before anything was learned."""
_NEW = 0.25
_UNBOUNDED = 1 << 62


class ChunkBudget:
    """Prompt tokens of the next step.

    ``most``: tokens, 0 for no limit. ``seconds``: how long a step should take, 0 for any time.
    Invariant: with a time, the budget at most doubles from one step to the next.
    """

    def __init__(self, most: int = 0, seconds: float = 0.0) -> None:
        self._most = most or _UNBOUNDED
        self._seconds = seconds
        self._per_token = 0.0
        self.tokens = min(self._most, FIRST) if seconds else self._most

    def learn(self, tokens: int, seconds: float) -> None:
        """A step of ``tokens`` tokens, prompt and decode rows together, took ``seconds``.

        A short step says little of a full one: much of its time does not depend on its tokens.
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
