"""One request as the client sees it: where its stream stands and how to get it going again.

Invariant: tokens pass only at ``position == next``, so the user sees each once and in order,
whichever worker or router sends them, however often.

::

    PENDING --Submitted--> OPEN --gap, reconnect--> RESUMING --Submitted, tokens--> OPEN
       |                     |                          |
       +---------------------+------- Stop -------------+---> STOPPING
"""

from __future__ import annotations

from enum import Enum

from ..proto.limits import MAX_DEADLINE_S
from ..proto.messages import Cancel, Message, Resume, Submit, Terminal, TokenRun
from .events import NewTokens, RequestSpec

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 4.0
FIRST_DOUBT_S = 10.0
LAST_DOUBT_S = 60.0
"""An open stream silent for so long is asked for again: it may be open on our side alone."""
DEADLINE_GRACE_S = 2.0
"""The router ends a request at its deadline; the client by itself this much later."""
STOP_GRACE_S = 0.03
"""How long a request whose end is of interest may end by itself before it is cancelled."""
STOP_PATIENCE_S = 2.0
"""How long a stopped request's end is waited for."""


class State(Enum):
    """Where a stream stands."""

    PENDING = "pending"  # submitted, not answered
    OPEN = "open"
    RESUMING = "resuming"  # asked to go on from ``next``
    STOPPING = "stopping"  # cancelled by the user


class Stream:
    """State of one request."""

    def __init__(self, spec: RequestSpec, serial: int, now: float) -> None:
        self.spec = spec
        self.serial = serial  # of all requests of this client; names may come again
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
        # Without a deadline the router's own, which is never longer, ends it.
        self.ends_by = now + (MAX_DEADLINE_S if spec.deadline is None else spec.deadline)
        self.asked_at = now  # the first word without an answer, or the last tokens since
        self.stop_until = 0.0
        self.turned_away = 0  # by routers that were about to end
        self.retry_at = now
        self._backoff = FIRST_RETRY_S
        self._said_at = now  # what is to be answered
        self._asked = -1  # the position that was asked for last
        self._doubt_at = now + FIRST_DOUBT_S
        self._doubt = FIRST_DOUBT_S

    # ------------------------------------------------------------------ what arrives

    def take(self, run: TokenRun, now: float) -> NewTokens | None:
        """The tokens of ``run`` that are new; None when there are none or some are missing.

        The position alone decides: a router that lost its memory may count attempts anew.
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
        """Whether ``run`` starts behind a gap."""
        return run.position > self.next

    def opened(self, key: bytes, secret: bytes, attempt: int) -> None:
        """The router has it."""
        self.key, self.secret = key, secret
        # Said Submit again, a router that lost its memory counts attempts from the start.
        pending = self.state is State.PENDING
        self.attempt = attempt if pending else max(self.attempt, attempt)
        if self.state in (State.PENDING, State.RESUMING):
            self.state = State.OPEN
            self._backoff = FIRST_RETRY_S

    def stop(self, now: float, *, report: bool) -> None:
        """The user wants its end."""
        self.state = State.STOPPING
        self.report = report
        self.stop_until = now + STOP_PATIENCE_S
        self._backoff, self._said_at = FIRST_RETRY_S, float("inf")
        # At a stop string most workers end by themselves: let their true end come first.
        self.retry_at = now + STOP_GRACE_S if report else now

    # ------------------------------------------------------------------ what to say

    def repeat(self, now: float) -> Message | None:
        """What has to be said (again) now, by state; sets when next."""
        if self.state is State.OPEN:
            return self._doubted(now)
        self._said_at = now
        self.retry_at = now + self._backoff
        self._backoff = min(2 * self._backoff, LAST_RETRY_S)
        if self.state is State.STOPPING:
            return self.cancel()
        return self._resume(now) if self.secret else self._submit(now)

    def unheard(self, since: float, now: float) -> Message | None:
        """What to say again when the router has answered a word said at ``since``, after ours.

        It answers in order, so ours or its answer was lost; waiting longer would help nobody.
        """
        if self.state is State.OPEN or self._said_at >= since:
            return None
        self._backoff = FIRST_RETRY_S
        return self.repeat(now)

    def cancel(self) -> Cancel:
        """What ends it at the router."""
        return Cancel(
            request_id=self.spec.request_id,
            request=self.key,
            serial=self.serial,
            secret=self.secret,
        )

    def resume(self, now: float) -> Message | None:
        """Ask for the stream from ``next`` on, unless that was asked lately."""
        asked_lately = now < self.retry_at and self._asked == self.next
        if self.state is State.STOPPING or asked_lately:
            return None
        self._asked = self.next
        self._ask_again(now)
        return self.repeat(now)

    @property
    def unanswered(self) -> bool:
        """Whether the router has neither accepted nor refused what was asked last."""
        return self.state in (State.PENDING, State.RESUMING)

    def _ask_again(self, now: float) -> None:
        if not self.unanswered:
            self.asked_at = now
        self.state = State.RESUMING if self.secret else State.PENDING

    def _doubted(self, now: float) -> Message | None:
        """A late answer to an older word opens a stream that the router may have let go since."""
        if now < self._doubt_at:
            return None
        self._doubt = min(2 * self._doubt, LAST_DOUBT_S)
        self._doubt_at = now + self._doubt
        return self.resume(now)

    def reconnected(self, now: float) -> Message | None:
        """What to say first on a new connection."""
        if self.state is State.STOPPING:
            return None  # the router cancelled it with the old connection
        self._backoff = FIRST_RETRY_S
        self._ask_again(now)
        return self.repeat(now)

    def _remaining(self, now: float) -> float | None:
        # Never zero: that would be refused, while the router's own clock ends it truthfully.
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
