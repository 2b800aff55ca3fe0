"""The client's record of one request, and the messages that continue it after a loss. Pure.

Invariants:

- A request accepts tokens only at ``position == next``. So the user gets each token once and in
  order, whichever worker or router sends it, and however often.
- An unanswered message is repeated until the answer, the deadline, or a timeout of the router.

::

    PENDING --Submitted--> OPEN --gap, reconnect--> RESUMING --Submitted, tokens--> OPEN
       |                     |                          |
       +---------------------+------- Stop -------------+---> STOPPING
"""

from __future__ import annotations

from enum import Enum

from baton.proto.limits import MAX_DEADLINE_S
from baton.proto.wire.messages import (
    Cancel,
    Message,
    Resume,
    Submit,
    Terminal,
    TokenRun,
)

from .events import NewTokens, RequestSpec

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 4.0
FIRST_WAIT_S = 0.05
"""Shortest delay of a request that was refused for lack of room."""
FIRST_DOUBT_S = 10.0
LAST_DOUBT_S = 60.0
MOST_PATIENCE = 10.0
"""Longest growth of a refused request's delay, as a factor of the delay that the router asks for.
"""
"""Seconds without tokens before an open request is resumed: the router may have dropped it."""
DEADLINE_GRACE_S = 2.0
"""Seconds after the deadline when the client ends a request that the router has not ended."""
STOP_GRACE_S = 0.03
"""Seconds for a request to end by itself before a Cancel, if its end is reported to the user."""
STOP_PATIENCE_S = 2.0
"""Seconds to wait for the end of a cancelled request."""


class State(Enum):
    """State of a request."""

    PENDING = "pending"  # submitted, not answered
    OPEN = "open"
    RESUMING = "resuming"  # Resume from ``next`` sent, not answered
    STOPPING = "stopping"  # cancelled by the user


class Request:
    """One request: its tokens so far, its state, and its timers."""

    __slots__ = (
        "_asked", "_asked_at", "_backoff", "_doubt", "_doubt_from", "_said_at", "_took_at",
        "attempt", "deadline_at", "emitted", "ends_by", "key", "next", "refusals", "report",
        "request_id", "retry_at", "secret", "serial", "spec", "started", "state", "stop_until",
        "terminal", "turned_away", "waits",
    )  # fmt: skip

    def __init__(self, spec: RequestSpec, serial: int, now: float) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.serial = serial  # unique in this client, unlike request ids, which may be reused
        self.state = State.PENDING
        self.started = now
        self.next = len(spec.context.tokens)
        self.emitted: list[int] = []
        self.attempt = 0
        self.key = b""
        self.secret = b""
        self.terminal: Terminal | None = None  # came before the last tokens
        self.report = True
        self.deadline_at = None if spec.deadline is None else now + spec.deadline
        # Without a deadline, the router applies its own, which is at most MAX_DEADLINE_S.
        self.ends_by = now + (MAX_DEADLINE_S if spec.deadline is None else spec.deadline)
        self._asked_at = now  # time of the first unanswered message
        self.stop_until = 0.0
        self.turned_away = 0  # number of rejections by routers that were shutting down
        self.refusals = 0  # for lack of room
        self.waits = False  # for room
        self.retry_at = now
        self._backoff = FIRST_RETRY_S
        self._said_at = now  # time of the last message that needs an answer
        self._asked = -1  # position of the last Resume
        self._took_at = now  # arrival of the last tokens
        self._doubt_from = now
        self._doubt = FIRST_DOUBT_S

    # ------------------------------------------------------------------ received messages

    def take(self, run: TokenRun, now: float) -> NewTokens | None:
        """Return the new tokens of ``run``, or None if it has no new tokens or follows a gap.

        Only the position counts, not the attempt number: a restarted router counts attempts from
        the start.
        """
        tokens, logprobs, position = run.tokens, run.logprobs, self.next
        if run.position != position:
            skip = position - run.position
            if not 0 <= skip < len(tokens):
                return None
            tokens = tokens[skip:]
            logprobs = logprobs and logprobs[skip:]
        elif not tokens:
            return None
        if run.attempt > self.attempt:
            self.attempt = run.attempt
        self.next = position + len(tokens)
        self.emitted += tokens
        self._took_at = now
        return NewTokens(self.request_id, position, tokens, logprobs, run.media)

    @property
    def asked_at(self) -> float:
        """Time of the first unanswered message, or of the last tokens since."""
        return max(self._asked_at, self._took_at)

    def misses(self, run: TokenRun) -> bool:
        """Whether tokens before ``run`` are missing."""
        return run.position > self.next

    def opened(self, key: bytes, secret: bytes, attempt: int) -> None:
        """Handle Submitted: the router accepted the request."""
        self.key, self.secret = key, secret
        # After a repeated Submit, a restarted router counts attempts from the start.
        pending = self.state is State.PENDING
        self.attempt = attempt if pending else max(self.attempt, attempt)
        if self.state in (State.PENDING, State.RESUMING):
            self.state = State.OPEN
            self._backoff = FIRST_RETRY_S

    def stop(self, now: float, *, report: bool) -> None:
        """Cancel the request. ``report``: report its end to the user."""
        self.state = State.STOPPING
        self.report = report
        self.stop_until = now + STOP_PATIENCE_S
        self._backoff, self._said_at = FIRST_RETRY_S, float("inf")
        # At a stop string, most workers end the request by themselves: wait for that status first.
        self.retry_at = now + STOP_GRACE_S if report else now

    def wait_for_room(self, retry_after: float, serial: int, now: float) -> None:
        """Submit the request again later, under another key: the router refused it.

        The delay grows with each refusal, and differs between requests refused at once.
        """
        self.refusals += 1
        self.serial, self.secret, self.attempt, self.terminal = serial, b"", 0, None
        self.state, self.waits = State.PENDING, True
        growth = min(1.5 ** (self.refusals - 1), MOST_PATIENCE) * (1 + _spread(serial) / 2)
        self.retry_at = self._asked_at = now + max(retry_after, FIRST_WAIT_S) * growth
        self._said_at = float("inf")  # a Pong does not repeat it
        self._backoff = FIRST_RETRY_S

    # ------------------------------------------------------------------ messages to send

    def repeat(self, now: float) -> Message | None:
        """Return the message to send or repeat in this state, and schedule the next repetition."""
        if self.state is State.OPEN:
            return self._doubted(now)
        self.waits = False
        self._said_at = now
        self.retry_at = now + self._backoff
        self._backoff = min(2 * self._backoff, LAST_RETRY_S)
        if self.state is State.STOPPING:
            return self.cancel()
        return self._resume(now) if self.secret else self._submit(now)

    def unheard(self, since: float, now: float) -> Message | None:
        """Return the message to repeat after the router answered a ping sent at ``since``.

        The router answers in order. If this request's message was sent before the ping and has no
        answer, the message or its answer was lost.
        """
        if self.state is State.OPEN or self._said_at >= since:
            return None
        self._backoff = FIRST_RETRY_S
        return self.repeat(now)

    def cancel(self) -> Cancel:
        """Make the message that cancels the request at the router."""
        return Cancel(
            request_id=self.spec.request_id,
            request=self.key,
            serial=self.serial,
            secret=self.secret,
        )

    def resume(self, now: float) -> Message | None:
        """Request the tokens from ``next`` on. None if that was requested recently."""
        asked_lately = now < self.retry_at and self._asked == self.next
        if self.state is State.STOPPING or asked_lately:
            return None
        self._asked = self.next
        self._ask_again(now)
        return self.repeat(now)

    @property
    def unanswered(self) -> bool:
        """Whether the router has neither accepted nor rejected the last Submit or Resume."""
        return self.state in (State.PENDING, State.RESUMING)

    def _ask_again(self, now: float) -> None:
        if not self.unanswered:
            self._asked_at = now
        self.state = State.RESUMING if self.secret else State.PENDING

    def _doubted(self, now: float) -> Message | None:
        """Resume an open request without tokens for long.

        A delayed Submitted may have opened the request after the router dropped it.
        """
        if self._took_at > self._doubt_from:
            self._doubt_from, self._doubt = self._took_at, FIRST_DOUBT_S
        if now < self._doubt_from + self._doubt:
            return None
        self._doubt = min(2 * self._doubt, LAST_DOUBT_S)
        self._doubt_from = now
        return self.resume(now)

    def reconnected(self, now: float) -> Message | None:
        """Return the first message on a new connection, or None."""
        if self.state is State.STOPPING:
            return None  # the router cancelled it with the old connection
        self._backoff = FIRST_RETRY_S
        self._ask_again(now)
        return self.repeat(now)

    def _remaining(self, now: float) -> float | None:
        # Never zero, which the router rejects. With a tiny deadline, the router ends the request.
        return None if self.deadline_at is None else max(self.deadline_at - now, 0.001)

    def _submit(self, now: float) -> Submit:
        spec = self.spec
        return Submit(
            request_id=spec.request_id,
            context=spec.context,
            deadline=self._remaining(now),
            pool=spec.pool,
            pin=spec.pin,
            fallback=spec.fallback,
            serial=self.serial,
            gateway=spec.gateway,
            traceparent=spec.traceparent,
            whole=spec.whole,
            slo_ttft=spec.slo_ttft,
            slo_itl=spec.slo_itl,
            refusals=self.refusals,
        )

    def _resume(self, now: float) -> Resume:
        spec = self.spec
        return Resume(
            request_id=spec.request_id,
            request=self.key,
            secret=self.secret,
            position=self.next,
            attempt=self.attempt,
            context=spec.context,
            emitted=list(self.emitted),
            deadline=self._remaining(now),
            pool=spec.pool,
            pin=spec.pin,
            fallback=spec.fallback,
            gateway=spec.gateway,
            traceparent=spec.traceparent,
            slo_ttft=spec.slo_ttft,
            slo_itl=spec.slo_itl,
        )


def _spread(number: int) -> float:
    """Return a share in [0, 1) that differs much between numbers that follow each other."""
    return number * 0.6180339887 % 1
