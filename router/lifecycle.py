"""What happens to requests: placed on workers, placed again, ended, forgotten.

Invariant: a request has at most one attempt that counts. Placing it again raises the attempt,
and whatever a lower one holds on a live worker is aborted until the worker confirms. Ending
it makes exactly one terminal; the record stays until that is acknowledged or expires.

It knows nothing of how messages arrive: :mod:`.client_side` and :mod:`.worker_side` do.
"""

from __future__ import annotations

from collections import Counter

from ..proto.errors import BatonError, CapacityError
from ..proto.messages import Abort, Assign, Terminal, Tokens
from ..proto.proofs import assignment
from ..proto.requests import check_emitted, check_wire_context
from .admission import Admission
from .clients import Clients
from .config import RouterConfig
from .events import Action, Log, ToClient, ToWorker
from .latency import Latency
from .placement import Placement
from .policy import make_policy
from .recent import Recent
from .registry import Registry, Worker
from .request import NEVER, Request, State, Step
from .tombstones import Tombstones
from .wheel import Wheel

ENDED_KEEP_S = 5.0
"""Shortest time a terminal is kept, also of a request that ended at its deadline."""
TAKEOVER = 1024
"""How far the attempts of a router that takes a request over lie above those of the one before.

Both may count on for a while, and no attempt may have two meanings."""
REMEMBER_ATTEMPTS = 16_384
"""Requests whose last attempt is remembered after they are forgotten."""
_ASSIGNED = State.ASSIGNED  # before Python 3.12 a look-up in an Enum is slow
_ASSIGN, _ACCEPT, _END, _FORGET = Step.ASSIGN, Step.ACCEPT, Step.END, Step.FORGET


class Counters:
    """How requests ended since the start, and what was said in vain.

    ``dropped``: messages and runs that were not used, by reason.
    """

    __slots__ = ("cancelled", "dropped", "failed", "finished", "moved", "replayed", "submitted")

    def __init__(self) -> None:
        self.submitted = self.finished = self.failed = self.cancelled = 0
        self.replayed = self.moved = 0
        self.dropped: Counter[str] = Counter()

    def count(self, terminal: Terminal) -> None:
        """One more end."""
        if terminal.status == "cancelled" or terminal.code == "cancelled":
            self.cancelled += 1
        elif terminal.code:
            self.failed += 1
        else:
            self.finished += 1


class Lifecycle:
    """All requests of this router, with what is needed to decide about them."""

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
        """Place an admitted request, or keep it until there are workers."""
        self.requests[request.key] = request
        self.queued[request.key] = request
        request.own = request.attempt
        request.submitted_at = now
        self.counters.submitted += 1
        self.place(request, now)

    def place(self, request: Request, now: float) -> None:
        """Choose workers for a queued request and assign it."""
        if request.doubts and self._may_be_deadly(request):
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
        prefill, decode = request.prefill, request.decode = pair
        prefill.requests[request.key] = request
        if decode is not None:
            decode.requests[request.key] = request
        self.placement.placed(request)
        request.grace_until = NEVER
        request.step(_ASSIGN)
        del self.queued[request.key]
        request.backoff = self.config.assign_retry_s
        self.assign(request, now)

    def _may_be_deadly(self, request: Request) -> bool:
        """Whether one more death would poison it, and a closed connection may have been one.

        Then it waits until that worker has returned or is declared dead, so that a deadly request
        kills no more workers than it must, and a lost connection poisons none.
        """
        ends = request.deaths + len(request.doubts)
        return ends >= self.config.poison_deaths and not request.progressed

    def assign(self, request: Request, now: float) -> None:
        """Send the Assign, and again later unless it is answered."""
        prefill, decode = request.prefill, request.decode
        if prefill is None:
            return
        there = decode.incarnation if decode else None
        proof, decode_proof, ticket = assignment(
            self._key, request.key, request.attempt, prefill.incarnation, there
        )
        message = Assign(
            request=request.key,
            attempt=request.attempt,
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
        """A worker has the current attempt."""
        if request.state is _ASSIGNED:
            request.step(_ACCEPT)
            request.server = request.server or request.prefill
            request.retry_at = NEVER
            request.due_at = request.limit  # its slot comes earlier, where it is armed again

    def requeue(self, request: Request, now: float, delay: float = 0.0) -> None:
        """The current attempt is over: place the next one, at once or after ``delay`` s."""
        self.abort(request, "superseded")
        self.release(request)
        request.prefill = request.decode = None
        request.attempt += TAKEOVER if request.foreign else 1
        request.foreign = False
        request.own = min(request.own, request.attempt)
        request.pending = None
        request.step(Step.REQUEUE)
        self.queued[request.key] = request
        if delay > 0:
            self.wake(request, now + delay, now)
        else:
            self.place(request, now)

    def back_off(self, request: Request, least: float, now: float) -> float:
        """How long to leave a request alone after a refusal; each time longer."""
        config = self.config
        delay = min(max(least, request.patience), config.busy_ceiling_s)
        request.patience = min(2 * delay, config.busy_ceiling_s)
        return delay

    def retry_waiting(self, now: float) -> None:
        """A worker became ready: try everything that waits for one."""
        for request in list(self.queued.values()):
            if request.grace_until != NEVER and request.state is State.QUEUED:
                self.place(request, now)

    def _wait(self, request: Request, now: float) -> None:
        """No pair now: wait, but not for ever when there are no workers at all."""
        if request.avoid or self.placement.kept_apart(request):  # all asked in this round
            request.avoid = None
            delay = self.back_off(request, self.config.busy_backoff_s, now)
            self.wake(request, now + delay, now)
            return
        if request.grace_until == NEVER:
            ever = self.registry.ever_ready
            grace = self.config.worker_grace_s if ever else self.config.start_grace_s
            request.grace_until = now + grace
        if now < request.grace_until:
            self.wake(request, request.grace_until, now)
            return
        hint = max(1.0, self.admission.retry_after())
        where = f" in pool {request.pool!r}" if request.pool else ""
        reason = f"no {' and '.join(request.roles)} worker is ready{where}"
        self.fail(request, CapacityError(reason, retry_after=hint), now)

    # ------------------------------------------------------------------ workers' shares

    def handed_over(self, request: Request) -> None:
        """The decode worker owns it: the prefill worker's death does not matter any more."""
        request.handed = True
        request.unreachable, request.shunned = "", ()
        request.server = request.decode
        prefill = request.prefill
        if prefill is not None and prefill.requests.pop(request.key, None) is not None:
            prefill.outstanding -= request.prefill_cost
            request.prefill_cost = 0

    def release(self, request: Request) -> None:
        """The workers do not count this attempt any more."""
        key = request.key
        prefill, decode = request.prefill, request.decode
        if prefill is not None and not request.handed:
            prefill.requests.pop(key, None)
            prefill.outstanding -= request.prefill_cost
        if decode is not None:
            decode.requests.pop(key, None)
            decode.outstanding -= request.decode_cost
        request.prefill_cost = request.decode_cost = 0
        request.server = None
        request.handed = request.followed = False
        request.heard = True

    def abort(self, request: Request, reason: str) -> None:
        """Free the current attempt on its workers."""
        for worker in (request.prefill, request.decode):
            if worker is not None and worker.live:
                self.abort_on(worker, request.key, request.attempt, request.deadline, reason)

    def abort_on(self, worker: Worker, key: bytes, attempt: int, until: float, reason: str) -> None:
        """Send an Abort; the worker's timer repeats it until it is confirmed."""
        known = worker.aborts.get(key)
        if known is not None and known[0] >= attempt:
            return
        worker.aborts[key] = (attempt, NEVER, until)
        abort = Abort(request=key, attempt=attempt, reason=reason)
        self.out.append(ToWorker(worker.identity, abort))

    # ------------------------------------------------------------------ clients' shares

    def resend(self, request: Request, position: int) -> None:
        """Give the client what is kept from ``position`` on, and the terminal if there is one."""
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
        """The last chance of a client that is still behind: give it the rest all the same."""
        if request.client is not None and request.sent >= 0:
            behind, request.client.behind = request.client.behind, False
            self.resend(request, request.sent)
            request.client.behind = behind

    # ------------------------------------------------------------------ ending

    def fail(self, request: Request, error: BatonError, now: float) -> None:
        """End a request with a typed error, and free it on its workers."""
        terminal = Terminal(
            request=request.key,
            attempt=request.attempt,
            position=request.next,
            code=error.code,
            message=str(error),
            retry_after=error.retry_after,
        )
        self.abort(request, error.code)
        self.end(request, terminal, now)

    def cancel(self, request: Request, now: float, reason: str) -> None:
        """End a request because its client wants so, or is gone."""
        terminal = Terminal(
            request=request.key, attempt=request.attempt, position=request.next, status="cancelled"
        )
        self.abort(request, reason)
        self.log("request.cancelled", request=request.key.hex(), reason=reason, at=now)
        self.end(request, terminal, now)

    def end(self, request: Request, terminal: Terminal, now: float) -> None:
        """The request is over: tell its client, and keep the terminal."""
        request.step(_END)
        self.queued.pop(request.key, None)
        self.counters.count(terminal)
        self.admission.end(request)
        prefill, decode = request.prefill, request.decode
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
            decode=terminal.decode or (decode.id if decode and request.handed else ""),
            embedding=terminal.embedding if request.embeds else None,
        )
        self.release(request)
        request.pending = None
        request.limit = request.deadline = max(request.deadline, now + ENDED_KEEP_S)
        request.backoff = self.config.terminal_retry_s
        self.tell_end(request, now)

    def tell_end(self, request: Request, now: float) -> None:
        """Send the terminal; again later until it is acknowledged."""
        client = request.client
        if client is not None and request.terminal is not None:
            if not client.behind:
                self.out.append(ToClient(client.identity, request.terminal))
            elif request.sent < 0:
                request.sent = request.next
        self.repeat_later(request, now, NEVER)

    def leave(self, request: Request) -> None:
        """Another router serves it: drop the record, and let the workers go on."""
        request.step(Step.END)
        self.queued.pop(request.key, None)
        self.admission.end(request)
        self.release(request)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Nobody will ask again: drop the record."""
        request.step(_FORGET)
        self.wheel.cancel(request)
        if request.client is not None:
            self.clients.detach(request)
        self.admission.forget(request)
        del self.requests[request.key]
        self._last_attempts.put(request.key, request.attempt)  # the highest there was

    def remember_attempt(self, key: bytes, attempt: int) -> None:
        """Up to ``attempt`` a request without a record here is over."""
        self._last_attempts.put(key, max(attempt, self.last_attempt(key)))

    def last_attempt(self, key: bytes) -> int:
        """Highest attempt of a request forgotten lately, 0 when there was none."""
        return self._last_attempts.get(key, 0)

    # ------------------------------------------------------------------ time

    def wake(self, request: Request, when: float, now: float) -> None:
        """Look at the request at ``when``, at its limit at the latest."""
        request.retry_at = when
        self.wheel.arm(request, when if when < request.limit else request.limit, now)

    def repeat_later(self, request: Request, now: float, ceiling: float) -> None:
        """Look at it after its back-off, which doubles up to ``ceiling``."""
        delay = request.backoff
        if delay < ceiling:
            request.backoff = min(2 * delay, ceiling)
        request.retry_at = when = now + delay
        self.wheel.arm(request, when if when < request.limit else request.limit, now)

    def log(self, event: str, **fields: object) -> None:
        """Ask for a log line."""
        self.out.append(Log(event, fields))
