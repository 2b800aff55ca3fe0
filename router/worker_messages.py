"""Messages from workers about requests: tokens, terminals, and answers to Assign.

Invariant: the router relays only tokens of the current attempt at exactly the next position, even
if workers repeat, lose or reorder messages. It answers messages of a lower attempt with an Abort.
One message carries a step's tokens for one client, with the runs as received.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.proto.errors import DeadlineExceeded, HandoffFailed, InternalError
from baton.proto.wire.messages import (
    Aborted,
    Accepted,
    Adopt,
    Busy,
    DeathCertificate,
    Drained,
    HandoffReport,
    Heartbeat,
    Hello,
    Message,
    Moved,
    PeerLost,
    Ping,
    Pong,
    Rejected,
    Terminal,
    TerminalAck,
    TokenRun,
    Tokens,
)
from baton.runtime.metrics.latency import bucket
from baton.runtime.tables import RecentMap

from .authorization import Proofs
from .events import FromWorker, ToClient, ToWorker
from .lifecycle import Lifecycle
from .records import NEVER, Client, Request, Worker
from .served import begun
from .state import RouterState
from .states import PLACED, State, Step
from .takeover import Takeover
from .worker_registration import WorkerRegistration

_ASSIGNED = State.ASSIGNED  # before Python 3.12, Enum member access is slow
_QUEUED = State.QUEUED
_PREFILLING = State.PREFILLING
_FOLLOWED = State.FOLLOWED
_DECODING = State.DECODING
REMEMBER_REPORTS = 4096


class WorkerMessages:
    """Handles every message of WorkerToRouter; :mod:`.worker_registration` handles some of them."""

    def __init__(
        self,
        state: RouterState,
        lifecycle: Lifecycle,
        takeover: Takeover,
        registration: WorkerRegistration,
    ) -> None:
        self._config = state.config
        self._out = state.out
        self._table = state.table
        self._registry = state.registry
        self._failed_pairs = state.placement.failed_pairs
        self._admission = state.admission
        self._lifecycle = lifecycle
        self._takeover = takeover
        self._registration = registration
        self._proofs = Proofs(state.config, state.metrics.dropped)
        self._metrics = state.metrics
        self._handoffs = state.handoffs
        self._stories = state.stories
        self._errors = state.errors
        self._caller_of = state.authentication.worker
        self._reported: RecentMap[bytes, int] = RecentMap(REMEMBER_REPORTS)
        self._acknowledged: dict[bytes, list[tuple[bytes, int]]] = {}  # of this envelope
        self._handlers: dict[type[Message], Callable[..., None]] = {
            Tokens: self._tokens,
            Heartbeat: registration.heartbeat,
            Accepted: self._accepted,
            Terminal: self._terminal,
            HandoffReport: self._handoff,
            Busy: self._busy,
            Aborted: self._aborted,
            PeerLost: self._peer_lost,
            Drained: registration.drained,
            Moved: self._moved,
            Ping: self._ping,
            Pong: self._pong,
            DeathCertificate: self._not_a_supervisor,
        }

    def handle(self, event: FromWorker, now: float) -> None:
        """Handle the messages of one envelope."""
        identity = event.identity
        by_identity = self._registry.by_identity
        worker = by_identity(identity)
        if worker is not None:
            worker.seen_at = now
        else:
            self._certified(event, now)
        handlers = self._handlers
        for message in event.messages:
            try:
                if type(message) is Hello:
                    caller = self._caller_of(identity, message.worker)
                    proven = self._proofs.proven(message, caller.key)
                    self._registration.hello(identity, proven, now, caller)
                    worker = by_identity(identity)
                elif worker is not None:
                    handlers[type(message)](worker, message, now)
                elif type(message) is not DeathCertificate:
                    self._drop("unknown_worker")
                    text = "not registered: send Hello first"
                    self._send(identity, Rejected(code="endpoint_unknown", message=text))
            except Exception as error:
                worker = by_identity(identity)
                self._failed(worker, message, error)
        if self._acknowledged:
            self._acknowledged.clear()

    def _certified(self, event: FromWorker, now: float) -> None:
        found = [one for one in event.messages if type(one) is DeathCertificate]
        if found:
            self._registration.certified(event.identity, found, now)

    def _not_a_supervisor(self, worker: Worker, message: DeathCertificate, now: float) -> None:
        """Ignore: a worker has no certificates to send."""
        self._drop("unknown_certificate")

    def _failed(self, worker: Worker | None, message: Message | TokenRun, error: Exception) -> None:
        """End the request whose message raised, if this worker runs it.

        Otherwise the message is lost, as on the network: its sender repeats it, or times out.
        """
        request = self._table.requests.get(getattr(message, "request", b""))
        runs = request is not None and worker is not None and request.attempt.runs_on(worker)
        if request is not None and runs:
            self._errors.of_request(error, request.key)
        else:
            self._errors.of_nobody(error, type(message).__name__)

    # ------------------------------------------------------------------ tokens

    def _tokens(self, worker: Worker, message: Tokens, now: float) -> None:
        """Relay tokens. Hot path: one dictionary look-up and a few comparisons per run."""
        requests = self._table.requests
        touched: list[Client] = []
        total = same = 0
        since = NEVER
        for run in message.runs:
            try:
                request = requests.get(run.request)
                if request is None:
                    self._unknown(worker, run.request, run.attempt, now)
                    continue
                attempt = request.attempt
                if (
                    run.position != request.next
                    or run.attempt != attempt.number
                    or attempt.server is not worker
                ):
                    checked = self._irregular(worker, request, run, now)
                    if checked is None:
                        continue
                    run = checked
                total += len(run.tokens)
                request.keep(run)
                if run.media is not None and request.work.pieces:
                    self._first_piece(request, now)
                # Most runs of a step have the same previous step: count their equal gaps at once.
                if request.token_at != since:
                    if since != NEVER:
                        self._waited(worker, since, same, now)
                    since, same = request.token_at, 0
                same += 1
                request.token_at = now
                client = request.client
                if client is not None:
                    if client.behind or request.whole:
                        if request.sent < 0:
                            request.sent = run.position
                    else:
                        if not client.runs:
                            touched.append(client)
                        client.runs.append(run)
                if not (attempt.answered and request.started and attempt.pending is None):
                    self._first_heard(worker, request, touched, now)
            except Exception as error:
                self._failed(worker, run, error)
        try:
            if since != NEVER:
                self._waited(worker, since, same, now)
            self._admission.tokens.new += total
        finally:
            if touched:
                self._flush(touched)

    def _first_piece(self, request: Request, now: float) -> None:
        """Note the first piece of a file that tokens complete."""
        if request.submitted_at != NEVER and request.media is not None and len(request.media) == 1:
            seconds, metrics = now - request.submitted_at, self._metrics
            metrics.first_piece.add_to_bucket(bucket(seconds), now)
            metrics.first_piece_s += seconds

    def _waited(self, worker: Worker, since: float, runs: int, now: float) -> None:
        """Add the ITL of ``runs`` requests whose previous tokens arrived at ``since``."""
        seconds, metrics = now - since, self._metrics
        index = bucket(seconds)
        worker.latency.add_to_bucket(index, now, runs)
        metrics.between_tokens.add_to_bucket(index, now, runs)
        metrics.between_tokens_s += seconds * runs

    def _flush(self, touched: list[Client]) -> None:
        for client in touched:
            if client.runs:
                self._out.append(
                    ToClient(client.identity, Tokens(runs=client.runs, begun=client.begun))
                )
                client.runs = []
                if client.begun:
                    client.begun = []

    def _first_heard(
        self, worker: Worker, request: Request, touched: list[Client], now: float
    ) -> None:
        """Handle a run that is the first, answers an Adopt, or completes a pending terminal."""
        attempt = request.attempt
        if not attempt.answered:
            attempt.answered = attempt.server is worker
        if not request.started:
            self._started(request, now)
        pending = attempt.pending
        if pending is not None and request.next >= pending.position:
            self._flush(touched)
            self._finish(request, pending, now)

    def _started(self, request: Request, now: float) -> None:
        """Note that the prompt is computed: the first token or the embedding has arrived."""
        request.started = True
        request.first_at = now
        attempt = request.attempt
        if attempt.uncached >= 0:
            worker = attempt.assignee
            if worker is not None:
                worker.turned = now
            attempt.leave_prompt()
        self._admission.started(request, self._registry.prefills, now)
        client = request.client
        if (
            request.gateway
            and client is not None
            and not (request.whole or request.embeds or client.behind)
        ):  # the others send no run now, with which it would leave
            client.begun.append(begun(request))
        if request.submitted_at != NEVER:
            seconds, metrics = now - request.submitted_at, self._metrics
            index = bucket(seconds)
            metrics.first_tokens.add_to_bucket(index, now)
            metrics.first_tokens_s += seconds
            prefill = attempt.prefill
            if prefill is not None:
                prefill.latency.add_to_bucket(index, now)

    def _irregular(
        self, worker: Worker, request: Request, run: TokenRun, now: float
    ) -> TokenRun | None:
        """Handle a run that is not the expected next one; return its part to relay, or None."""
        attempt = request.attempt
        if attempt.server is not worker or run.attempt != attempt.number:
            if not self._current(worker, request, run.attempt, now):
                return None
            if request.state is _ASSIGNED:
                self._lifecycle.accepted(request)
            # After the handoff, a late first token may still arrive from the prefill worker.
            attempt = request.attempt
            late = request.state is _DECODING and worker.role == "prefill"
            if attempt.server is not worker and not late:
                self._lifecycle.served_by(request, worker)
        if run.position > request.next:
            self._drop("tokens_ahead")
            self._lifecycle.ask_again(request, now)
            return None
        skip = request.next - run.position
        attempt.answered = attempt.answered or attempt.server is worker
        if skip >= len(run.tokens):
            self._drop("repeated_tokens")
            return None
        if not skip:
            return run
        logprobs = None if run.logprobs is None else run.logprobs[skip:]
        tokens = run.tokens[skip:]
        return TokenRun(run.request, run.attempt, request.next, tokens, logprobs, run.media)

    def _unknown(self, worker: Worker, key: bytes, attempt: int, now: float) -> None:
        """Drop a message about a request without a record; abort it unless it may be resumed."""
        self._drop("unknown_request")
        self._takeover.unclaimed.unknown(worker, key, attempt, now)

    def _current(
        self, worker: Worker, request: Request, attempt: int, now: float, proof: bytes = b""
    ) -> bool:
        """True if a worker's message is about the current attempt; abort a lower attempt there."""
        key, current = request.key, request.attempt
        if self._is_foreign(worker, request, attempt, now, proof):
            return False
        if request.state is State.RECOVERING and attempt >= current.number:
            if worker.aborts.get(key, (0,))[0] >= attempt:
                self._drop("late_attempt")  # sent before our Abort arrived, which releases it
                return False
            self._takeover.found(request, worker, attempt, now)
            return True
        if request.state is _QUEUED and attempt >= current.number:
            current.number = attempt + 1  # from before this router's start
        if request.state not in PLACED:
            last = current.number if request.done else current.number - 1
            if attempt <= last:
                self._drop("late_attempt")
                self._lifecycle.abort_on(worker, key, attempt, request.deadline, "over")
                if request.state is State.RECOVERING:
                    self._takeover.denied(request, worker, now)  # it holds only an old attempt
            return False
        if attempt < current.number:
            self._drop("late_attempt")
            self._lifecycle.abort_on(worker, key, attempt, request.deadline, "superseded")
            return False
        if attempt > current.number:  # assigned by another router
            current.number = attempt
            if request.state is _DECODING and worker.role == "prefill":
                request.step(Step.REASSIGN)
                self._lifecycle.served_by(request, worker)
        return True

    def _is_foreign(
        self, worker: Worker, request: Request, attempt: int, now: float, proof: bytes = b""
    ) -> bool:
        """True if the worker must first prove its assignment; it is asked with Adopt.

        A message of a lower attempt has no effect on the request, so it needs no proof.
        """
        current = request.attempt
        if worker is current.prefill or worker is current.decode:
            return False
        if request.done or attempt < current.number:
            return False
        if self._proofs.shown(worker, request, attempt, proof):
            return False
        self._drop("unproven")
        if self._proofs.may_ask(worker, request, now):
            self._send(worker.identity, Adopt(request=request.key, position=request.next))
        return True

    # ------------------------------------------------------------------ ends

    def _terminal(self, worker: Worker, message: Terminal, now: float) -> None:
        key, attempt = message.request, message.attempt
        request = self._table.requests.get(key)
        if (
            request is not None
            and request.attempt.server is not worker
            and self._is_foreign(worker, request, attempt, now)
        ):
            return
        placed = request is not None and request.state in PLACED
        if request is None or not placed or attempt < request.attempt.number:
            if not self._may_be_wanted(worker, request, key, attempt, now):
                self._acknowledge(worker, message)
            return
        if request.state is _DECODING and worker.role == "prefill":
            self._acknowledge(worker, message)  # the decode worker decides about the end
            return
        request.attempt.number = attempt
        if request.state is _ASSIGNED:
            self._lifecycle.accepted(request)
        if request.attempt.server is not worker:
            self._lifecycle.served_by(request, worker)
        if message.position > request.next and message.code is None:
            request.attempt.pending = message  # not acknowledged: the worker keeps the tokens
            self._lifecycle.ask_again(request, now)
            return
        self._finish(request, message, now)

    def _may_be_wanted(
        self, worker: Worker, request: Request | None, key: bytes, attempt: int, now: float
    ) -> bool:
        """True if a worker should keep the terminal and tokens of a request that may be resumed."""
        if request is None:
            return self._takeover.unclaimed.expected(worker, key, attempt, now)
        return request.state is State.RECOVERING

    def _finish(self, request: Request, message: Terminal, now: float) -> None:
        """Acknowledge a terminal after its last token, and end or replay the request."""
        worker = request.attempt.server
        if worker is not None:
            self._acknowledge(worker, message)
        if message.code == HandoffFailed.code:
            self._lifecycle.lost(request, message.message or "the handoff failed", now)
            return
        if message.code is None and now >= request.deadline:
            # A timer waits for its tick, and an answer may be complete before that.
            late = DeadlineExceeded("the deadline passed before the answer was complete")
            self._lifecycle.fail(request, late, now)
            return
        if message.code is None and not _has_result(request, message):
            kind = "its vector" if request.embeds else "its file"
            error = InternalError(f"the worker ended the request without {kind}")
            self._lifecycle.fail(request, error, now)
            return
        if request.embeds and message.code is None and not request.started:
            self._started(request, now)
        self._lifecycle.end(request, message, now)

    def _acknowledge(self, worker: Worker, message: Terminal) -> None:
        """Acknowledge a terminal; one TerminalAck serves all terminals of an envelope."""
        ends = self._acknowledged.get(worker.identity)
        if ends is None:
            ends = self._acknowledged[worker.identity] = []
            self._send(worker.identity, TerminalAck(requests=ends))
        ends.append((message.request, message.attempt))

    # ------------------------------------------------------------------ answers to Assign

    def _accepted(self, worker: Worker, message: Accepted, now: float) -> None:
        request = self._table.requests.get(message.request)
        if request is None:
            self._unknown(worker, message.request, message.attempt, now)
            return
        attempt = request.attempt
        assignee = attempt.prefill or attempt.decode  # not by the property, which is slow
        expected = worker is assignee and message.attempt == attempt.number
        if expected and request.state is _ASSIGNED:
            self._lifecycle.accepted(request)
            return
        if request.done:
            return  # it ended before this message arrived
        assigned = attempt.runs_on(worker)
        if self._current(worker, request, message.attempt, now, message.proof):
            self._lifecycle.accepted(request)
            if not assigned:
                self._takeover.claimed(request, worker, now)

    def _busy(self, worker: Worker, message: Busy, now: float) -> None:
        """Place the request elsewhere; back off after every few refusals by decode workers."""
        key, attempt = message.request, message.attempt
        request = self._given_back(worker, key, attempt, now, message.proof)
        if request is None:
            return
        full = request.attempt.decode if message.decode_full else worker
        avoid = request.avoid = request.avoid or set()
        if full is not None:
            avoid.add(full.incarnation)
        request.decode_tries += message.decode_full
        tries = self._config.decode_tries
        delay = 0.0
        if message.decode_full and request.decode_tries % tries == 0:
            request.avoid = None
            delay = self._lifecycle.back_off(request, message.retry_after, now)
        cause = f"{worker.id if full is None else full.id}: {message.reason or 'no room'}"
        self._lifecycle.requeue(request, now, cause, delay)

    def _given_back(
        self, worker: Worker, key: bytes, attempt: int, now: float, proof: bytes = b""
    ) -> Request | None:
        """Return the request that a prefill worker could not finish, or None.

        None if the message is outdated, or if the handoff is already finished. The worker then
        gets an Abort.
        """
        request = self._table.requests.get(key)
        if request is None:
            self._unknown(worker, key, attempt, now)
            return None
        if not self._current(worker, request, attempt, now, proof):
            return None
        if request.state is _DECODING:
            if worker is not request.attempt.server:  # else an answer to an Assign sent before
                self._lifecycle.abort_on(worker, key, attempt, request.deadline, "handed over")
            return None
        return request

    def _aborted(self, worker: Worker, message: Aborted, now: float) -> None:
        """Handle a worker's report that it does not hold an attempt; replay a current one."""
        key, attempt = message.request, message.attempt
        waiting = worker.aborts.get(key)
        if waiting is not None and attempt >= waiting[0]:
            del worker.aborts[key]
            if attempt == waiting[0]:
                return
        request = self._table.requests.get(key)
        if request is not None and request.state is State.RECOVERING and not attempt:
            self._takeover.denied(request, worker, now)
            return
        current = None if request is None else request.attempt
        if request is None or current is None or worker not in (current.assignee, current.server):
            return
        asked = not current.answered or request.state is State.FOLLOWED
        unknown_there = not attempt and asked and current.server is worker
        if unknown_there or attempt >= current.number:
            if request.state is _DECODING and worker is current.prefill:
                return
            current.number = max(current.number, attempt)
            self._lifecycle.lost(request, f"worker {worker.id} does not have it", now)

    def _peer_lost(self, worker: Worker, message: PeerLost, now: float) -> None:
        """Use another pair: the decode worker is unreachable from there, or incompatible."""
        request = self._given_back(worker, message.request, message.attempt, now)
        if request is None:
            return
        decode = request.attempt.decode
        reason = f"worker {worker.id} cannot reach {message.endpoint}: {message.reason}"
        if message.refused or decode is None or worker is decode:
            avoid = request.avoid = request.avoid or set()
            if decode is not None:
                avoid.add(decode.incarnation)
            self._lifecycle.lost(request, reason, now)
            return
        self._failed_pairs.failed(worker, decode, message.reason, now)
        if not {worker.incarnation, decode.incarnation} <= {*request.shunned}:
            request.shunned += (worker.incarnation, decode.incarnation)
        self._lifecycle.unreachable(request, reason, now)

    def _handoff(self, worker: Worker, message: HandoffReport, now: float) -> None:
        key, number = message.request, message.attempt
        request = self._table.requests.get(key)
        attempt = None if request is None else request.attempt
        if message.prefill != worker.id or (attempt is not None and worker is not attempt.prefill):
            self._drop("unproven")
            return
        if (self._reported.get(key) or 0) >= number:
            return
        self._reported.put(key, number)
        self._handoffs.add(message, b"" if request is None else request.owner)
        if self._failed_pairs.known:
            self._passed_on(worker, message)
        if request is None or attempt is None or number != attempt.number:
            self._stories.handed_over(message, worker, now)
            return
        attempt.report, attempt.reported_at = message, now
        if message.times is not None:
            self._metrics.prefilled(request, attempt, message.times)
        if request.state is _ASSIGNED:
            self._lifecycle.accepted(request)
        state = request.state
        if state is not _PREFILLING and state is not _FOLLOWED:
            return
        if attempt.decode is not None:
            self._lifecycle.handed_over(request)
        elif (decode := self._registry.find(message.decode)) is not None:
            self._lifecycle.served_by(request, decode)  # its tokens went to another router
            attempt.answered = True  # the last Adopt went to another worker
            self._lifecycle.ask_again(request, now)

    def _passed_on(self, worker: Worker, message: HandoffReport) -> None:
        """Clear a failed pair after a finished handoff."""
        decode = self._registry.find(message.decode)
        if decode is not None:
            self._failed_pairs.handed_over(worker, decode)

    def _moved(self, worker: Worker, message: Moved, now: float) -> None:
        """Drop the record of a request that another router serves."""
        request = self._table.requests.get(message.request)
        if request is None or request.done or request.state is State.RECOVERING:
            return  # RECOVERING: the client resumed it here since
        if request.attempt.runs_on(worker):
            self._takeover.moved(request, message.router, now)

    # ------------------------------------------------------------------ keep-alive

    def _ping(self, worker: Worker, message: Ping, _now: float) -> None:
        self._send(worker.identity, Pong(nonce=message.nonce))

    def _pong(self, worker: Worker, message: Pong, _now: float) -> None:
        """Ignore: a Pong needs no answer."""

    def _drop(self, reason: str) -> None:
        self._metrics.dropped[reason] += 1

    def _send(self, identity: bytes, message: Message) -> None:
        self._out.append(ToWorker(identity, message))


def _has_result(request: Request, terminal: Terminal) -> bool:
    """Whether a terminal without an error carries what its kind of request asked for."""
    if request.embeds:
        return terminal.embedding is not None
    return terminal.media is not None if request.work.file else True
