"""A worker's standing with its routers: Hello, Heartbeat and terminals until acknowledged.

Invariant: a terminal is repeated until the router that owns the request acknowledged it or
its deadline passed, and with it the tokens it ends stay available; a router that comes back
hears Hello (with every request still held) before anything else. Nothing is kept for a router
that has been away for :data:`DESERTED_S`; a worker that ends does not wait so long for one.

Pure; the role's core feeds it and forwards its actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ..proto.layout import ModelCard
from ..proto.limits import PROTOCOL_VERSION
from ..proto.messages import (
    Abort,
    Aborted,
    Accepted,
    Busy,
    Heartbeat,
    Hello,
    Message,
    Moved,
    Rejected,
    RequestState,
    Terminal,
    Tokens,
    WorkerLoad,
)
from ..proto.outputs import TokenLogProbs
from ..proto.proofs import reserve_ticket, same
from .actions import Exit, Note, ToRouter
from .attempts import Attempts, Key
from .expiry import Expiring
from .liveness import HEARTBEAT_S
from .runs import runs_again

HOPELESS = frozenset({"version_mismatch", "model_mismatch", "config", "access_denied"})
"""Rejections that another start would meet again."""
DECLARED_DEAD = "endpoint_dead"
"""The rejection after which this incarnation can never serve."""
TERMINAL_REPEAT_S = 0.5
PROOF_KEPT_S = 60.0
"""How long after the deadline of an attempt its proof is kept: a terminal may still wait then."""
HELLO_PAUSE_S = 0.1
HELLO_REPEAT_S = 1.0
"""How long a Welcome is waited for; without it a decode worker can check no ticket."""
DESERTED_S = 60.0
"""A router away for so long is not waited for: native clients give up in half the time, or have
gone to another router, which has taken over what it wants."""
DRAIN_ABSENT_S = 5.0
"""The same for what has ended, while this worker drains; a supervisor's restart takes less."""
NAME_TAKEN = "name_taken"
NAME_PATIENCE_S = 30.0
"""How long a worker waits for a name that a healthy worker has, before it reports an error and
begins a new incarnation."""
REFUSED_PATIENCE_S = 3.0
"""How long a worker that one router has refused waits for another one to take it."""


@dataclass(slots=True, frozen=True)
class WorkerIdentity:
    """Who this worker is, for its whole life."""

    worker: str
    role: str
    incarnation: int
    pid: int
    endpoint: str
    pool: str
    model: ModelCard
    max_batch: int


@dataclass(slots=True, frozen=True)
class EngineState:
    """Progress of the compute thread, as heartbeats report it."""

    progress: int
    busy: bool
    step_s: float


class _Held(Protocol):
    """What a worker has of a request."""

    router: str


@dataclass(slots=True)
class _Notice:
    """Words a router has to act upon, said until it does."""

    router: str
    messages: list[Message]
    expires: float
    repeat_at: float


@dataclass(slots=True)
class _Pending:
    """A terminal a router has not acknowledged, with the tokens it may ask for again."""

    router: str
    terminal: Terminal
    prompt_length: int
    first: int  # position of tokens[0]
    tokens: list[int]
    logprobs: Collection[TokenLogProbs]  # of the last of them
    expires: float
    repeat_at: float


def moved_to(router: str, old: str, request: bytes) -> list[ToRouter]:
    """What the ``old`` router of a request hears when another one adopts it."""
    return [] if old == router else [ToRouter(old, Moved(request=request, router=router))]


def other_owner(held: Iterable[_Held], router: str) -> str | None:
    """The router that has taken one of these from ``router``, if another one has."""
    return next((one.router for one in held if one.router != router), None)


def left_alone(owner: str, router: str, message: Abort) -> list[ToRouter]:
    """The answer to an Abort of a router that another one has taken the request from."""
    request, attempt = message.request, message.attempt
    answer = Aborted(request=request, attempt=attempt)
    return [ToRouter(router, Moved(request=request, router=owner)), ToRouter(router, answer)]


class Membership:
    """One worker's links to all its routers."""

    def __init__(self, identity: WorkerIdentity, routers: tuple[str, ...]) -> None:
        self.identity = identity
        self.routers = routers
        self._up: dict[str, None] = {}  # ordered, so that a run can be repeated
        self._welcome: set[str] = set()  # routers that have taken us
        self._refused: dict[str, tuple[float, str]] = {}  # routers that will not: since, and why
        self._taken: dict[str, float] = {}  # routers that gave our name away: since when
        self._away: dict[str, float] = {}  # routers that are not reachable, since when
        self._pending: Attempts[_Pending] = Attempts()
        self._notices: Attempts[_Notice] = Attempts()
        self._beat_at = 0.0
        self._introduced_at = float("-inf")
        self._hello_at: dict[str, float] = {}  # by router: when Hello was said last
        self._proofs: Expiring[Key, bytes] = Expiring()  # of attempts a router gave to this worker
        self._keys: dict[str, bytes] = {}  # by router: what tickets are made with
        self.draining = False
        self.dropped: Counter[str] = Counter()
        """Messages this worker could not use, by reason; heartbeats report them."""

    # ------------------------------------------------------------------ links

    def up(
        self, router: str, load: WorkerLoad, requests: list[RequestState], now: float
    ) -> list[ToRouter]:
        """A router is reachable: introduce ourselves, then repeat its terminals."""
        self._up[router] = None
        self._hello_at[router] = now
        me = self.identity
        ended = [
            RequestState(*key, p.terminal.position, p.prompt_length, done=True, router=p.router)
            for key, p in self._pending.items()
        ]
        hello = Hello(
            version=PROTOCOL_VERSION,
            worker=me.worker,
            role=me.role,
            incarnation=me.incarnation,
            pid=me.pid,
            endpoint=me.endpoint,
            pool=me.pool,
            model=me.model,
            max_batch=me.max_batch,
            load=load,
            requests=[self._proven(held, now) for held in requests + ended],
            draining=self.draining,
            elsewhere=bool(self._welcome - {router}),
        )
        return [ToRouter(router, hello), *self._repeat(now, lambda p: p.router == router)]

    def unanswered(self, now: float) -> list[str]:
        """Routers that have answered the last Hello neither with Welcome nor with a refusal."""
        return [
            router
            for router in self._up
            if router not in self._welcome
            and router not in self._refused
            and now >= self._hello_at.get(router, now) + HELLO_REPEAT_S
        ]

    def may_introduce(self, now: float) -> bool:
        """Whether a Hello asked for by a router is due, and not already under way."""
        if now < self._introduced_at + HELLO_PAUSE_S:
            return False
        self._introduced_at = now
        return True

    def down(self, router: str) -> None:
        """A router is gone; what it owns goes on until its deadline."""
        self._up.pop(router, None)
        self._welcome.discard(router)
        self._taken.pop(router, None)

    def welcomed(self, router: str, key: bytes = b"") -> None:
        """A router takes us; ``key``: what the tickets it gives out are made with."""
        self._welcome.add(router)
        self._refused.pop(router, None)
        self._keys[router] = key
        self._taken.pop(router, None)

    @property
    def connected(self) -> int:
        """Routers reachable now."""
        return len(self._up)

    def rejected(
        self, router: str, message: Rejected, now: float = 0.0
    ) -> list[ToRouter | Note | Exit]:
        """A router refuses us; some refusals end this incarnation.

        While another worker has our name we ask again with every heartbeat. A worker that drains
        needs no new incarnation: it finishes what it has for other routers.

        In a rolling update another router may take what this one cannot: so the incarnation ends
        when all have refused it, or when none has taken it some time after the first refusal.
        """
        reason = message.message or message.code
        if message.code == NAME_TAKEN or (message.code == DECLARED_DEAD and self.draining):
            if router in self._taken:
                return []
            self._taken[router] = now
        elif message.code in HOPELESS:
            self._refused.setdefault(router, (now, reason))
            if len(self._refused) >= len(self.routers):
                return [Exit(reason, restart=False)]
        elif message.code == DECLARED_DEAD:
            return [Exit(reason, restart=True)]
        return [Note("router.rejected", {"router": router, "code": message.code, "reason": reason})]

    def _given_up(self, now: float) -> list[Exit]:
        if self._welcome:
            return []
        if self._taken and now >= min(self._taken.values()) + NAME_PATIENCE_S:
            reason = f"another worker has had the name {self.identity.worker} all the while"
            return [Exit(reason, restart=True)]
        if not self._refused:
            return []
        since, reason = next(iter(self._refused.values()))
        return [Exit(reason, restart=False)] if now >= since + REFUSED_PATIENCE_S else []

    # ------------------------------------------------------------------ proofs

    def assigned(self, key: Key, proof: bytes, until: float) -> None:
        """Keep the proof that a router gave this attempt to this worker."""
        if proof:
            self._proofs.put(key, proof, until + PROOF_KEPT_S)

    def claim(self, router: str, key: Key, now: float) -> ToRouter:
        """Show a router that this attempt was given to this worker."""
        proof = self._proofs.get(key, now) or b""
        return ToRouter(router, Accepted(request=key[0], attempt=key[1], proof=proof))

    def _proven(self, held: RequestState, now: float) -> RequestState:
        proof = self._proofs.get((held.request, held.attempt), now)
        return msgspec.structs.replace(held, proof=proof) if proof else held

    def invited(self, request: bytes, attempt: int, incarnation: int, ticket: bytes) -> bool:
        """Whether a router sent the prefill worker ``incarnation`` here with this attempt.

        A router of an earlier version gives out no keys, so there is nothing to check then.
        """
        keys = set(self._keys.values())
        return b"" in keys or any(
            same(ticket, reserve_ticket(key, request, attempt, incarnation)) for key in keys
        )

    @property
    def can_check(self) -> bool:
        """Whether a router has told what tickets are made with."""
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
    ) -> list[ToRouter]:
        """Send a request's terminal and keep it, with what may be asked for, until acknowledged.

        ``logprobs``: of the last of the tokens, as many as are known.
        """
        key = (terminal.request, terminal.attempt)
        # At least one repetition must fit even when the deadline has just passed.
        keep = max(expires, now + 4 * TERMINAL_REPEAT_S)
        self._pending[key] = _Pending(
            router,
            terminal,
            prompt_length,
            first,
            tokens or [],
            logprobs,
            keep,
            now + TERMINAL_REPEAT_S,
        )
        return [ToRouter(router, terminal)]

    def give_back(
        self, router: str, key: tuple[bytes, int], messages: list[Message], now: float, until: float
    ) -> list[ToRouter]:
        """Hand an attempt back: say why until the router aborts it, at most ``until``."""
        proof = self._proofs.get(key, now) or b""
        messages = [
            msgspec.structs.replace(one, proof=proof) if isinstance(one, Busy) and proof else one
            for one in messages
        ]
        self._notices[key] = _Notice(router, messages, until, now + TERMINAL_REPEAT_S)
        return [ToRouter(router, message) for message in messages]

    def acknowledged(self, router: str, ended: list[tuple[bytes, int]]) -> None:
        """A router has these terminals; those of requests of other routers stay."""
        for key in ended:
            pending = self._pending.get(key)
            if pending is not None and pending.router == router:
                del self._pending[key]

    def forget(self, request: bytes, attempt: int, router: str | None = None) -> None:
        """An abort makes all that was to be said of attempts up to ``attempt`` meaningless.

        ``router``: who said it; what belongs to another router stays. None for all.
        """
        for table in (self._pending, self._notices):
            for key in table.keys_of(request, attempt):
                if router is None or table[key].router == router:
                    del table[key]

    def has_ended(self, request: bytes, attempt: int) -> bool:
        """Whether this attempt's end is being said."""
        return (request, attempt) in self._pending

    def adopt(self, router: str, request: bytes, position: int) -> list[ToRouter]:
        """Repeat an ended request's tokens from ``position`` and its terminal.

        An unknown request is answered by Aborted with attempt 0.
        """
        pending = self._pending.newest(request)
        if pending is None:
            return [ToRouter(router, Aborted(request=request, attempt=0))]
        moved = moved_to(router, pending.router, request)
        pending.router = router
        skip = max(0, position - pending.first)
        again, key = pending.tokens[skip:], (request, pending.terminal.attempt)
        runs = runs_again(key, pending.first + skip, again, pending.logprobs) if again else []
        tokens = [ToRouter(router, Tokens(runs=runs))] if runs else []
        return [*moved, *tokens, ToRouter(router, pending.terminal)]

    @property
    def unacknowledged(self) -> int:
        """Terminals and attempts given back that no router has acted upon."""
        return len(self._pending) + len(self._notices)

    # ------------------------------------------------------------------ time

    def tick(
        self, now: float, engine: EngineState, load: Callable[[], WorkerLoad]
    ) -> list[ToRouter | Note | Exit]:
        """Heartbeats and repetitions that are due."""
        actions: list[ToRouter | Note | Exit] = [*self._given_up(now)]
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
            )
            actions += [ToRouter(router, beat) for router in self._up]
        self._expire(now)
        self._proofs.expire(now)
        actions += self._repeat(now, lambda p: now >= p.repeat_at)
        actions += self._repeat_notices(now)
        return actions

    def _expire(self, now: float) -> None:
        """Forget what has waited long enough, or waits for a router that has been away so long."""
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
        """Routers that have not been reachable for so long, or have given our name away.

        Those moved what they had here, to another worker of our name or since they declared us
        dead while we drain, and never acknowledge anything.
        """
        taken = {r for r, since in self._taken.items() if now >= since + DRAIN_ABSENT_S}
        return {r for r, since in self._away.items() if now >= since + seconds} | taken

    def next_timer(self) -> float:
        """When :meth:`tick` should run."""
        return self._beat_at

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
