"""What the router takes on, and how long a refused client should wait.

Invariant: the three counters equal the sums over all records, and none passes its cap by an
admission; so the router's memory is bounded whatever clients send and however slowly they
read. A refusal happens at once and carries a hint from the throughput seen lately.
"""

from __future__ import annotations

import math

from ..proto.errors import CapacityError, DeadlineExceeded, InputError
from .config import AdmissionConfig
from .request import Request, context_bytes


class Meter:
    """Events per second over the last seconds, as an exponentially weighted mean."""

    __slots__ = ("_at", "_count", "rate", "total")

    WINDOW_S = 10.0

    def __init__(self, now: float) -> None:
        self._at = now
        self._count = 0
        self.rate = 0.0
        self.total = 0

    def add(self, amount: int = 1) -> None:
        """Count ``amount`` events."""
        self._count += amount

    def roll(self, now: float) -> None:
        """Fold what was counted since the last call into the rate."""
        elapsed = now - self._at
        if elapsed <= 0:
            return
        keep = math.exp(-elapsed / self.WINDOW_S)
        self.rate = self.rate * keep + (self._count / elapsed) * (1 - keep)
        self.total += self._count
        self._count = 0
        self._at = now


class Admission:
    """Counts what is admitted against its caps."""

    def __init__(self, config: AdmissionConfig, now: float) -> None:
        self._config = config
        self.requests = 0  # admitted and not ended
        self.queued_tokens = 0  # prompt tokens of requests without a first token
        self.context_bytes = 0  # of everything kept, ended requests too
        self.ended = Meter(now)
        self.prompt_tokens = Meter(now)
        self.tokens = Meter(now)
        self.refused = 0

    # ------------------------------------------------------------------ in and out

    def admit(self, request: Request, slots: int, *, resumed: bool = False) -> None:
        """Charge a new request; raises CapacityError when a cap would be passed.

        ``slots``: batch slots of the ready decode workers, 0 when unknown. A ``resumed``
        request was admitted before, so only memory can refuse it.
        """
        needs = context_bytes(request.context)
        if self.context_bytes + needs > self._config.max_context_bytes:
            self._refuse("no memory for further contexts")
        if not resumed:
            self._check_queue(request, slots)
        request.bytes = needs
        self.context_bytes += needs
        request.queued_tokens = request.base
        self.queued_tokens += request.base
        self.requests += 1

    def started(self, request: Request) -> None:
        """Its first token was seen: the prompt waits no more."""
        self.queued_tokens -= request.queued_tokens
        self.prompt_tokens.add(request.queued_tokens)
        request.queued_tokens = 0

    def end(self, request: Request) -> None:
        """It has its terminal."""
        self.requests -= 1
        self.queued_tokens -= request.queued_tokens
        request.queued_tokens = 0
        self.ended.add()

    def forget(self, request: Request) -> None:
        """Its memory is free."""
        self.context_bytes -= request.bytes
        request.bytes = 0

    def roll(self, now: float) -> None:
        """Bring the rates up to date; about once a second is enough."""
        for meter in (self.ended, self.prompt_tokens, self.tokens):
            meter.roll(now)

    # ------------------------------------------------------------------ refusals

    def retry_after(self) -> float:
        """Seconds until a place is likely: the backlog over the rate at which it drains."""
        config = self._config
        waits = [config.min_retry_s]
        if self.ended.rate > 0:
            waits.append(self.requests / self.ended.rate / 2)
        if self.prompt_tokens.rate > 0:
            waits.append(self.queued_tokens / self.prompt_tokens.rate / 2)
        if self.requests and self.ended.rate == 0:
            waits.append(1.0)
        return min(config.max_retry_s, max(waits))

    def _check_queue(self, request: Request, slots: int) -> None:
        config = self._config
        cap = config.max_requests
        if slots and config.requests_per_slot:
            cap = min(cap, max(1, math.ceil(slots * config.requests_per_slot)))
        if self.requests >= cap:
            self._refuse(f"{self.requests} requests are in flight")
        # A single prompt longer than the cap must still be served when nothing waits.
        if self.queued_tokens and self.queued_tokens + request.base > config.max_queued_tokens:
            self._refuse(f"{self.queued_tokens} prompt tokens are queued")

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        raise CapacityError(f"overloaded: {reason}", retry_after=self.retry_after())


def check_deadline(asked: float | None, default: float, longest: float) -> float:
    """Seconds a request has; raises for one that is over already or is no number."""
    seconds = default if asked is None else asked
    if math.isnan(seconds):
        raise InputError("deadline is not a number")
    if seconds <= 0:
        raise DeadlineExceeded(f"the deadline was over {-seconds:g} s before the request came")
    return min(seconds, longest)
