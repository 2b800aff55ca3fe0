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


class PrefillRate:
    """Prompt tokens a prefill worker computes per second, measured while all have enough to do.

    Light traffic says nothing of what workers can do, so only time counts in which every one
    has its next steps waiting. Cancelled requests make the rate look higher, never lower.
    """

    WINDOW_S = 10.0
    ENOUGH_TOKENS = 2048
    """Prompt tokens per prefill worker, waiting or computed, that keep its steps full."""
    MEASURED_S = 1.0
    """Shortest time a rate is believed after."""
    KEEP_S = 60.0
    """Longest time it is believed without a new measurement."""

    def __init__(self) -> None:
        self._since: float | None = None  # start of what is measured now
        self._tokens = self._seconds = 0.0
        self._until = -math.inf

    def queued(self, waiting: int, workers: int, now: float) -> None:
        """More tokens wait, ``waiting`` altogether, for ``workers`` prefill workers."""
        if self._since is None and self._enough(waiting, workers):
            self._since = now

    def computed(self, tokens: int, waiting: int, workers: int, now: float) -> None:
        """A prompt of ``tokens`` has its first token, ``waiting`` are left."""
        if self._since is not None and workers:
            elapsed = now - self._since
            keep = math.exp(-elapsed / self.WINDOW_S)
            self._tokens = self._tokens * keep + tokens / workers
            self._seconds = self._seconds * keep + elapsed
            self._until = now + self.KEEP_S
        self._since = now if self._enough(waiting, workers) else None

    def interrupted(self) -> None:
        """A prompt left uncomputed: what was done for it is unknown."""
        self._since = None

    def seconds(self, tokens: int, workers: int, now: float) -> float:
        """How long ``workers`` take for ``tokens``; 0 while that is not known."""
        known = self._seconds >= self.MEASURED_S and now < self._until and self._tokens > 0
        return tokens * self._seconds / (self._tokens * workers) if known and workers else 0.0

    def _enough(self, waiting: int, workers: int) -> bool:
        return waiting >= self.ENOUGH_TOKENS * (workers or 1)


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
        self.prefill = PrefillRate()
        self.refused = 0

    # ------------------------------------------------------------------ in and out

    def admit(
        self, request: Request, slots: int, workers: int, now: float, others: int = 0
    ) -> None:
        """Charge a new request; raises CapacityError when a cap or its deadline would be passed.

        ``slots``: batch slots of the ready decode workers, ``workers``: ready prefill workers;
        0 when unknown. ``others``: requests that other routers have on the decode workers.
        """
        size = self._fitting(request)
        self._check_queue(request, slots, others)
        self._check_wait(request, workers, now)
        self._charge(request, size, workers, now)

    def admit_resumed(self, request: Request, workers: int, now: float) -> None:
        """Charge a request that was admitted before, so only memory can refuse it."""
        self._charge(request, self._fitting(request), workers, now)

    def _charge(self, request: Request, size: int, workers: int, now: float) -> None:
        request.bytes = size
        self.context_bytes += size
        request.queued_tokens = request.base
        self.queued_tokens += request.base
        self.requests += 1
        self.prefill.queued(self.queued_tokens, workers, now)

    def started(self, request: Request, workers: int, now: float) -> None:
        """Its first token was seen: the prompt waits no more."""
        self.queued_tokens -= request.queued_tokens
        self.prompt_tokens.add(request.queued_tokens)
        self.prefill.computed(request.queued_tokens, self.queued_tokens, workers, now)
        request.queued_tokens = 0

    def end(self, request: Request) -> None:
        """It has its terminal."""
        self.requests -= 1
        if request.queued_tokens:
            self.prefill.interrupted()
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

    def _check_queue(self, request: Request, slots: int, others: int) -> None:
        config = self._config
        cap = config.max_requests
        if slots and config.requests_per_slot:
            all_routers = math.ceil(slots * config.requests_per_slot)
            cap = min(cap, max(1, slots, all_routers - others))  # each may fill them once
        if self.requests >= cap:
            self._refuse(f"{self.requests} requests are in flight")
        # A single prompt longer than the cap must still be served when nothing waits.
        if self.queued_tokens and self.queued_tokens + request.base > config.max_queued_tokens:
            self._refuse(f"{self.queued_tokens} prompt tokens are queued")

    def _fitting(self, request: Request) -> int:
        """Bytes the request may take, once there is memory for them."""
        size = context_bytes(request.context)
        if self.context_bytes + size > self._config.max_context_bytes:
            self._refuse("no memory for further contexts")
        return size

    def _check_wait(self, request: Request, workers: int, now: float) -> None:
        """Refuse what would reach its deadline before its prompt is begun.

        The backlog is counted for all prefill workers together, so a request that is bound to
        some of them is left to its luck.
        """
        wait = self.prefill.seconds(self.queued_tokens, workers, now)
        left = request.deadline - now
        if wait <= left:
            return
        pinned = request.pin is not None and request.pin[0] == "prefill"
        if request.pool is None and not pinned:
            text = f"{self.queued_tokens} prompt tokens wait for about {wait:.1f} s"
            self._refuse(f"{text}, and the deadline is in {left:.1f} s", wait - left)

    def _refuse(self, reason: str, least: float = 0.0) -> None:
        """``least``: seconds before which another try would meet the same."""
        self.refused += 1
        hint = max(self.retry_after(), min(least, self._config.max_retry_s))
        raise CapacityError(f"overloaded: {reason}", retry_after=hint)


def check_deadline(asked: float | None, default: float, longest: float) -> float:
    """Seconds a request has; raises for one that is over already or is no number."""
    seconds = default if asked is None else asked
    if math.isnan(seconds):
        raise InputError("deadline is not a number")
    if seconds <= 0:
        raise DeadlineExceeded(f"the deadline was over {-seconds:g} s before the request came")
    return min(seconds, longest)
