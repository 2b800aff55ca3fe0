"""A worker's registration with its routers: Hello, Heartbeat, and unacknowledged terminals.

Invariant: a terminal is repeated, and its tokens stay available, until the router that owns the
request acknowledges it or the deadline passes. After a reconnect, Hello with all requests of this
worker is the first message. State for a router is dropped after it was away for :data:`DESERTED_S`
(:data:`DRAIN_ABSENT_S` while draining).

Pure. The core of each role passes events to it and forwards its actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from baton.extend.guard import Guard
from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.layout import ModelCard
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Heartbeat,
    Hello,
    Message,
    Moved,
    Rejected,
    RequestState,
    Terminal,
    WorkerLoad,
)
from baton.proto.wire.proofs import Holder, reserve_ticket, same, terms_of
from baton.proto.wire.token_runs import messages_of
from baton.runtime.liveness import HEARTBEAT_S

from .attempts import Attempts, Key
from .events import Exit, Log, ToRouter
from .token_replay import runs_again

HOPELESS = frozenset({"version_mismatch", "model_mismatch", "config", "access_denied"})
"""Rejection codes that a restart does not fix."""
DECLARED_DEAD = "endpoint_dead"
"""Rejection code of an incarnation that was declared dead."""
TERMINAL_REPEAT_S = 0.5
TICKET_S = 600.0
"""Seconds for which the tickets of a restarted router's earlier incarnation are valid."""
HELLO_PAUSE_S = 0.1
HELLO_REPEAT_S = 1.0
"""Seconds to wait for Welcome before Hello is repeated; without it no ticket can be checked."""
DESERTED_S = 60.0
"""Seconds to keep state for an unreachable router. Native clients give up after half of that, or
resume at another router, which adopts their requests."""
DRAIN_ABSENT_S = 5.0
"""The same for ended requests while this worker drains; a supervised restart is faster."""
WAITING = frozenset({"name_taken", "model_contested"})
"""Rejection codes after which a worker retries: another worker may leave, or more keys may come."""
NAME_PATIENCE_S = 30.0
"""Seconds to retry after such a code, before the worker exits to start a new incarnation."""
REFUSED_PATIENCE_S = 3.0
"""Seconds to wait for another router's Welcome after the first refusal."""


@dataclass(slots=True, frozen=True)
class WorkerIdentity:
    """A worker's constant identity, as in its Hello."""

    worker: str
    role: str
    incarnation: int
    pid: int
    endpoint: str
    pool: str
    model: ModelCard
    max_batch: int
    device: str = ""
    seal: bytes = b""
    shared_weights: int = 0
    nonce: bytes = b""
    labels: dict[str, str] = field(default_factory=dict)
    kv_events: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class EngineState:
    """Progress of the compute thread, as heartbeats report it."""

    progress: int
    busy: bool
    step_s: float


class Allowance(NamedTuple):
    """Blocks for at most ``tokens`` tokens and ``seconds`` seconds."""

    tokens: int
    seconds: int


class _Held(Protocol):
    """A worker's record of a request."""

    router: str


@dataclass(slots=True)
class _Notice:
    """Messages that are repeated until the router aborts the attempt."""

    router: str
    messages: list[Message]
    expires: float
    repeat_at: float


@dataclass(slots=True)
class _Pending:
    """An unacknowledged terminal, with the tokens that a router may request again."""

    router: str
    terminal: Terminal
    proof: bytes  # of the attempt's assignment
    prompt_length: int
    first: int  # position of tokens[0]
    tokens: list[int]
    logprobs: Collection[TokenLogProbs]  # of the last tokens
    media: Mapping[int, bytes]  # by the position of the token that completes it
    expires: float
    repeat_at: float

    def lacks(self, position: int) -> bool:
        """True if tokens from ``position`` on are wanted that are not kept here."""
        return max(position, self.prompt_length) < self.first and self.terminal.code is None


def moved_to(router: str, old: str, request: bytes) -> list[ToRouter]:
    """Return the notice to the ``old`` router that ``router`` adopted the request."""
    return [] if old == router else [ToRouter(old, Moved(request=request, router=router))]


def other_owner(held: Iterable[_Held], router: str) -> str | None:
    """Return the router that adopted one of these requests from ``router``, or None."""
    return next((one.router for one in held if one.router != router), None)


def left_alone(owner: str, router: str, message: Abort) -> list[ToRouter]:
    """Return the answer to an Abort from ``router`` for a request that ``owner`` adopted."""
    request, attempt = message.request, message.attempt
    answer = Aborted(request=request, attempt=attempt)
    return [ToRouter(router, Moved(request=request, router=owner)), ToRouter(router, answer)]


class Membership:
    """One worker's registration with all its routers."""

    def __init__(self, identity: WorkerIdentity, routers: tuple[str, ...]) -> None:
        self.identity = identity
        self.routers = routers
        self._up: dict[str, None] = {}  # ordered, so that simulated runs are reproducible
        self._welcome: set[str] = set()  # routers that sent Welcome
        self._refused: dict[str, tuple[float, str]] = {}  # routers that refused us: since, reason
        self._taken: dict[str, float] = {}  # routers where another worker is in the way: since
        self._taken_why = ""
        self._away: dict[str, float] = {}  # unreachable routers: since
        self._pending: Attempts[_Pending] = Attempts()
        self._notices: Attempts[_Notice] = Attempts()
        self._beat_at = 0.0
        self._introduced_at = float("-inf")
        self._hello_at: dict[str, float] = {}  # by router: time of the last Hello
        self._keys: dict[str, bytes] = {}  # by router: the key for reserve tickets
        self._former_keys: dict[bytes, float] = {}  # of ended routers: valid until
        self._issued: dict[bytes, int] = {}  # by such a key: latest time of a valid ticket
        self.draining = False
        self.dropped: Counter[str] = Counter()
        """Messages this worker could not use, by reason; heartbeats report them."""
        self.extensions: list[Guard] = []
        """Users' classes in this worker; heartbeats report the counts of their calls."""

    # ------------------------------------------------------------------ links

    def up(
        self, router: str, load: WorkerLoad, requests: list[RequestState], now: float
    ) -> list[ToRouter]:
        """Register with a router that became reachable, then repeat its terminals."""
        self._up[router] = None
        self._hello_at[router] = now
        me = self.identity
        ended = [
            RequestState(
                *key,
                p.terminal.position,
                p.prompt_length,
                done=True,
                router=p.router,
                proof=p.proof,
            )
            for key, p in self._pending.items()
        ]
        hello = Hello(
            version=PROTOCOL_VERSION,
            worker=me.worker,
            role=me.role,
            incarnation=me.incarnation,
            nonce=me.nonce,
            pid=me.pid,
            endpoint=me.endpoint,
            pool=me.pool,
            model=me.model,
            max_batch=me.max_batch,
            load=load,
            requests=requests + ended,
            draining=self.draining,
            elsewhere=bool(self._welcome - {router}),
            device=me.device,
            seal=me.seal,
            shared_weights=me.shared_weights,
            labels=me.labels,
            kv_events=list(me.kv_events),
        )
        return [ToRouter(router, hello), *self._repeat(now, lambda p: p.router == router)]

    def linked(self, router: str, now: float) -> None:
        """Note a connection whose Hello could not be made; :meth:`unanswered` returns it."""
        self._up[router] = None
        self._hello_at[router] = now

    def unanswered(self, now: float) -> list[str]:
        """Return routers that have not answered Hello after :data:`HELLO_REPEAT_S`."""
        return [
            router
            for router in self._up
            if router not in self._welcome
            and router not in self._refused
            and now >= self._hello_at.get(router, now) + HELLO_REPEAT_S
        ]

    def may_introduce(self, now: float) -> bool:
        """Whether a Hello that a router asks for may be sent; limited by :data:`HELLO_PAUSE_S`."""
        if now < self._introduced_at + HELLO_PAUSE_S:
            return False
        self._introduced_at = now
        return True

    def down(self, router: str) -> None:
        """Note a lost router; its requests continue until their deadlines."""
        self._up.pop(router, None)
        self._welcome.discard(router)
        self._taken.pop(router, None)

    def welcomed(self, router: str, key: bytes, now: float) -> None:
        """Note a router's Welcome; ``key`` authenticates the reserve tickets it issues.

        The tickets of its earlier incarnation are valid for :data:`TICKET_S` more, because the
        attempts that it assigned go on.
        """
        former = self._keys.get(router, key)
        if former != key:
            self._former_keys[former] = now + TICKET_S
        self._welcome.add(router)
        self._refused.pop(router, None)
        self._keys[router] = key
        self._taken.pop(router, None)

    @property
    def connected(self) -> int:
        """Number of reachable routers."""
        return len(self._up)

    def rejected(
        self, router: str, message: Rejected, now: float = 0.0
    ) -> list[ToRouter | Log | Exit]:
        """Handle a router's refusal; some refusals end this incarnation.

        If another worker has our name, or the model is contested, retry with every heartbeat. A
        draining worker that was declared dead needs no new incarnation: it finishes its requests of
        other routers.

        During a rolling update, another router may accept a worker that this one refuses. So the
        incarnation ends only after all routers refused it, or if none has accepted it
        :data:`REFUSED_PATIENCE_S` after the first refusal.
        """
        reason = message.message or message.code
        if message.code in WAITING or (message.code == DECLARED_DEAD and self.draining):
            if router in self._taken:
                return []
            self._taken[router] = now
            self._taken_why = reason
        elif message.code in HOPELESS:
            self._refused.setdefault(router, (now, reason))
            if len(self._refused) >= len(self.routers):
                return [Exit(reason, restart=False)]
        elif message.code == DECLARED_DEAD:
            return [Exit(reason, restart=True)]
        return [Log("router.rejected", {"router": router, "code": message.code, "reason": reason})]

    def _given_up(self, now: float) -> list[Exit]:
        if self._welcome:
            return []
        if self._taken and now >= min(self._taken.values()) + NAME_PATIENCE_S:
            return [Exit(self._taken_why, restart=True)]
        if not self._refused:
            return []
        since, reason = next(iter(self._refused.values()))
        return [Exit(reason, restart=False)] if now >= since + REFUSED_PATIENCE_S else []

    # ------------------------------------------------------------------ proofs

    def proof_of(self, key: Key) -> bytes:
        """Return the proof of assignment of an attempt whose terminal is unacknowledged."""
        pending = self._pending.get(key)
        return b"" if pending is None else pending.proof

    def allowance(
        self, request: bytes, attempt: int, holder: Holder, ticket: bytes, now: float
    ) -> Allowance | None:
        """Return what prefill worker ``holder`` may reserve here for this attempt, else None.

        A ticket ends by its router's clock, which the tickets of other requests show: a later one
        proves that so much time has passed. So no clocks need to agree.
        """
        terms = terms_of(ticket)
        if terms is None:
            return None
        if self._former_keys:
            self._former_keys = {k: until for k, until in self._former_keys.items() if now < until}
        keys = {*self._keys.values(), *self._former_keys}
        expected = ((key, reserve_ticket(key, request, attempt, holder, terms)) for key in keys)
        key = next((key for key, wanted in expected if same(ticket, wanted)), None)
        if key is None:
            return None
        latest = max(terms.issued, self._issued.get(key, 0))
        self._issued = {k: at for k, at in self._issued.items() if k in keys} | {key: latest}
        left = terms.issued + terms.seconds - latest
        return Allowance(terms.tokens, left) if left > 0 else None

    @property
    def can_check(self) -> bool:
        """Whether a router has sent the key for tickets."""
        return bool(self._keys)

    # ------------------------------------------------------------------ terminals

    def end(
        self,
        router: str,
        terminal: Terminal,
        now: float,
        expires: float,
        prompt_length: int = 0,
        first: int = 0,
        tokens: list[int] | None = None,
        logprobs: Collection[TokenLogProbs] = (),
        media: Mapping[int, bytes] | None = None,
        proof: bytes = b"",
    ) -> list[ToRouter]:
        """Send a request's terminal, and keep it and its tokens until it is acknowledged.

        ``first``: position of ``tokens[0]``. ``logprobs``: of the last tokens, as far as known.
        ``media``: by the position of the token that completes it.
        """
        key = (terminal.request, terminal.attempt)
        # At least one repetition must fit even when the deadline has just passed.
        keep = max(expires, now + 4 * TERMINAL_REPEAT_S)
        self._pending[key] = _Pending(
            router,
            terminal,
            proof,
            prompt_length,
            first,
            tokens or [],
            logprobs,
            media or {},
            keep,
            now + TERMINAL_REPEAT_S,
        )
        return [ToRouter(router, terminal)]

    def give_back(
        self, router: str, key: tuple[bytes, int], messages: list[Message], now: float, until: float
    ) -> list[ToRouter]:
        """Decline an attempt: repeat ``messages`` until the router aborts it, or ``until``."""
        self._notices[key] = _Notice(router, messages, until, now + TERMINAL_REPEAT_S)
        return [ToRouter(router, message) for message in messages]

    def acknowledged(self, router: str, ended: list[tuple[bytes, int]]) -> None:
        """Drop acknowledged terminals, except those of requests that another router owns."""
        for key in ended:
            pending = self._pending.get(key)
            if pending is not None and pending.router == router:
                del self._pending[key]

    def forget(self, request: bytes, attempt: int, router: str | None = None) -> None:
        """Drop terminals and notices of attempts up to ``attempt``, after an abort.

        ``router``: the sender of the abort; entries of other routers are kept. None: drop all.
        """
        for table in (self._pending, self._notices):
            for key in table.keys_of(request, attempt):
                if router is None or table[key].router == router:
                    del table[key]

    def has_ended(self, request: bytes, attempt: int) -> bool:
        """Whether the attempt has an unacknowledged terminal."""
        return (request, attempt) in self._pending

    def adopt(self, router: str, request: bytes, position: int) -> list[ToRouter]:
        """Repeat an ended request's tokens from ``position`` and its terminal.

        Return Aborted with attempt 0 for an unknown request, and for tokens before the first kept
        one: of speech, this worker may lack the chunks of earlier tokens.
        """
        pending = self._pending.newest(request)
        if pending is None or pending.lacks(position):
            return [ToRouter(router, Aborted(request=request, attempt=0))]
        moved = moved_to(router, pending.router, request)
        pending.router = router
        skip = max(0, position - pending.first)
        again, key = pending.tokens[skip:], (request, pending.terminal.attempt)
        runs = []
        if again:
            runs = runs_again(key, pending.first + skip, again, pending.logprobs, pending.media)
        tokens = [ToRouter(router, message) for message in messages_of(runs)]
        return [*moved, *tokens, ToRouter(router, pending.terminal)]

    @property
    def unacknowledged(self) -> int:
        """Number of unacknowledged terminals and declined attempts."""
        return len(self._pending) + len(self._notices)

    # ------------------------------------------------------------------ time

    def tick(
        self, now: float, engine: EngineState, load: Callable[[], WorkerLoad]
    ) -> list[ToRouter | Log | Exit]:
        """Return the heartbeats, repetitions and exits that are due."""
        actions: list[ToRouter | Log | Exit] = [*self._given_up(now)]
        if now >= self._beat_at:
            self._beat_at = now + HEARTBEAT_S
            beat = Heartbeat(
                incarnation=self.identity.incarnation,
                progress=engine.progress,
                busy=engine.busy,
                step_s=engine.step_s,
                draining=self.draining,
                load=load(),
                dropped=dict(self.dropped),
                extensions=[guard.counts() for guard in self.extensions],
            )
            actions += [ToRouter(router, beat) for router in self._up]
        self._expire(now)
        actions += self._repeat(now, lambda p: now >= p.repeat_at)
        actions += self._repeat_notices(now)
        return actions

    def _expire(self, now: float) -> None:
        """Drop expired terminals and notices, and those of routers that are away too long."""
        for router in self.routers:
            if router in self._up:
                self._away.pop(router, None)
            else:
                self._away.setdefault(router, now)
        gone = self.away(now, DRAIN_ABSENT_S if self.draining else DESERTED_S)
        for key in [k for k, p in self._pending.items() if now >= p.expires or p.router in gone]:
            del self._pending[key]
        for key in [k for k, n in self._notices.items() if now >= n.expires or n.router in gone]:
            del self._notices[key]

    def away(self, now: float, seconds: float = DESERTED_S) -> set[str]:
        """Return routers unreachable for ``seconds``, or where another worker has our name.

        The latter have moved their requests to the other worker, or declared this worker dead while
        it drained, and will never acknowledge a terminal.
        """
        taken = {r for r, since in self._taken.items() if now >= since + DRAIN_ABSENT_S}
        return {r for r, since in self._away.items() if now >= since + seconds} | taken

    def _repeat_notices(self, now: float) -> list[ToRouter]:
        actions = []
        for notice in self._notices.values():
            if notice.router in self._up and now >= notice.repeat_at:
                notice.repeat_at = now + TERMINAL_REPEAT_S
                actions += [ToRouter(notice.router, message) for message in notice.messages]
        return actions

    def _repeat(self, now: float, due: Callable[[_Pending], bool]) -> list[ToRouter]:
        actions = []
        for pending in self._pending.values():
            if pending.router in self._up and due(pending):
                pending.repeat_at = now + TERMINAL_REPEAT_S
                actions.append(ToRouter(pending.router, pending.terminal))
        return actions
