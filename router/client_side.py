"""What clients say: requests begun, resumed, cancelled and acknowledged, and questions.

Invariant: every Submit and Resume is answered by Submitted and later one terminal, or by a
refusal with a typed code at once; a refused request leaves nothing behind here.
"""

from __future__ import annotations

import hmac
from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import PurePath
from typing import ClassVar

from ..proto.context_maps import context_digest
from ..proto.errors import BatonError, DuplicateRequest, InputError, RouterClosing
from ..proto.ids import request_key, resume_secret
from ..proto.limits import (
    MAX_POOL_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_RESUMED_ATTEMPT,
)
from ..proto.messages import (
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
from ..proto.requests import check_emitted, check_wire_context, check_wire_shape
from .admission import check_deadline
from .drains import last_worker
from .events import ToClient, ToWorker
from .gate import Caller
from .lifecycle import Lifecycle
from .recovery import Recovery
from .request import Request, State
from .status import Reporter

ENDED_ABSENT_S = 30.0
"""How long the end of a request waits for a client that is gone, as native clients try."""
CLOSING_WINDOW_S = 1.0
"""How long a router that is about to end lets requests run on whose clients have left it."""
_ENDED = State.ENDED


class ClientSide:
    """Handles every message of ClientToRouter.

    ``files``: the model folder's text files by name, as Describe hands them out.
    """

    def __init__(
        self,
        life: Lifecycle,
        recovery: Recovery,
        reporter: Reporter,
        files: dict[str, bytes],
        caller_of: Callable[[bytes], Caller],
    ) -> None:
        self._life = life
        self._recovery = recovery
        self._reporter = reporter
        self._files = files
        self._caller_of = caller_of
        self._key = life.config.key
        self.closing = False
        self.drains: dict[str, list[bytes]] = {}  # who waits for a worker's Drained

    def handle(self, identity: bytes, messages: Sequence[Message], now: float) -> None:
        """Take what one envelope holds."""
        for message in messages:
            self._handlers[type(message)](self, identity, message, now)

    def gone(self, identity: bytes, now: float) -> None:
        """A client's connection was lost: its running requests end now, or after the window."""
        life = self._life
        window = life.config.resume_window_s
        if self.closing:  # clients go to another router, which may not have asked for them yet
            window = max(window, CLOSING_WINDOW_S)
        for request in life.clients.gone(identity):
            if request.state is State.ENDED:  # its terminal is kept for a client that comes back
                request.limit = min(request.limit, now + ENDED_ABSENT_S)
                life.wake(request, request.retry_at, now)
            elif window <= 0:
                life.cancel(request, now, "client gone")
                life.forget(request)
            else:
                request.limit = min(request.deadline, now + window)
                life.wake(request, request.retry_at, now)

    def writable(self, identity: bytes) -> None:
        """A slow client has caught up: go on where it stopped."""
        client = self._life.clients.writable(identity)
        if client is None:
            return
        for request in list(client.requests.values()):
            if request.sent >= 0:
                self._life.resend(request, request.sent)

    # ------------------------------------------------------------------ begin

    def _submit(self, identity: bytes, message: Submit, now: float) -> None:
        life = self._life
        request_id = message.request_id
        key = request_key(identity, request_id, message.serial)
        known = life.requests.get(key)
        if known is not None:
            self._submit_again(identity, known, message)
            return
        if life.tombstones.holds(key, now):
            self._nothing_runs(identity, key, request_id)
            return
        try:
            self._check_id(request_id)
            if self.closing:
                raise RouterClosing("the router is shutting down", retry_after=1.0)
            attempt = max(life.last_attempt(key), self._recovery.orphans.highest(key)) + 1
            request = self._checked(key, message, attempt, now)
            life.registry.check_pool(message.pool)
            target = message.context.target_endpoint
            if target is not None:
                life.placement.pin(request, target, fallback=message.fallback)
            registry = life.registry
            life.admission.admit(request, registry.slots, registry.prefills, now, registry.others)
        except BatonError as error:
            self._refuse(identity, key, request_id, error)
            return
        self._attach(identity, request)
        life.start(request, now)

    def _submit_again(self, identity: bytes, known: Request, message: Submit) -> None:
        """The same id once more: the same content re-attaches, another is refused."""
        if _content(known) != _content(message):
            text = f"request id {message.request_id!r} is in use with another content"
            # Without the key, which names the request that is running.
            self._refuse(identity, b"", message.request_id, DuplicateRequest(text))
            return
        self._attach(identity, known)
        self._life.resend(known, known.base)

    def _resume(self, identity: bytes, message: Resume, now: float) -> None:
        life = self._life
        key = message.request
        if not hmac.compare_digest(message.secret, resume_secret(self._key, key)):
            error: BatonError = InputError("the secret does not open this request")
            self._refuse(identity, key, message.request_id, error)
            return
        known = life.requests.get(key)
        if known is not None:
            self._resume_known(identity, known, message, now)
            return
        if life.tombstones.holds(key, now):
            self._nothing_runs(identity, key, message.request_id)
            return
        try:
            self._check_id(message.request_id)
            if message.attempt > MAX_RESUMED_ATTEMPT:
                raise InputError(f"attempt {message.attempt} cannot have been seen")
            attempt = max(message.attempt, life.last_attempt(key))
            request = self._checked(key, message, attempt, now)
            self._take_emitted(request, message)
            life.placement.repin(request, message.context.target_endpoint)
            life.admission.admit_resumed(request, life.registry.prefills, now)
        except BatonError as error:
            self._refuse(identity, key, message.request_id, error)
            return
        self._attach(identity, request)
        self._recovery.resume(request, now)

    def _resume_known(self, identity: bytes, request: Request, message: Resume, now: float) -> None:
        """Go on from the client's position; it may be ahead of a router that was restarted."""
        ahead = message.position - request.next
        if ahead > 0 and not request.done:
            try:
                self._check_ahead(request, message)
            except InputError as error:
                # Without the key, which names the request that is running.
                self._refuse(identity, b"", message.request_id, error)
                return
            request.emitted.extend(message.emitted[-ahead:])
            request.next += ahead
            if request.logprobs is not None:
                request.logprobs.extend([None] * ahead)
        known = request.client is not None and request.client.identity == identity
        self._attach(identity, request)
        self._life.resend(request, message.position)
        if not known or message.position >= request.next:  # it has all, and doubts that more comes
            self._recovery.reclaim(request, now)

    def _check_ahead(self, request: Request, message: Resume) -> None:
        """Raise unless the client's tokens are this request's and go on from those here."""
        if message.position != _end(message):
            raise InputError(f"position {message.position} is not where the emitted tokens end")
        check_emitted(message.context, message.emitted, self._life.registry.card)
        if _content(request) != _content(message):
            raise DuplicateRequest(f"{message.request_id!r} is resumed with another content")
        if array("i", message.emitted[: len(request.emitted)]) != request.emitted:
            raise InputError("the emitted tokens are not those of this request")

    def _attach(self, identity: bytes, request: Request) -> None:
        """Serve the request to this connection and give it the secret to come back with."""
        life = self._life
        life.clients.attach(request, identity)
        request.identity, request.owner = identity, self._caller_of(identity).key
        request.limit = request.deadline
        submitted = Submitted(
            request_id=request.request_id,
            request=request.key,
            secret=resume_secret(self._key, request.key),
            attempt=request.attempt,
        )
        life.out.append(ToClient(identity, submitted))

    def _checked(self, key: bytes, message: Submit | Resume, attempt: int, now: float) -> Request:
        """The record of a valid request; raises what is wrong with it."""
        life, config = self._life, self._life.config
        card = life.registry.card
        if message.pin not in ("prefer", "strict"):
            raise InputError(f"pin is {message.pin!r}; known are prefer and strict")
        if card is not None:
            check_wire_context(message.context, card)
        else:
            check_wire_shape(message.context)
        if message.pool is not None and len(message.pool) > MAX_POOL_CHARS:
            raise InputError(f"pool is longer than {MAX_POOL_CHARS} characters")
        seconds = check_deadline(message.deadline, config.default_deadline_s, config.max_deadline_s)
        request = Request(key, message.request_id, message.context, now + seconds, attempt)
        request.pool = message.pool
        request.strict = message.pin == "strict"
        request.unchecked = card is None
        return request

    def _take_emitted(self, request: Request, message: Resume) -> None:
        """Start from the tokens the client has."""
        if message.position != _end(message):
            raise InputError(
                f"position {message.position} does not follow a prompt of {request.base}"
                f" and {len(message.emitted)} tokens"
            )
        check_emitted(message.context, message.emitted, self._life.registry.card)
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
        self._life.out.append(ToClient(identity, terminal))

    # ------------------------------------------------------------------ end

    def _cancel(self, identity: bytes, message: Cancel, now: float) -> None:
        life = self._life
        own = request_key(identity, message.request_id, message.serial)
        key = message.request or own
        request = life.requests.get(key)
        if request is None or not (key == own or self._may_end(identity, request, message.secret)):
            # Perhaps its Submit was lost or comes later: the client gets the end it waits for.
            if key == own and not life.last_attempt(key):
                life.tombstones.add(key, now)
                self._recovery.orphans.cancelled(key)
            self._nothing_runs(identity, key, message.request_id)
        elif request.terminal is not None:
            self._answer(identity, request.terminal)
        else:
            life.cancel(request, now, "cancelled")

    def _may_end(self, identity: bytes, request: Request, secret: bytes) -> bool:
        """Whether a request is this connection's, or its secret is shown: keys are no secrets."""
        if request.identity == identity:
            return True
        return hmac.compare_digest(secret, resume_secret(self._key, request.key))

    def _nothing_runs(self, identity: bytes, key: bytes, request_id: str) -> None:
        text = "nothing of this name runs here"
        terminal = Terminal(request=key, request_id=request_id, status="cancelled", message=text)
        self._life.out.append(ToClient(identity, terminal))

    def _final_ack(self, identity: bytes, message: FinalAck, _now: float) -> None:
        requests = self._life.requests
        for key in message.requests:
            request = requests.get(key)
            if request is None or request.state is not _ENDED:
                continue
            if request.identity == identity:
                self._life.forget(request)

    # ------------------------------------------------------------------ questions

    def _describe(self, identity: bytes, message: Describe, _now: float) -> None:
        wanted = {name: self._files[name] for name in message.files if name in self._files}
        folder = self._life.config.model_folder
        if not self._caller_of(identity).operator:
            folder = PurePath(folder).name
        answer = Described(
            model=self._life.registry.card,
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
        """Pass an operator's drain to the worker; it is repeated until the worker confirms it."""
        try:
            worker = self._life.registry.named(message.worker)
            ready = self._life.registry.ready(worker.role)
            last = not worker.draining and all(other is worker for other in ready)
            if last and not message.force:
                raise InputError(last_worker(worker.id, worker.role))
        except BatonError as error:
            answer = Drained(worker=message.worker, code=error.code, message=str(error))
            self._answer(identity, answer)
            return
        self._life.registry.drain(worker)
        worker.drain_at = now + self._life.config.retry_ceiling_s
        self._life.out.append(ToWorker(worker.identity, Drain()))
        waiting = self.drains.setdefault(worker.id, [])
        if identity not in waiting:
            waiting.append(identity)
        # By the name it was asked with, which may be its endpoint.
        self._answer(identity, Drained(worker=message.worker, message="draining"))

    def drained(self, worker_id: str) -> None:
        """A worker has nothing left: tell who asked."""
        for identity in self.drains.pop(worker_id, ()):
            self._answer(identity, Drained(worker=worker_id, message="drained"))

    def _answer(self, identity: bytes, message: Message) -> None:
        """Answer a question, unless the client does not even read what it has."""
        client = self._life.clients.get(identity)
        if client is None or not client.behind:
            self._life.out.append(ToClient(identity, message))

    def _pong(self, identity: bytes, message: Pong, now: float) -> None:
        """Heard; there is nothing to do."""

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

    def reject(self, identity: bytes, error: BatonError, request_id: str = "") -> None:
        """Bytes of this client could not be understood."""
        rejected = Rejected(code=error.code, message=str(error), request_id=request_id)
        self._answer(identity, rejected)


def _content(asked: Request | Submit | Resume) -> bytes:
    """Digest of all that decides what a request is."""
    strict = asked.strict if isinstance(asked, Request) else asked.pin == "strict"
    return context_digest(asked.context, asked.pool, strict)


def _end(message: Resume) -> int:
    return len(message.context.tokens) + len(message.emitted)


def fold_questions(messages: Sequence[Message]) -> Sequence[Message]:
    """Messages of one envelope with at most one question of a kind; one answer serves all.

    A question takes a few bytes and its answer megabytes.
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
