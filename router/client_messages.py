"""Messages from clients: submit, resume, cancel, acknowledge, and queries such as Status.

Invariant: the answer to every Submit and Resume is either Submitted and later one terminal, or
an immediate terminal with an error code. A rejected request leaves no state in the router.
"""

from __future__ import annotations

import hmac
from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import PurePath
from typing import ClassVar

from ..proto.errors import BatonError, DuplicateRequest, InputError, RouterClosing
from ..proto.ids import request_key, resume_secret
from ..proto.limits import (
    MAX_POOL_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_RESUMED_ATTEMPT,
)
from ..proto.requests import check_emitted, check_wire_context, check_wire_shape
from ..proto.wire.context_maps import context_digest
from ..proto.wire.messages import (
    Cancel,
    Describe,
    Described,
    Drain,
    Drained,
    FinalAck,
    Message,
    Ping,
    Pong,
    Rejected,
    Resume,
    Status,
    StatusReport,
    Submit,
    Submitted,
    Terminal,
)
from .admission import Admission, check_deadline
from .authorization import Caller
from .clients import Clients
from .config import RouterConfig
from .events import (
    Action,
    ClientFull,
    ClientGone,
    ClientInputRejected,
    ClientWritable,
    FromClient,
    StopRequested,
    ToClient,
    ToWorker,
)
from .lifecycle import Lifecycle
from .placement import Placement
from .recovery import Recovery
from .registry import Registry
from .request_table import RequestTable
from .requests import Attempt, Request, State
from .status import Metrics, Reporter
from .takeover import Takeover
from .workers import last_worker

ENDED_ABSENT_S = 30.0
"""Seconds for which a terminal is kept for a disconnected client; native clients retry as long."""
CLOSING_WINDOW_S = 1.0
"""Seconds for which a closing router lets requests of disconnected clients run on."""
_ENDED = State.ENDED


class ClientMessages:
    """Handles every message of ClientToRouter.

    ``files``: text files of the model folder by name, returned by Describe. ``caller_of``: maps a
    client's routing id to its key and rights.
    """

    def __init__(
        self,
        config: RouterConfig,
        out: list[Action],
        table: RequestTable,
        registry: Registry,
        placement: Placement,
        admission: Admission,
        clients: Clients,
        lifecycle: Lifecycle,
        recovery: Recovery,
        takeover: Takeover,
        metrics: Metrics,
        reporter: Reporter,
        files: dict[str, bytes],
        caller_of: Callable[[bytes], Caller],
    ) -> None:
        self._config = config
        self._out = out
        self._table = table
        self._registry = registry
        self._placement = placement
        self._admission = admission
        self._clients = clients
        self._lifecycle = lifecycle
        self._recovery = recovery
        self._takeover = takeover
        self._metrics = metrics
        self._reporter = reporter
        self._files = files
        self._caller_of = caller_of
        self._key = config.key
        self._closing = False
        self.drains: dict[str, list[bytes]] = {}  # clients that wait for Drained, by worker id

    def handle(self, event: FromClient, now: float) -> None:
        """Handle the messages of one envelope."""
        identity, messages = event.identity, event.messages
        for message in messages if len(messages) == 1 else merge_queries(messages):
            self._handlers[type(message)](self, identity, message, now)

    def stop(self, _event: StopRequested, _now: float) -> None:
        """Reject new requests; running requests continue."""
        self._closing = True

    def gone(self, event: ClientGone, now: float) -> None:
        """Handle a lost connection: its requests end now, or after the resume window."""
        window = self._config.resume_window_s
        if self._closing:  # gives the client's next router time to find the request
            window = max(window, CLOSING_WINDOW_S)
        for request in self._clients.gone(event.identity):
            if request.state is State.ENDED:  # keep the terminal: the client may reconnect
                request.limit = min(request.limit, now + ENDED_ABSENT_S)
                self._table.wake(request, request.retry_at, now)
            elif window <= 0:
                self._lifecycle.cancel(request, now, "client gone")
                self._lifecycle.forget(request)
            else:
                request.limit = min(request.deadline, now + window)
                self._table.wake(request, request.retry_at, now)

    def full(self, event: ClientFull, _now: float) -> None:
        """Note that a client reads too slowly."""
        self._clients.full(event.identity)

    def writable(self, event: ClientWritable, _now: float) -> None:
        """Send a client that has caught up everything it has missed."""
        client = self._clients.writable(event.identity)
        if client is None:
            return
        for request in list(client.requests.values()):
            if request.sent >= 0:
                self._lifecycle.resend(request, request.sent)

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
            self._check_id(request_id)
            if self._closing:
                raise RouterClosing("the router is shutting down", retry_after=1.0)
            attempt = max(self._table.last_attempt(key), self._takeover.unclaimed.highest(key)) + 1
            request = self._checked(key, message, attempt, now)
            if message.pool is not None:
                self._registry.check_pool(message.pool)
            target = message.context.target_endpoint
            if target is not None:
                self._placement.pin(request, target, fallback=message.fallback)
            registry = self._registry
            self._admission.admit(request, registry.slots, registry.prefills, now, registry.others)
        except BatonError as error:
            self._refuse(identity, key, request_id, error)
            return
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
            self._check_id(message.request_id)
            if message.attempt > MAX_RESUMED_ATTEMPT:
                raise InputError(f"attempt is {message.attempt}, limit {MAX_RESUMED_ATTEMPT}")
            attempt = max(message.attempt, self._table.last_attempt(key))
            request = self._checked(key, message, attempt, now)
            self._take_emitted(request, message)
            self._placement.repin(request, message.context.target_endpoint)
            self._admission.admit_resumed(request, self._registry.prefills, now)
        except BatonError as error:
            self._refuse(identity, key, message.request_id, error)
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
            self._recovery.reclaim(request, now)

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

    def _checked(self, key: bytes, message: Submit | Resume, attempt: int, now: float) -> Request:
        """Return a record for a valid request; raises a BatonError for an invalid one."""
        config = self._config
        card = self._registry.card
        if message.pin not in ("prefer", "strict"):
            raise InputError(f"pin must be prefer or strict, not {message.pin!r}")
        if card is not None:
            check_wire_context(message.context, card)
        else:
            check_wire_shape(message.context)
        if message.pool is not None and len(message.pool) > MAX_POOL_CHARS:
            raise InputError(f"pool has {len(message.pool)} characters, limit {MAX_POOL_CHARS}")
        seconds = check_deadline(message.deadline, config.default_deadline_s, config.max_deadline_s)
        request = Request(key, message.request_id, message.context, now + seconds, Attempt(attempt))
        request.pool = message.pool
        request.strict = message.pin == "strict"
        request.unchecked = card is None
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
    def _check_id(request_id: str) -> None:
        if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
            raise InputError(f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} characters")

    def _refuse(self, identity: bytes, key: bytes, request_id: str, error: BatonError) -> None:
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
                self._takeover.unclaimed.cancelled(key)
            self._nothing_runs(identity, key, message.request_id)
        elif request.terminal is not None:
            self._answer(identity, request.terminal)
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
                self._lifecycle.forget(request)

    # ------------------------------------------------------------------ queries

    def _describe(self, identity: bytes, message: Describe, _now: float) -> None:
        wanted = {name: self._files[name] for name in message.files if name in self._files}
        folder = self._config.model_folder
        if not self._caller_of(identity).operator:
            folder = PurePath(folder).name
        answer = Described(
            model=self._registry.card,
            folder=folder,
            files=wanted,
            available=list(self._files),
        )
        self._answer(identity, answer)

    def _status(self, identity: bytes, message: Status, now: float) -> None:
        report = self._reporter.report(message.handoffs, now, self._caller_of(identity))
        self._answer(identity, StatusReport(report=report))

    def _ping(self, identity: bytes, message: Ping, _now: float) -> None:
        self._answer(identity, Pong(nonce=message.nonce))

    def _drain(self, identity: bytes, message: Drain, now: float) -> None:
        """Forward an operator's Drain, which the timers repeat until the worker confirms."""
        try:
            worker = self._registry.named(message.worker)
            ready = self._registry.ready(worker.role)
            last = not worker.draining and all(other is worker for other in ready)
            if last and not message.force:
                raise InputError(last_worker(worker.id, worker.role))
        except BatonError as error:
            answer = Drained(worker=message.worker, code=error.code, message=str(error))
            self._answer(identity, answer)
            return
        self._registry.drain(worker)
        worker.drain_at = now + self._config.retry_ceiling_s
        self._out.append(ToWorker(worker.identity, Drain()))
        waiting = self.drains.setdefault(worker.id, [])
        if identity not in waiting:
            waiting.append(identity)
        # Answer with the name from the query, which may be an endpoint.
        self._answer(identity, Drained(worker=message.worker, message="draining"))

    def drained(self, worker_id: str) -> None:
        """Notify the clients that asked for the drain of a worker: it has no requests left."""
        for identity in self.drains.pop(worker_id, ()):
            self._answer(identity, Drained(worker=worker_id, message="drained"))

    def _answer(self, identity: bytes, message: Message) -> None:
        """Send an answer, unless the client reads too slowly."""
        client = self._clients.get(identity)
        if client is None or not client.behind:
            self._out.append(ToClient(identity, message))

    def _pong(self, identity: bytes, message: Pong, now: float) -> None:
        """Ignore: a Pong needs no answer."""

    _handlers: ClassVar[dict[type, Callable[..., None]]] = {
        Submit: _submit,
        Resume: _resume,
        Cancel: _cancel,
        FinalAck: _final_ack,
        Describe: _describe,
        Status: _status,
        Drain: _drain,
        Ping: _ping,
        Pong: _pong,
    }

    def reject(self, event: ClientInputRejected, _now: float) -> None:
        """Send Rejected for bytes that could not be decoded."""
        error = event.error
        self._metrics.dropped[f"client_{error.code}"] += 1
        rejected = Rejected(code=error.code, message=str(error), request_id=event.request_id)
        self._answer(event.identity, rejected)


def _content(asked: Request | Submit | Resume) -> bytes:
    """Return the digest of everything that defines a request's result."""
    strict = asked.strict if isinstance(asked, Request) else asked.pin == "strict"
    return context_digest(asked.context, asked.pool, strict)


def _end(message: Resume) -> int:
    return len(message.context.tokens) + len(message.emitted)


def merge_queries(messages: Sequence[Message]) -> Sequence[Message]:
    """Merge the Describe and the Status messages of an envelope into one of each kind.

    A query has a few bytes and its answer megabytes: one envelope must not cause many answers.
    """
    describes = [message for message in messages if type(message) is Describe]
    statuses = [message for message in messages if type(message) is Status]
    if len(describes) + len(statuses) < 2:
        return messages
    rest = [message for message in messages if type(message) not in (Describe, Status)]
    if describes:
        names = dict.fromkeys(name for message in describes for name in message.files)
        rest.append(Describe(files=list(names)))
    if statuses:
        rest.append(Status(handoffs=max(message.handoffs for message in statuses)))
    return rest
