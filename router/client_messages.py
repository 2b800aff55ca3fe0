"""Messages from clients about requests: submit, resume, cancel, acknowledge.

Invariant: the answer to every Submit and Resume is either Submitted and later one terminal, or
an immediate terminal with an error code. A rejected request leaves no state in the router.
"""

from __future__ import annotations

import hmac
from array import array
from collections.abc import Callable
from itertools import repeat
from typing import ClassVar, NoReturn

from baton.proto.errors import (
    BatonError,
    DuplicateRequest,
    InputError,
    InternalError,
    RouterClosing,
)
from baton.proto.ids import request_key, resume_secret
from baton.proto.limits import (
    MAX_DEADLINE_S,
    MAX_POOL_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_RESUMED_ATTEMPT,
)
from baton.proto.requests import check_emitted, check_wire_context, check_wire_shape
from baton.proto.wire.map_bytes import context_digest
from baton.proto.wire.messages import (
    Cancel,
    FinalAck,
    Message,
    Resume,
    Submit,
    Submitted,
    Terminal,
)
from baton.proto.work import piece_bytes

from .admission import check_deadline
from .events import (
    ClientFull,
    ClientGone,
    ClientWritable,
    FromClient,
    StopRequested,
    ToClient,
)
from .lifecycle import Lifecycle
from .own_errors import TEXT
from .queries import Queries, merge_queries
from .records import CLIENT_GONE, Attempt, Request
from .state import RouterState
from .states import State
from .stories import MAX_ORIGIN_CHARS
from .takeover import Takeover

ENDED_ABSENT_S = 30.0
"""Seconds for which a terminal is kept for a disconnected client; native clients retry as long."""
CLOSING_WINDOW_S = 1.0
"""Seconds for which a closing router lets requests of disconnected clients run on."""
_ENDED = State.ENDED


class ClientMessages:
    """Handles every message of ClientToRouter; :class:`.queries.Queries` answers queries."""

    def __init__(
        self,
        state: RouterState,
        lifecycle: Lifecycle,
        takeover: Takeover,
        queries: Queries,
    ) -> None:
        self._config = state.config
        self._out = state.out
        self._table = state.table
        self._registry = state.registry
        self._placement = state.placement
        self._admission = state.admission
        self._clients = state.clients
        self._lifecycle = lifecycle
        self._takeover = takeover
        self._metrics = state.metrics
        self._queries = queries
        self._stories = state.stories
        self._caller_of = state.authentication.client
        self._errors = state.errors
        self._key = state.config.key
        self._closing = False

    def handle(self, event: FromClient, now: float) -> None:
        """Handle the messages of one envelope."""
        identity, messages = event.identity, event.messages
        for message in messages if len(messages) == 1 else merge_queries(messages):
            try:
                handler = self._handlers.get(type(message))
                if handler is None:
                    self._queries.handle(identity, message, now)
                else:
                    handler(self, identity, message, now)
            except Exception as error:
                self._failed(identity, message, error)

    def _failed(self, identity: bytes, message: Message, error: Exception) -> None:
        """End the client's request whose message raised, also one that was not admitted yet.

        A request of another client is not harmed: the sender may have no right to it.
        """
        key = b""
        if isinstance(message, Submit):
            key = request_key(identity, message.request_id, message.serial)
        elif isinstance(message, Resume | Cancel):
            key = message.request
        known = self._table.requests.get(key)
        if known is not None and known.identity == identity:
            self._errors.of_request(error, key)
            return
        self._errors.of_client(error, type(message).__name__)
        if isinstance(message, Submit | Resume) and not self._answered(key):
            self._refuse(identity, key, message.request_id, InternalError(TEXT))

    def _answered(self, key: bytes) -> bool:
        """Whether this event's actions have the terminal of a request without a record."""
        return any(
            type(action) is ToClient
            and type(action.message) is Terminal
            and action.message.request == key
            for action in self._out
        )

    def stop(self, _event: StopRequested, _now: float) -> None:
        """Reject new requests; running requests continue."""
        self._closing = True

    def gone(self, event: ClientGone, now: float) -> None:
        """Handle a lost connection: its requests end now, or after the resume window."""
        window = self._config.resume_window_s
        if self._closing:  # gives the client's next router time to find the request
            window = max(window, CLOSING_WINDOW_S)

        def lose(request: Request) -> None:
            if request.state is State.ENDED:  # keep the terminal: the client may reconnect
                request.limit = min(request.limit, now + ENDED_ABSENT_S)
                self._table.wake(request, request.retry_at, now)
            elif window <= 0:
                self._lifecycle.cancel(request, now, CLIENT_GONE)
                self._lifecycle.forget(request)
            else:
                request.limit = min(request.deadline, now + window)
                self._table.wake(request, request.retry_at, now)

        self._queries.gone(event.identity)
        self._errors.each(self._clients.gone(event.identity), lose)

    def full(self, event: ClientFull, _now: float) -> None:
        """Note that a client reads too slowly."""
        self._clients.full(event.identity)

    def writable(self, event: ClientWritable, _now: float) -> None:
        """Send a client that has caught up everything it has missed."""
        client = self._clients.writable(event.identity)
        if client is None:
            return

        def catch_up(request: Request) -> None:
            if request.sent >= 0:
                self._lifecycle.resend(request, request.sent)

        self._errors.each(list(client.requests.values()), catch_up)

    # ------------------------------------------------------------------ begin

    def _submit(self, identity: bytes, message: Submit, now: float) -> None:
        request_id = message.request_id
        key = request_key(identity, request_id, message.serial)
        known = self._table.requests.get(key)
        if known is not None:
            self._submit_again(identity, known, message)
            return
        if self._table.cancelled.holds(key, now):
            self._nothing_runs(identity, key, request_id)
            return
        try:
            if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
                self._refuse_id()
            if self._closing:
                raise RouterClosing("the router is shutting down", retry_after=1.0)
            last = self._table.last_attempt(key)
            if self._registry.reporting:
                last = max(last, self._takeover.unclaimed.highest(key))
            request = self._checked(key, message, last + 1, now)
            if message.pool is not None:
                self._registry.check_pool(message.pool)
            target = message.context.target_endpoint
            if target is not None:
                self._placement.pin(request, target, fallback=message.fallback)
            registry = self._registry
            self._admission.admit(request, registry.slots, registry.prefills, now, registry.others)
        except InternalError:
            raise  # its text is for the log
        except BatonError as error:
            if message.refusals:  # counted and recorded at the first
                self._answer_refused(identity, key, request_id, error)
                return
            self._refuse(identity, key, request_id, error)
            self._stories.refused(key, message, identity, self._owner(identity), error, now)
            return
        request.whole = message.whole
        self._attach(identity, request)
        self._lifecycle.start(request, now)

    def _submit_again(self, identity: bytes, known: Request, message: Submit) -> None:
        """Re-attach to a running request; reject the same id with different content."""
        if _content(known) != _content(message):
            text = f"request id {message.request_id!r} is in use with different content"
            # Omit the key: it names the running request.
            self._refuse(identity, b"", message.request_id, DuplicateRequest(text))
            return
        self._attach(identity, known)
        self._lifecycle.resend(known, known.base)

    def _resume(self, identity: bytes, message: Resume, now: float) -> None:
        key = message.request
        if not hmac.compare_digest(message.secret, resume_secret(self._key, key)):
            error: BatonError = InputError("wrong secret for this request")
            self._refuse(identity, key, message.request_id, error)
            return
        known = self._table.requests.get(key)
        if known is not None:
            self._resume_known(identity, known, message, now)
            return
        if self._table.cancelled.holds(key, now):
            self._nothing_runs(identity, key, message.request_id)
            return
        try:
            if not 0 < len(message.request_id) <= MAX_REQUEST_ID_CHARS:
                self._refuse_id()
            if message.attempt > MAX_RESUMED_ATTEMPT:
                raise InputError(f"attempt is {message.attempt}, limit {MAX_RESUMED_ATTEMPT}")
            attempt = max(message.attempt, self._table.last_attempt(key))
            request = self._checked(key, message, attempt, now)
            self._take_emitted(request, message)
            self._placement.repin(request, message.context.target_endpoint)
            self._admission.admit_resumed(request, self._registry.prefills, now)
        except InternalError:
            raise
        except BatonError as error:
            self._refuse(identity, key, message.request_id, error)
            self._stories.refused(key, message, identity, self._owner(identity), error, now)
            return
        self._attach(identity, request)
        self._takeover.resume(request, now)

    def _resume_known(self, identity: bytes, request: Request, message: Resume, now: float) -> None:
        """Continue from the client's position, which may be ahead of a restarted router."""
        ahead = message.position - request.next
        if ahead > 0 and not request.done:
            try:
                self._check_ahead(request, message)
            except InputError as error:
                # Omit the key: it names the running request.
                self._refuse(identity, b"", message.request_id, error)
                return
            request.emitted.extend(message.emitted[-ahead:])
            request.next += ahead
            if request.logprobs is not None:
                request.logprobs.extend([None] * ahead)
        known = request.client is not None and request.client.identity == identity
        self._attach(identity, request)
        self._lifecycle.resend(request, message.position)
        # A client that has every token resumes only if it suspects that the stream is stuck.
        if not known or message.position >= request.next:
            self._lifecycle.reclaim(request, now)

    def _check_ahead(self, request: Request, message: Resume) -> None:
        """Raise InputError or DuplicateRequest unless the client's tokens extend those kept."""
        if message.position != _end(message):
            raise InputError(
                f"position is {message.position}, the emitted tokens end at {_end(message)}"
            )
        check_emitted(message.context, message.emitted, self._registry.card)
        if _content(request) != _content(message):
            raise DuplicateRequest(f"{message.request_id!r} was resumed with different content")
        if array("i", message.emitted[: len(request.emitted)]) != request.emitted:
            raise InputError("the emitted tokens differ from those of this request")

    def _attach(self, identity: bytes, request: Request) -> None:
        """Stream the request to this connection and send Submitted, with the secret for Resume."""
        self._clients.attach(request, identity)
        request.identity, request.owner = identity, self._caller_of(identity).key
        request.limit = request.deadline
        submitted = Submitted(
            request_id=request.request_id,
            request=request.key,
            secret=resume_secret(self._key, request.key),
            attempt=request.attempt.number,
        )
        self._out.append(ToClient(identity, submitted))

    def _owner(self, identity: bytes) -> bytes:
        """Return the key of a client's connection, or empty bytes without keys."""
        return self._caller_of(identity).key

    def _checked(self, key: bytes, message: Submit | Resume, attempt: int, now: float) -> Request:
        """Return a record for a valid request; raises a BatonError for an invalid one."""
        config = self._config
        card = self._registry.card
        strict = message.pin != "prefer"
        if strict and message.pin != "strict":
            raise InputError(f"pin must be prefer or strict, not {message.pin!r}")
        if card is not None:
            check_wire_context(message.context, card)
        else:
            check_wire_shape(message.context)
        if message.pool is not None and len(message.pool) > MAX_POOL_CHARS:
            raise InputError(f"pool has {len(message.pool)} characters, limit {MAX_POOL_CHARS}")
        seconds = check_deadline(message.deadline, config.default_deadline_s, config.max_deadline_s)
        context = message.context
        request = Request(key, message.request_id, context, now + seconds, Attempt(attempt))
        request.pool = message.pool
        request.strict = strict
        request.unchecked = card is None
        if message.slo_ttft is not None or message.slo_itl is not None:
            request.slo_ttft = _own_limit("slo_ttft", message.slo_ttft)
            request.slo_itl = _own_limit("slo_itl", message.slo_itl)
        if request.work.pieces:
            request.media_bytes = piece_bytes(request.work, card)
        request.began = now
        if message.gateway or message.traceparent:
            request.gateway = message.gateway[:MAX_ORIGIN_CHARS]
            request.traceparent = message.traceparent[:MAX_ORIGIN_CHARS]
        return request

    def _take_emitted(self, request: Request, message: Resume) -> None:
        """Store the tokens that the client has received; raises InputError if they are invalid."""
        if message.position != _end(message):
            raise InputError(
                f"position is {message.position}, but the prompt has {request.base} tokens and"
                f" {len(message.emitted)} tokens were emitted"
            )
        check_emitted(message.context, message.emitted, self._registry.card)
        request.emitted = array("i", message.emitted)
        request.next = message.position
        if request.logprobs is not None:
            request.logprobs = list(repeat(None, len(message.emitted)))

    @staticmethod
    def _refuse_id() -> NoReturn:
        raise InputError(f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} characters")

    def _refuse(self, identity: bytes, key: bytes, request_id: str, error: BatonError) -> None:
        self._metrics.refuse(error)
        self._answer_refused(identity, key, request_id, error)

    def _answer_refused(
        self, identity: bytes, key: bytes, request_id: str, error: BatonError
    ) -> None:
        terminal = Terminal(
            request=key,
            code=error.code,
            message=str(error),
            retry_after=error.retry_after,
            request_id=request_id,
        )
        self._out.append(ToClient(identity, terminal))

    # ------------------------------------------------------------------ end

    def _cancel(self, identity: bytes, message: Cancel, now: float) -> None:
        own = request_key(identity, message.request_id, message.serial)
        key = message.request or own
        request = self._table.requests.get(key)
        if request is None or not (key == own or self._may_end(identity, request, message.secret)):
            # The Submit may be lost or late; the client still needs its terminal.
            if key == own and not self._table.last_attempt(key):
                self._table.remember_cancelled(key, now)
                if lost := self._table.cancelled.evicted:
                    self._metrics.dropped["cancel_forgotten"] = lost
                self._takeover.unclaimed.cancelled(key)
            self._nothing_runs(identity, key, message.request_id)
        elif request.terminal is not None:
            self._queries.answer(identity, request.terminal)
        else:
            self._lifecycle.cancel(request, now, "cancelled")

    def _may_end(self, identity: bytes, request: Request, secret: bytes) -> bool:
        """True if the connection owns the request, or knows its secret. A key is not a secret."""
        if request.identity == identity:
            return True
        return hmac.compare_digest(secret, resume_secret(self._key, request.key))

    def _nothing_runs(self, identity: bytes, key: bytes, request_id: str) -> None:
        text = "no such request is running"
        terminal = Terminal(request=key, request_id=request_id, status="cancelled", message=text)
        self._out.append(ToClient(identity, terminal))

    def _final_ack(self, identity: bytes, message: FinalAck, _now: float) -> None:
        requests = self._table.requests
        for key in message.requests:
            request = requests.get(key)
            if request is None or request.state is not _ENDED:
                continue
            if request.identity == identity:
                try:
                    self._lifecycle.forget(request)
                except Exception as error:
                    self._errors.of_request(error, key)

    _handlers: ClassVar[dict[type, Callable[..., None]]] = {
        Submit: _submit,
        Resume: _resume,
        Cancel: _cancel,
        FinalAck: _final_ack,
    }


def _own_limit(name: str, seconds: float | None) -> float:
    """Return a request's own limit in seconds, 0 without one. Raises InputError."""
    if seconds is None:
        return 0.0
    if not 0 < seconds <= MAX_DEADLINE_S:  # NaN as well
        raise InputError(
            f"{name} must be a number of seconds above 0 and at most {MAX_DEADLINE_S:g}, "
            f"not {seconds:g}"
        )
    return seconds


def _content(asked: Request | Submit | Resume) -> bytes:
    """Return the digest of everything that defines a request's result."""
    strict = asked.strict if isinstance(asked, Request) else asked.pin == "strict"
    return context_digest(asked.context, asked.pool, strict)


def _end(message: Resume) -> int:
    return len(message.context.tokens) + len(message.emitted)
