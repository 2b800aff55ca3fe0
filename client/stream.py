"""One request on the client: its state, and the messages that continue it after a loss.

Invariant: tokens are accepted only at ``position == next``. So the user gets each token once and
in order, whichever worker or router sends it, and however often.

::

    PENDING --Submitted--> OPEN --gap, reconnect--> RESUMING --Submitted, tokens--> OPEN
       |                     |                          |
       +---------------------+------- Stop -------------+---> STOPPING
"""

from __future__ import annotations

from enum import Enum

from ..proto.limits import MAX_DEADLINE_S
from ..proto.wire.messages import Cancel, Message, Resume, Submit, Terminal, TokenRun
from .events import NewTokens, RequestSpec

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 4.0
FIRST_DOUBT_S = 10.0
LAST_DOUBT_S = 60.0
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


class Stream:
    """One request: its tokens so far, its state, and its timers."""

    def __init__(self, spec: RequestSpec, serial: int, now: float) -> None:
        self.spec = spec
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
        self.asked_at = now  # time of the first unanswered message, or of the last tokens since
        self.stop_until = 0.0
        self.turned_away = 0  # number of rejections by routers that were shutting down
        self.retry_at = now
        self._backoff = FIRST_RETRY_S
        self._said_at = now  # time of the last message that needs an answer
        self._asked = -1  # position of the last Resume
        self._doubt_at = now + FIRST_DOUBT_S
        self._doubt = FIRST_DOUBT_S

    # ------------------------------------------------------------------ received messages

    def take(self, run: TokenRun, now: float) -> NewTokens | None:
        """Return the new tokens of ``run``, or None if it has no new tokens or follows a gap.

        Only the position counts, not the attempt number: a restarted router counts attempts from
        the start.
        """
        skip = self.next - run.position
        if not 0 <= skip < len(run.tokens):
            return None
        self.attempt = max(self.attempt, run.attempt)
        tokens = run.tokens[skip:] if skip else run.tokens
        logprobs = run.logprobs[skip:] if run.logprobs is not None else None
        fresh = NewTokens(self.spec.request_id, self.next, tokens, logprobs)
        self.next += len(tokens)
        self.emitted += tokens
        self.asked_at = now
        self._doubt = FIRST_DOUBT_S
        self._doubt_at = now + FIRST_DOUBT_S
        return fresh

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

    # ------------------------------------------------------------------ messages to send

    def repeat(self, now: float) -> Message | None:
        """Return the message to send or repeat in this state, and schedule the next repetition."""
        if self.state is State.OPEN:
            return self._doubted(now)
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
            self.asked_at = now
        self.state = State.RESUMING if self.secret else State.PENDING

    def _doubted(self, now: float) -> Message | None:
        """Resume an open request without tokens for long.

        A delayed Submitted may have opened the request after the router dropped it.
        """
        if now < self._doubt_at:
            return None
        self._doubt = min(2 * self._doubt, LAST_DOUBT_S)
        self._doubt_at = now + self._doubt
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
        )
