"""The life of a request: place it on workers, place it again, end it, drop its record.

Invariant: a request has at most one current attempt. A new placement raises the attempt number,
and the router repeats an Abort of the lower attempt at each live worker until the worker confirms.
A request ends with exactly one terminal. Its record stays until the terminal is acknowledged or
expires.

Theory of operation
-------------------

Each message can be lost, repeated or late, and a worker can compute an attempt for seconds after
this router gave it up. Four rules make that harmless.

**Attempts are numbered.** A worker that receives an Assign drops its lower attempts, and the router
relays nothing of them. So the next attempt starts at once, while the Abort of the last one is under
way: blocks wait for that Abort, the client does not. Rejected: start the next attempt after the
Aborted of the last. A worker that does not answer is the usual reason for a new attempt.

**The side that needs an answer repeats its message**: Assign until the worker accepts or declines
it, Abort until Aborted, a terminal until the client acknowledges it. Each is repeated with
back-off, and until the deadline at most. Repeating a message changes nothing, so a reconnection or
a restart needs no rule of its own. Rejected: rely on the delivery of ZeroMQ, which ends with each
connection.

**One entrance, one exit.** :meth:`Lifecycle.place` alone puts a request on workers, and
:meth:`Lifecycle.end` alone gives it a terminal: a result, an error or a cancellation. Both change
the state by :meth:`.Request.step`, which raises for a step that :data:`.TRANSITIONS` lacks. So a
message in the wrong state cannot place or end a request twice. Only :meth:`Lifecycle.drop_moved`
leaves without a terminal: another router serves the request, and its workers must go on.

**A record outlives its request.** It answers a client that missed the terminal, and a worker whose
message about the request is late. Admission counts its memory until it is dropped.

A request that cannot be placed waits for one of three things. If every worker declined it in this
round, it is tried again with back-off. If workers have died or disconnected under it, it waits
until they are known to be alive or dead, so that a request that crashes workers does not reach a
third one. If no worker is ready, it waits for ``worker_grace_s``, since a killed worker is back
within seconds; then it ends with CapacityError and a retry time, since its client may have another
cluster to ask.

A client that reads slowly has no queue of messages here. Its tokens are kept with the request, and
are sent from the first missing position on once the client reads again.

:mod:`.client_messages` and :mod:`.worker_messages` receive the messages and call this module.
"""

from __future__ import annotations

from collections import deque
from math import floor

from baton.proto.errors import (
    BatonError,
    CapacityError,
    FeatureMissing,
    InternalError,
    LimitExceeded,
    RequestPoisoned,
    WorkerLost,
)
from baton.proto.requests import check_emitted, check_wire_context
from baton.proto.wire.messages import Abort, Adopt, Assign, Terminal
from baton.proto.wire.proofs import Terms, assignment
from baton.proto.wire.token_runs import messages_of

from .clients import runs_from
from .config import STEP_SHARE
from .events import Log, NotSent, ToClient, ToWorker
from .records import ENDED_KEEP_S, NEVER, Request, Worker
from .served import served_times
from .state import RouterState
from .states import BEFORE_DECODE, PLACED, State, Step
from .stories import MAX_CAUSE_CHARS, MAX_MESSAGE_CHARS, MAX_PAST

POISON_BLAME = 1.5
"""A request with more blame than this is poisoned.

The blame for a death is shared equally by the requests on the worker. So a request is poisoned if
it was alone, or nearly alone, at two deaths. A single kill by an operator poisons no request."""
MAX_UNHEARD = 6
"""Unanswered Adopts after which a decode worker is assumed not to have the request."""
UNKNOWN_ABORTS = 1024
"""Above this number, Aborts of requests without a record are sent, but not repeated."""
_QUEUED, _DECODING = State.QUEUED, State.DECODING
_ASSIGNED = State.ASSIGNED  # before Python 3.12, Enum member access is slow
_ASSIGN, _ACCEPT, _HAND_OVER = Step.ASSIGN, Step.ACCEPT, Step.HAND_OVER
_END, _FORGET = Step.END, Step.FORGET


class Lifecycle:
    """Places and ends requests: sends Assign and Abort to workers, and terminals to clients."""

    def __init__(self, state: RouterState) -> None:
        self._config = state.config
        self._key = state.config.key
        self._incarnation = state.incarnation
        self._out = state.out
        self._table = state.table
        self._registry = state.registry
        self._placement = state.placement
        self._admission = state.admission
        self._clients = state.clients
        self._metrics = state.metrics
        self._stories = state.stories
        self._errors = state.errors
        self._apart: dict[bytes, Request] = {}
        """Suspects that wait because others run on the workers, the longest waiting one first."""

    # ------------------------------------------------------------------ placing

    def start(self, request: Request, now: float) -> None:
        """Place an admitted request, or queue it until workers are ready."""
        self._table.add(request)
        self._table.queued[request.key] = request
        request.own = request.attempt.number
        request.submitted_at = now
        self._metrics.submitted += 1
        self.place(request, now)

    def place(self, request: Request, now: float) -> None:
        """Choose workers for a queued request and assign it, or keep it queued."""
        if request.doubts and self._may_be_poisoned(request):
            self._table.wake(request, now + self._config.doubt_retry_s, now)
            return
        try:
            card = self._registry.card
            if request.unchecked and card is not None:
                check_wire_context(request.context, card)
                check_emitted(request.context, request.emitted, card)
                request.unchecked = False
            pair = self._placement.choose(request, now)
        except InternalError:
            raise  # its text is for the log
        except BatonError as error:
            self.fail(request, error, now)
            return
        if pair is None:
            self._wait(request, now)
            return
        if self._apart:
            self._apart.pop(request.key, None)
        attempt = request.attempt
        prefill, decode = attempt.prefill, attempt.decode = pair
        if prefill is not None:
            prefill.requests[request.key] = request
        if decode is not None:
            decode.requests[request.key] = request
        attempt.route = self._placement.placed(request, now)
        if prefill is None:
            self._metrics.local[attempt.route[-1].partition(":")[0]] += 1
        attempt.assigned_at = now
        request.step(_ASSIGN)
        del self._table.queued[request.key]
        request.backoff = self._config.assign_retry_s
        self.assign(request, now)

    def _may_be_poisoned(self, request: Request) -> bool:
        """True if the request is poisoned once all of its doubts prove to be deaths.

        Such a request waits until those workers have returned or are declared dead. So it crashes
        no further worker meanwhile, and closed connections alone never poison a request.
        """
        ends = request.deaths + len(request.doubts)
        return ends >= self._config.poison_deaths and not request.progressed

    def assign(self, request: Request, now: float) -> None:
        """Send the Assign, and repeat it until it is answered."""
        attempt = request.attempt
        prefill, decode = attempt.prefill, attempt.decode
        receiver = decode if prefill is None else prefill
        if receiver is None:
            return
        there = decode.holder if decode else None
        handoff = None if prefill is None else there
        left = request.deadline - now
        seconds = (floor(left) if left > 0 else 0) + 2  # rounded up
        proof, decode_proof, ticket = assignment(
            self._key, request.key, attempt.number, receiver.holder, handoff, self._incarnation,
            Terms(request.positions_on(receiver), floor(now), seconds),  # floor is faster than int
        )  # fmt: skip
        waited = now - request.submitted_at
        message = Assign(
            request=request.key,
            attempt=attempt.number,
            request_id=request.request_id,
            context=request.context,
            emitted=request.emitted.tolist(),
            decode=decode.endpoint if decode else "",
            decode_incarnation=there.incarnation if there else 0,
            decode_key=there.key if there else b"",
            deadline=left,
            waited=waited if waited > 0 else 0.0,  # also for a resumed request
            slo_ttft=request.slo_ttft,
            step_limit=STEP_SHARE * request.slo_itl,
            proof=proof,
            decode_proof=decode_proof,
            ticket=ticket,
        )
        self._out.append(ToWorker(receiver.identity, message))
        self._table.repeat_later(request, now, self._config.retry_ceiling_s)

    def accepted(self, request: Request) -> None:
        """Note that a worker has accepted the current attempt."""
        if request.state is _ASSIGNED:
            if request.attempt.prefill is None:
                self.handed_over(request)
            else:
                request.step(_ACCEPT)
                request.attempt.server = request.attempt.prefill
            request.retry_at = NEVER
            request.due_at = request.limit  # the wheel's slot is earlier; there it is armed again

    def requeue(self, request: Request, now: float, cause: str, delay: float = 0.0) -> None:
        """Abort the current attempt and place the next one, now or after ``delay`` seconds."""
        self.abort(request, "superseded")
        attempt = request.attempt
        attempt.leave(request.key)
        self._place_next_apart(now)
        attempt.ended_at, attempt.cause = now, cause[:MAX_CAUSE_CHARS]
        attempt.pending = None
        if request.past is None:
            request.past = deque(maxlen=MAX_PAST)
        request.past.append(attempt)
        request.attempt = attempt.next()
        request.own = min(request.own, request.attempt.number)
        request.step(Step.REQUEUE)
        self._table.queued[request.key] = request
        if delay > 0:
            self._table.wake(request, now + delay, now)
        else:
            self.place(request, now)

    def back_off(self, request: Request, least: float, now: float) -> float:
        """Return the next back-off in seconds, at least ``least``; doubles up to a limit."""
        config = self._config
        delay = min(max(least, request.patience), config.busy_ceiling_s)
        request.patience = min(2 * delay, config.busy_ceiling_s)
        return delay

    def retry_waiting(self, now: float) -> None:
        """Place the requests that wait for a ready worker."""

        def retry(request: Request) -> None:
            if request.attempt.grace_until != NEVER and request.state is State.QUEUED:
                self.place(request, now)

        self._errors.each(list(self._table.queued.values()), retry)

    def _wait(self, request: Request, now: float) -> None:
        """Wait for a pair of workers; fail after the grace period if no worker is ready."""
        if request.avoid or self._placement.kept_apart(request):  # every worker was tried
            if not request.avoid:
                self._apart[request.key] = request
            request.avoid = None
            delay = self.back_off(request, self._config.busy_backoff_s, now)
            self._table.wake(request, now + delay, now)
            return
        attempt = request.attempt
        ever = self._registry.ever_ready
        grace = self._config.worker_grace_s if ever else self._config.start_grace_s
        if attempt.grace_until == NEVER:
            attempt.grace_until = now + grace
        if now < attempt.grace_until:
            self._table.wake(request, attempt.grace_until, now)
            return
        hint = max(1.0, self._admission.retry_after())
        where = f" in pool {request.pool!r}" if request.pool else ""
        missing = self._registry.missing(request.roles, request.pool)
        roles = " and no ".join(missing or request.roles)
        reason = f"no {roles} worker was ready{where} for {grace:g} s"
        self.fail(request, CapacityError(reason, retry_after=hint), now)

    def _place_next_apart(self, now: float) -> None:
        """Place the next suspect at the next tick, since a request has left its workers.

        Its back-off alone would leave the workers idle between two suspects.
        """
        while self._apart:
            key, request = next(iter(self._apart.items()))
            del self._apart[key]
            if request.state is _QUEUED:
                self._table.wake(request, now, now)
                return

    # ------------------------------------------------------------------ work on workers

    def handed_over(self, request: Request) -> None:
        """Note that a decode worker has the request, which depends on no prefill worker."""
        request.step(_HAND_OVER)
        request.unreachable, request.shunned = "", ()
        attempt = request.attempt
        attempt.server = attempt.decode
        attempt.leave_prefill(request.key)

    def abort(self, request: Request, reason: str) -> None:
        """Abort the current attempt on its workers."""
        attempt = request.attempt
        for worker in (attempt.prefill, attempt.decode):
            if worker is not None and worker.live:
                self.abort_on(worker, request.key, attempt.number, request.deadline, reason)

    def abort_on(self, worker: Worker, key: bytes, attempt: int, until: float, reason: str) -> None:
        """Send an Abort, which the timers repeat until it is confirmed or ``until`` has passed."""
        known = worker.aborts.get(key)
        if known is not None and known[0] >= attempt:
            return
        # Without a record, the worker chose the request: it could make this table grow for ever.
        # It repeats what it reports, so an Abort that was lost is sent again.
        if known is not None or until < NEVER or len(worker.aborts) < UNKNOWN_ABORTS:
            worker.aborts[key] = (attempt, NEVER, until)
        abort = Abort(request=key, attempt=attempt, reason=reason)
        self._out.append(ToWorker(worker.identity, abort))

    # ------------------------------------------------------------------ lost messages and attempts

    def reclaim(self, request: Request, now: float) -> None:
        """Ask the worker for the tokens again after a Resume of a known request."""
        if request.running:
            self.ask_again(request, now)

    def served_by(self, request: Request, worker: Worker) -> None:
        """Record that ``worker`` holds the current attempt."""
        attempt = request.attempt
        worker.requests[request.key] = request
        if worker.role == "prefill":
            if attempt.prefill is not worker:
                attempt.leave_prefill(request.key)
            attempt.prefill = attempt.server = worker
            return
        if attempt.decode is not worker:
            attempt.leave_decode(request.key)
        attempt.decode = worker
        self.handed_over(request)

    def ask_again(self, request: Request, now: float) -> None:
        """Send Adopt for the tokens from ``next`` on, and repeat it until the worker answers."""
        attempt = request.attempt
        if not attempt.answered and request.retry_at != NEVER:
            return  # already asking
        attempt.answered, attempt.adopts = False, 0
        request.backoff = self._config.adopt_retry_s
        self.ask(request, now)

    def ask(self, request: Request, now: float) -> None:
        """Send Adopt once; after too many unanswered ones the attempt counts as lost."""
        attempt, server = request.attempt, request.attempt.server
        if server is None:
            self.lost(request, "no worker is known to hold it", now)
            return
        if server.role == "decode" and attempt.adopts >= MAX_UNHEARD:
            self.lost(request, f"worker {server.id} does not hold it", now)
            return
        attempt.adopts += 1
        adopt = Adopt(request=request.key, position=request.next)
        self._out.append(ToWorker(server.identity, adopt))
        config = self._config
        followed = request.state is State.FOLLOWED
        ceiling = config.adopt_retry_s if followed else config.retry_ceiling_s
        self._table.repeat_later(request, now, ceiling)

    def lost(self, request: Request, reason: str, now: float) -> None:
        """Replay a request whose attempt was lost; fail it if it is poisoned or lost too often."""
        if request.state not in PLACED:
            return
        config = self._config
        request.start_over()
        request.losses += 1
        if self.end_poisoned(request, now):
            return
        if request.losses >= config.max_attempts:
            text = f"{request.losses} attempts were lost, the last because {reason}"
            self.fail(request, WorkerLost(text), now)
        else:
            self._metrics.replayed += 1
            self._out.append(
                Log("request.replayed", {"request_id": request.request_id, "reason": reason})
            )
            self.requeue(request, now, reason)

    def unreachable(self, request: Request, reason: str, now: float) -> None:
        """Move a request of a failed pair to another pair.

        The request did not cause the failure, so this is neither a death nor a lost attempt. If
        all pairs fail, it is retried with back-off until a pair works or its deadline passes.
        """
        if request.state not in PLACED:
            return
        request.unreachable = reason[:MAX_MESSAGE_CHARS]
        self._metrics.replayed += 1
        self._out.append(
            Log("request.replayed", {"request_id": request.request_id, "reason": reason})
        )
        delay = 0.0
        try:
            if self._placement.all_failed(request, now):
                delay = self.back_off(request, self._config.busy_backoff_s, now)
        except (WorkerLost, FeatureMissing) as error:
            self.fail(request, error, now)
            return
        self.requeue(request, now, reason, delay)

    def end_poisoned(self, request: Request, now: float) -> bool:
        """Fail the request with RequestPoisoned and return True if it is poisoned."""
        deadly = request.deaths >= self._config.poison_deaths
        if request.done or not deadly or request.blame <= POISON_BLAME or request.progressed:
            return False
        text = f"{request.deaths} workers died with this request; it is not retried"
        self.fail(request, RequestPoisoned(text), now)
        return True

    # ------------------------------------------------------------------ streams to clients

    def resend(self, request: Request, position: int) -> None:
        """Send the client all kept tokens from ``position`` on, and the terminal if it is known."""
        client = request.client
        if client is None:
            return
        if client.behind:
            request.sent = position
            return
        request.sent = -1
        for message in messages_of(runs_from(request, position)):
            self._out.append(ToClient(client.identity, message))
        if request.terminal is not None:
            self._out.append(ToClient(client.identity, request.terminal))

    def hand_out(self, request: Request) -> None:
        """Send the rest even to a client that reads too slowly: the record is dropped next."""
        if request.client is not None and request.sent >= 0:
            behind, request.client.behind = request.client.behind, False
            self.resend(request, request.sent)
            request.client.behind = behind

    # ------------------------------------------------------------------ ending

    def fail(self, request: Request, error: BatonError, now: float) -> None:
        """End a request with an error, and abort it on its workers."""
        terminal = Terminal(
            request=request.key,
            attempt=request.attempt.number,
            position=request.next,
            code=error.code,
            message=str(error),
            retry_after=error.retry_after,
        )
        self.abort(request, error.code)
        self.end(request, terminal, now)

    def not_sent(self, event: NotSent, now: float) -> None:
        """Fail the request of an Assign that is too large for any envelope."""
        message = event.message
        if isinstance(message, Assign):
            request = self._table.requests.get(message.request)
            if request is None or request.done or request.attempt.number != message.attempt:
                return
            self.fail(request, LimitExceeded(event.reason), now)

    def cancel(self, request: Request, now: float, reason: str) -> None:
        """End a request that its client has cancelled, or whose client is disconnected."""
        terminal = Terminal(
            request=request.key,
            attempt=request.attempt.number,
            position=request.next,
            status="cancelled",
        )
        self.abort(request, reason)
        request.attempt.cause = reason
        self._out.append(
            Log("request.cancelled", {"request": request.key.hex(), "reason": reason, "at": now})
        )
        self.end(request, terminal, now)

    def end(self, request: Request, terminal: Terminal, now: float) -> None:
        """End the request: send its terminal to the client and keep it until acknowledged."""
        attempt = request.attempt
        state = request.state
        if state is _QUEUED:
            del self._table.queued[request.key]
        request.step(_END)
        self._metrics.ended(request, terminal, now)
        self._stories.ended(request, terminal, now)
        self._admission.end(request)
        prefill, decode = attempt.prefill, attempt.decode
        if state in BEFORE_DECODE and prefill is not None and decode is not None and decode.live:
            # The prefill worker releases its grant there; nothing depends on that.
            self.abort_on(decode, request.key, attempt.number, request.deadline, "ended")
        request.terminal = Terminal(
            request=request.key,
            attempt=terminal.attempt,
            position=terminal.position,
            status=terminal.status,
            code=terminal.code,
            message=terminal.message,
            retry_after=terminal.retry_after,
            request_id=request.request_id,
            cached_tokens=terminal.cached_tokens,
            prefill=terminal.prefill or (prefill.id if prefill else ""),
            decode=terminal.decode or (decode.id if decode and state is _DECODING else ""),
            embedding=terminal.embedding if request.embeds else None,
            media=terminal.media if request.work.file else None,
            served=served_times(request, terminal) if request.gateway else None,
            tokens_s=now - request.first_at if request.whole and request.started else 0.0,
        )
        attempt.leave(request.key)
        if self._apart:
            self._place_next_apart(now)
        if request.deadline < now + ENDED_KEEP_S:
            request.deadline = now + ENDED_KEEP_S
        request.limit = request.deadline
        request.backoff = self._config.terminal_retry_s
        self.send_terminal(request, now)

    def send_terminal(self, request: Request, now: float) -> None:
        """Send the terminal, and repeat it until it is acknowledged."""
        client = request.client
        if client is not None and request.terminal is not None:
            if client.behind:
                if request.sent < 0:
                    request.sent = request.next
            elif request.sent >= 0:
                self.resend(request, request.sent)
            else:
                self._out.append(ToClient(client.identity, request.terminal))
        self._table.repeat_later(request, now, NEVER)

    def drop_moved(self, request: Request, router: str, now: float) -> None:
        """Drop the record of a request that ``router`` serves, without aborting it."""
        request.step(Step.END)
        self._stories.moved(request, router, now)
        self._table.queued.pop(request.key, None)
        self._admission.end(request)
        request.attempt.leave(request.key)
        self._place_next_apart(now)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Drop the record of an ended request."""
        request.step(_FORGET)
        if request.client is not None:
            self._clients.detach(request)
        self._admission.forget(request)
        self._table.remove(request)
        self._stories.forgotten(request)
