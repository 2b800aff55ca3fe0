"""Admission: limits on requests, queued prompt tokens and memory, and the retry delay.

Invariant: the three counters equal the sums over all records, and no admission raises a counter
above its limit. So the router's memory is bounded for any input and for slow readers. A rejection
is immediate and carries a retry delay computed from the recent throughput.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.proto.errors import CapacityError, DeadlineExceeded, InputError
from baton.proto.prompt_log_probs import records_bytes
from baton.proto.wire.wire_context import WireContext
from baton.proto.work import Work, work_of

from .config import AdmissionConfig
from .records import Request

RECORD_BYTES = 2048
"""Memory of a record without its arrays, rounded up."""
_BIAS_BYTES = 160  # an entry of a dict, a number and an id
_FIELDS_FACTOR = 16
"""Memory of a map's fields by its encoded bytes: a number of one byte becomes an object."""


class Meter:
    """Exponentially weighted mean of events per second.

    ``new``: events since the last :meth:`roll`; the path of a request adds to it.
    """

    __slots__ = ("_at", "new", "rate", "total")

    WINDOW_S = 10.0

    def __init__(self, now: float) -> None:
        self._at = now
        self.new = 0
        self.rate = 0.0
        self.total = 0

    def roll(self, now: float) -> None:
        """Update the rate with the events counted since the last call."""
        elapsed = now - self._at
        if elapsed <= 0:
            return
        keep = math.exp(-elapsed / self.WINDOW_S)
        self.rate = self.rate * keep + (self.new / elapsed) * (1 - keep)
        self.total += self.new
        self.new = 0
        self._at = now


class PrefillRate:
    """Prompt tokens per second and prefill worker, measured while all workers are saturated.

    Light traffic does not show the capacity, so only time with a backlog for every worker counts.
    Cancelled requests can raise the measured rate, never lower it.
    """

    WINDOW_S = 10.0
    ENOUGH_TOKENS = 2048
    """Unfinished prompt tokens per prefill worker that count as saturation."""
    MEASURED_S = 1.0
    """Seconds of saturation before the rate is used."""
    KEEP_S = 60.0
    """Seconds for which the last measurement stays valid."""

    def __init__(self) -> None:
        self.since: float | None = None
        """Start of the current interval; None while some worker has no backlog."""
        self.measured_s = 0.0
        """Seconds of saturation that were measured, weighted."""
        self._tokens = 0.0
        self._until = -math.inf

    def queued(self, waiting: int, workers: int, now: float) -> None:
        """Note that the backlog grew to ``waiting`` tokens for ``workers`` prefill workers."""
        if self.since is None and self._enough(waiting, workers):
            self.since = now

    def computed(self, tokens: int, waiting: int, workers: int, now: float) -> None:
        """Note that a prompt of ``tokens`` was computed; ``waiting`` tokens are left."""
        if self.since is not None and workers:
            elapsed = now - self.since
            keep = math.exp(-elapsed / self.WINDOW_S)
            self._tokens = self._tokens * keep + tokens / workers
            self.measured_s = self.measured_s * keep + elapsed
            self._until = now + self.KEEP_S
        self.since = now if self._enough(waiting, workers) else None

    def interrupted(self) -> None:
        """End the interval: a prompt left the queue, and how much of it was computed is unknown."""
        self.since = None

    def seconds(self, tokens: int, workers: int, now: float) -> float:
        """Return the seconds that ``workers`` need for ``tokens``, 0 if the rate is unknown."""
        if self.measured_s < self.MEASURED_S or now >= self._until or not workers:
            return 0.0
        return tokens * self.measured_s / (self._tokens * workers) if self._tokens > 0 else 0.0

    def _enough(self, waiting: int, workers: int) -> bool:
        return waiting >= self.ENOUGH_TOKENS * (workers or 1)


class Admission:
    """Charges admitted requests against the limits."""

    def __init__(self, config: AdmissionConfig, now: float) -> None:
        self._config = config
        self.requests = 0  # admitted and unfinished
        self.queued_tokens = 0  # prompt tokens of requests without a first token
        self.queued_encoded = 0  # the part of queued_tokens that encoders compute
        self.encoded = 0  # of the prompts of all requests admitted here
        self.queued_encoder_tokens = 0  # that encoders read for queued requests
        self.encoder_tokens = 0  # of all requests admitted here
        self.file_rows = 0  # rows of the steps of all files admitted here
        self.context_bytes = 0  # of all records, also of ended requests
        self.ended = Meter(now)
        self.prompt_tokens = Meter(now)
        self.tokens = Meter(now)
        self.prefill = PrefillRate()
        self.refused = 0

    # ------------------------------------------------------------------ in and out

    def admit(
        self, request: Request, slots: int, workers: int, now: float, others: int = 0
    ) -> None:
        """Charge a new request.

        ``slots``: batch slots of the ready decode workers; ``workers``: number of ready prefill
        workers (0 = unknown for both). ``others``: requests of other routers on the decode
        workers. Raises CapacityError if the request exceeds a limit or cannot meet its deadline.
        """
        size = self._fitting(request)
        config, requests, tokens = self._config, self.requests, self.queued_tokens
        idle = (requests < slots or not slots) and requests < config.max_requests
        if not idle or tokens + request.base > config.max_queued_tokens:
            self._check_queue(request, slots, others)
        if self.prefill.measured_s >= PrefillRate.MEASURED_S:
            self._check_wait(request, workers, now)
        self._charge(request, size, workers, now)
        work = request.work
        if work.file:
            self.file_rows += request.rows_left
        self.encoded += work.encoded
        self.encoder_tokens += work.encoder

    def admit_resumed(self, request: Request, workers: int, now: float) -> None:
        """Charge a resumed request. It was admitted once, so only the memory limit applies."""
        self._charge(request, self._fitting(request), workers, now)

    def _charge(self, request: Request, size: int, workers: int, now: float) -> None:
        request.bytes = size
        self.context_bytes += size
        request.queued_tokens = tokens = request.base
        self.queued_tokens += tokens
        work = request.work
        self.queued_encoded += work.encoded
        self.queued_encoder_tokens += work.encoder
        self.requests += 1
        if self.prefill.since is None and self.queued_tokens >= PrefillRate.ENOUGH_TOKENS:
            self.prefill.queued(self.queued_tokens, workers, now)

    def started(self, request: Request, workers: int, now: float) -> None:
        """Note the first token: the prompt leaves the queue."""
        tokens, request.queued_tokens = request.queued_tokens, 0
        if tokens:
            self.queued_encoded -= request.work.encoded
            self.queued_encoder_tokens -= request.work.encoder
        self.queued_tokens -= tokens
        self.prompt_tokens.new += tokens
        if self.prefill.since is not None or self.queued_tokens >= PrefillRate.ENOUGH_TOKENS:
            self.prefill.computed(tokens, self.queued_tokens, workers, now)

    def end(self, request: Request) -> None:
        """Uncharge an ended request, except for its memory."""
        self.requests -= 1
        if request.queued_tokens:
            self.prefill.interrupted()
            self.queued_tokens -= request.queued_tokens
            self.queued_encoded -= request.work.encoded
            self.queued_encoder_tokens -= request.work.encoder
            request.queued_tokens = 0
        self.ended.new += 1

    def forget(self, request: Request) -> None:
        """Uncharge the memory of a dropped record."""
        self.context_bytes -= request.bytes
        request.bytes = 0

    def recount(self, requests: Iterable[Request]) -> None:
        """Make all sums again from the records, after an error has left them unfinished."""
        self.requests = self.context_bytes = self.queued_tokens = 0
        self.queued_encoded = self.queued_encoder_tokens = 0
        for request in requests:
            self.context_bytes += request.bytes
            if request.done:
                request.queued_tokens = 0
                continue
            self.requests += 1
            if request.queued_tokens:
                self.queued_tokens += request.queued_tokens
                self.queued_encoded += request.work.encoded
                self.queued_encoder_tokens += request.work.encoder
        self.prefill.interrupted()

    def roll(self, now: float) -> None:
        """Update the rates; call about once a second."""
        for meter in (self.ended, self.prompt_tokens, self.tokens):
            meter.roll(now)

    # ------------------------------------------------------------------ refusals

    def retry_after(self) -> float:
        """Return the retry delay in seconds: the time in which half of the backlog drains."""
        config = self._config
        waits = [config.min_retry_s]
        if self.ended.rate > 0:
            waits.append(self.requests / self.ended.rate / 2)
        if self.prompt_tokens.rate > 0:
            waits.append(self.queued_tokens / self.prompt_tokens.rate / 2)
        if self.requests and self.ended.rate == 0:
            waits.append(1.0)
        return min(config.max_retry_s, max(waits))

    def limit(self, slots: int, others: int = 0) -> int:
        """Return the most unfinished requests of this router; see :meth:`admit`."""
        config = self._config
        if not slots or not config.requests_per_slot:
            return config.max_requests
        all_routers = math.ceil(slots * config.requests_per_slot)
        # Each router may fill the slots once.
        return min(config.max_requests, max(1, slots, all_routers - others))

    def _check_queue(self, request: Request, slots: int, others: int) -> None:
        config = self._config
        cap = config.max_requests if self.requests < slots else self.limit(slots, others)
        if self.requests >= cap:
            self._refuse(f"{self.requests} requests are in flight, {self._why(cap, slots)}")
        # With an empty queue, a prompt above the limit must still be served.
        if self.queued_tokens and self.queued_tokens + request.base > config.max_queued_tokens:
            self._refuse(f"{self.queued_tokens} prompt tokens are queued")

    def _why(self, limit: int, slots: int) -> str:
        """Return the limit and the option that sets it."""
        each = self._config.requests_per_slot
        if limit == self._config.max_requests:
            return f"limit {limit} per router"
        if limit < math.ceil(slots * each):
            return f"limit {limit} beside the requests of other routers"
        return f"limit {limit} = {each:g} x {slots} batch slots (--max-num-seqs of decode workers)"

    def _fitting(self, request: Request) -> int:
        """Return the most bytes the request may take; raises CapacityError above the limit."""
        size = context_bytes(request.context, request.work) + request.media_bytes
        if self.context_bytes + size > self._config.max_context_bytes:
            self._refuse("memory for contexts is full")
        return size

    def _check_wait(self, request: Request, workers: int, now: float) -> None:
        """Reject a request whose deadline would pass in the prefill queue.

        The backlog is known only for all prefill workers together. So a request that is pinned to
        a prefill worker or to a pool is not checked.
        """
        wait = self.prefill.seconds(self.queued_tokens, workers, now)
        left = request.deadline - now
        if wait <= left:
            return
        pinned = request.pin is not None and request.pin[0] == "prefill"
        if request.pool is None and not pinned:
            text = f"{self.queued_tokens} prompt tokens wait for about {wait:.1f} s"
            self._refuse(f"{text}, the deadline is in {left:.1f} s", wait - left)

    def _refuse(self, reason: str, least: float = 0.0) -> None:
        """Raise CapacityError. ``least``: seconds for which a retry would fail in the same way."""
        self.refused += 1
        hint = max(self.retry_after(), min(least, self._config.max_retry_s))
        raise CapacityError(
            f"overloaded: {reason}; retry in {round(hint, 1):g} s", retry_after=hint
        )


def check_deadline(asked: float | None, default: float, longest: float) -> float:
    """Return the seconds until the deadline: ``asked``, or ``default``, at most ``longest``.

    Raises InputError for NaN and DeadlineExceeded for a deadline in the past.
    """
    seconds = default if asked is None else asked
    if 0.0 < seconds <= longest:  # also false for NaN
        return seconds
    if math.isnan(seconds):
        raise InputError("deadline is not a number")
    if seconds <= 0:
        raise DeadlineExceeded(f"the deadline passed {abs(seconds):g} s before the request arrived")
    return longest


def context_bytes(context: WireContext, work: Work | None = None) -> int:
    """Return an upper bound, in bytes, of a request's memory until its end.

    ``work``: the context's work, if it is known.
    """
    work = work or work_of(context)
    likely, sampling = context.log_probabilities, context.sampling
    total = RECORD_BYTES + context.tokens.array.nbytes + 4 * work.tokens + work.result_bytes
    if likely > 0:
        total += (128 + 12 * likely) * work.tokens
    if context.log_probabilities_echo:
        total += records_bytes(len(context.tokens.array), max(0, likely))
    total += 40 * len(context.eos_token_ids)
    if type(context) is not WireContext and context.packed is not None:
        body, arrays = context.packed
        total += _FIELDS_FACTOR * len(body) + sum(map(len, arrays))
    for sequence in context.eos_sequences:
        total += 96 + 40 * len(sequence)
    if context.json_schema is not None:
        total += 4 * len(context.json_schema)
    if sampling.stop:
        total += sum(49 + 4 * len(text) for text in sampling.stop)
    if sampling.logit_bias:
        total += _BIAS_BYTES * len(sampling.logit_bias)
    return total
