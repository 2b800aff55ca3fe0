"""The life of a request: place it on workers, place it again, end it, drop its record.

Invariant: a request has at most one current attempt. A new placement raises the attempt number,
and the router repeats an Abort of the lower attempt at each live worker until the worker confirms.
A request ends with exactly one terminal. Its record stays until the terminal is acknowledged or
expires.

:mod:`.client_messages` and :mod:`.worker_messages` receive the messages and call this module.
"""

from __future__ import annotations

from collections import Counter

from ..proto.errors import BatonError, CapacityError
from ..proto.requests import check_emitted, check_wire_context
from ..proto.wire.messages import Abort, Assign, Terminal, Tokens
from ..proto.wire.proofs import assignment
from .admission import Admission
from .clients import Clients
from .config import RouterConfig
from .events import Action, Log, ToClient, ToWorker
from .latency import Latency
from .placement import Placement
from .policy import make_policy
from .recent import Recent
from .requests import NEVER, Request, State, Step
from .timer_wheel import Wheel
from .tombstones import Tombstones
from .workers import Registry, Worker

ENDED_KEEP_S = 5.0
"""Minimum seconds for which a terminal is kept, also after the deadline."""
REMEMBER_ATTEMPTS = 16_384
"""Number of dropped requests whose last attempt number is remembered."""
_ASSIGNED = State.ASSIGNED  # before Python 3.12, Enum member access is slow
_ASSIGN, _ACCEPT, _HAND_OVER = Step.ASSIGN, Step.ACCEPT, Step.HAND_OVER
_END, _FORGET = Step.END, Step.FORGET


class Counters:
    """Numbers of requests by outcome since the start.

    ``dropped``: messages and token runs without effect, by reason.
    """

    __slots__ = ("cancelled", "dropped", "failed", "finished", "moved", "replayed", "submitted")

    def __init__(self) -> None:
        self.submitted = self.finished = self.failed = self.cancelled = 0
        self.replayed = self.moved = 0
        self.dropped: Counter[str] = Counter()

    def count(self, terminal: Terminal) -> None:
        """Count a terminal by its outcome."""
        if terminal.status == "cancelled" or terminal.code == "cancelled":
            self.cancelled += 1
        elif terminal.code:
            self.failed += 1
        else:
            self.finished += 1


class Lifecycle:
    """All requests of this router, and the state shared by the modules of the core."""

    def __init__(self, config: RouterConfig, now: float) -> None:
        self.config = config
        self._key = config.key
        self.registry = Registry(config, now)
        self.placement = Placement(
            self.registry, make_policy(config.policy, config.name), config.policy
        )
        self.admission = Admission(config.admission, now)
        self.clients = Clients()
        self.requests: dict[bytes, Request] = {}
        self.queued: dict[bytes, Request] = {}
        self.wheel: Wheel[Request] = Wheel()
        self.counters = Counters()
        self.first_tokens = Latency()
        self.between_tokens = Latency()
        self.tombstones = Tombstones()
        self.out: list[Action] = []
        self._last_attempts: Recent[bytes, int] = Recent(REMEMBER_ATTEMPTS)

    # ------------------------------------------------------------------ placing

    def start(self, request: Request, now: float) -> None:
        """Place an admitted request, or queue it until workers are ready."""
        self.requests[request.key] = request
        self.queued[request.key] = request
        request.own = request.attempt.number
        request.submitted_at = now
        self.counters.submitted += 1
        self.place(request, now)

    def place(self, request: Request, now: float) -> None:
        """Choose workers for a queued request and assign it, or keep it queued."""
        if request.doubts and self._may_be_poisoned(request):
            self.wake(request, now + self.config.doubt_retry_s, now)
            return
        try:
            card = self.registry.card
            if request.unchecked and card is not None:
                check_wire_context(request.context, card)
                check_emitted(request.context, request.emitted, card)
                request.unchecked = False
            pair = self.placement.choose(request, now)
        except BatonError as error:
            self.fail(request, error, now)
            return
        if pair is None:
            self._wait(request, now)
            return
        attempt = request.attempt
        prefill, decode = attempt.prefill, attempt.decode = pair
        prefill.requests[request.key] = request
        if decode is not None:
            decode.requests[request.key] = request
        self.placement.placed(request)
        request.step(_ASSIGN)
        del self.queued[request.key]
        request.backoff = self.config.assign_retry_s
        self.assign(request, now)

    def _may_be_poisoned(self, request: Request) -> bool:
        """True if the request is poisoned once all of its doubts prove to be deaths.

        Such a request waits until those workers have returned or are declared dead. So it crashes
        no further worker meanwhile, and closed connections alone never poison a request.
        """
        ends = request.deaths + len(request.doubts)
        return ends >= self.config.poison_deaths and not request.progressed

    def assign(self, request: Request, now: float) -> None:
        """Send the Assign, and repeat it until it is answered."""
        attempt = request.attempt
        prefill, decode = attempt.prefill, attempt.decode
        if prefill is None:
            return
        there = decode.incarnation if decode else None
        proof, decode_proof, ticket = assignment(
            self._key, request.key, attempt.number, prefill.incarnation, there
        )
        message = Assign(
            request=request.key,
            attempt=attempt.number,
            request_id=request.request_id,
            context=request.context,
            emitted=request.emitted.tolist(),
            decode=decode.endpoint if decode else "",
            decode_incarnation=there or 0,
            deadline=request.deadline - now,
            waited=max(0.0, now - request.submitted_at) if request.submitted_at < NEVER else 0.0,
            proof=proof,
            decode_proof=decode_proof,
            ticket=ticket,
        )
        self.out.append(ToWorker(prefill.identity, message))
        self.repeat_later(request, now, self.config.retry_ceiling_s)

    def accepted(self, request: Request) -> None:
        """Note that a worker has accepted the current attempt."""
        if request.state is _ASSIGNED:
            request.step(_ACCEPT)
            request.attempt.server = request.attempt.prefill
            request.retry_at = NEVER
            request.due_at = request.limit  # the wheel's slot is earlier; there it is armed again

    def requeue(self, request: Request, now: float, delay: float = 0.0) -> None:
        """Abort the current attempt and place the next one, now or after ``delay`` seconds."""
        self.abort(request, "superseded")
        self.release(request)
        request.attempt = request.attempt.next()
        request.own = min(request.own, request.attempt.number)
        request.step(Step.REQUEUE)
        self.queued[request.key] = request
        if delay > 0:
            self.wake(request, now + delay, now)
        else:
            self.place(request, now)

    def back_off(self, request: Request, least: float, now: float) -> float:
        """Return the next back-off in seconds, at least ``least``; doubles up to a limit."""
        config = self.config
        delay = min(max(least, request.patience), config.busy_ceiling_s)
        request.patience = min(2 * delay, config.busy_ceiling_s)
        return delay

    def retry_waiting(self, now: float) -> None:
        """Place the requests that wait for a ready worker."""
        for request in list(self.queued.values()):
            if request.attempt.grace_until != NEVER and request.state is State.QUEUED:
                self.place(request, now)

    def _wait(self, request: Request, now: float) -> None:
        """Wait for a pair of workers; fail after the grace period if no worker is ready."""
        if request.avoid or self.placement.kept_apart(request):  # every worker was tried
            request.avoid = None
            delay = self.back_off(request, self.config.busy_backoff_s, now)
            self.wake(request, now + delay, now)
            return
        attempt = request.attempt
        if attempt.grace_until == NEVER:
            ever = self.registry.ever_ready
            grace = self.config.worker_grace_s if ever else self.config.start_grace_s
            attempt.grace_until = now + grace
        if now < attempt.grace_until:
            self.wake(request, attempt.grace_until, now)
            return
        hint = max(1.0, self.admission.retry_after())
        where = f" in pool {request.pool!r}" if request.pool else ""
        reason = f"no {' and '.join(request.roles)} worker is ready{where}"
        self.fail(request, CapacityError(reason, retry_after=hint), now)

    # ------------------------------------------------------------------ work on workers

    def handed_over(self, request: Request) -> None:
        """Note the end of the handoff: the request no longer depends on its prefill worker."""
        request.step(_HAND_OVER)
        request.unreachable, request.shunned = "", ()
        attempt = request.attempt
        attempt.server = attempt.decode
        attempt.leave_prefill(request.key)

    def release(self, request: Request) -> None:
        """Remove the current attempt from the load of its workers."""
        attempt = request.attempt
        attempt.leave_prefill(request.key)
        attempt.leave_decode(request.key)
        attempt.server = None

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
        worker.aborts[key] = (attempt, NEVER, until)
        abort = Abort(request=key, attempt=attempt, reason=reason)
        self.out.append(ToWorker(worker.identity, abort))

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
        run = request.run_from(position)
        if run is not None:
            self.out.append(ToClient(client.identity, Tokens(runs=[run])))
        if request.terminal is not None:
            self.out.append(ToClient(client.identity, request.terminal))

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

    def cancel(self, request: Request, now: float, reason: str) -> None:
        """End a request that its client has cancelled, or whose client is disconnected."""
        terminal = Terminal(
            request=request.key,
            attempt=request.attempt.number,
            position=request.next,
            status="cancelled",
        )
        self.abort(request, reason)
        self.log("request.cancelled", request=request.key.hex(), reason=reason, at=now)
        self.end(request, terminal, now)

    def end(self, request: Request, terminal: Terminal, now: float) -> None:
        """End the request: send its terminal to the client and keep it until acknowledged."""
        attempt = request.attempt
        decoding = request.state is State.DECODING
        request.step(_END)
        self.queued.pop(request.key, None)
        self.counters.count(terminal)
        self.admission.end(request)
        prefill, decode = attempt.prefill, attempt.decode
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
            decode=terminal.decode or (decode.id if decode and decoding else ""),
            embedding=terminal.embedding if request.embeds else None,
        )
        self.release(request)
        request.limit = request.deadline = max(request.deadline, now + ENDED_KEEP_S)
        request.backoff = self.config.terminal_retry_s
        self.send_terminal(request, now)

    def send_terminal(self, request: Request, now: float) -> None:
        """Send the terminal, and repeat it until it is acknowledged."""
        client = request.client
        if client is not None and request.terminal is not None:
            if not client.behind:
                self.out.append(ToClient(client.identity, request.terminal))
            elif request.sent < 0:
                request.sent = request.next
        self.repeat_later(request, now, NEVER)

    def drop_moved(self, request: Request) -> None:
        """Drop the record of a request that another router serves, without aborting it."""
        request.step(Step.END)
        self.queued.pop(request.key, None)
        self.admission.end(request)
        self.release(request)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Drop the record of an ended request."""
        request.step(_FORGET)
        self.wheel.cancel(request)
        if request.client is not None:
            self.clients.detach(request)
        self.admission.forget(request)
        del self.requests[request.key]
        self._last_attempts.put(request.key, request.attempt.number)  # the highest attempt

    def remember_attempt(self, key: bytes, attempt: int) -> None:
        """Note that all attempts up to ``attempt`` of a request without a record are over."""
        self._last_attempts.put(key, max(attempt, self.last_attempt(key)))

    def last_attempt(self, key: bytes) -> int:
        """Return the last attempt number of a request dropped recently, else 0."""
        return self._last_attempts.get(key, 0)

    # ------------------------------------------------------------------ time

    def wake(self, request: Request, when: float, now: float) -> None:
        """Wake the request at ``when``, or at its limit if that is earlier."""
        request.retry_at = when
        self.wheel.arm(request, when if when < request.limit else request.limit, now)

    def repeat_later(self, request: Request, now: float, ceiling: float) -> None:
        """Wake the request after its back-off, which doubles up to ``ceiling`` seconds."""
        delay = request.backoff
        if delay < ceiling:
            request.backoff = min(2 * delay, ceiling)
        request.retry_at = when = now + delay
        self.wheel.arm(request, when if when < request.limit else request.limit, now)

    def log(self, event: str, **fields: object) -> None:
        """Emit the action for a log line."""
        self.out.append(Log(event, fields))
