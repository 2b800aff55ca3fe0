"""What the cores of both workers do alike: routers that come and go, aborts, draining.

Invariant: a router's Abort is answered, and once the blocks are free that is noted; a worker
says Drained once, when nothing is left.

Pure; a role's core derives from it and adds its own handlers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from ..proto.messages import (
    Abort,
    Adopt,
    Assign,
    Drain,
    Drained,
    Message,
    PeerDead,
    Ping,
    Pong,
    Rejected,
    RequestState,
    Share,
    Terminal,
    TerminalAck,
    Tokens,
    Welcome,
    WorkerLoad,
)
from .actions import (
    DrainRequested,
    FromRouter,
    Note,
    RouterDown,
    RouterUp,
    ToRouter,
    blocks_freed,
)
from .attempts import Key
from .membership import Membership
from .shares import Shares

Handler = Callable[..., list[Any]]
"""``(core, event, now)`` to actions: the role's own kinds as well as the common ones."""


class WorkerCore(ABC):
    """Base of the prefill and decode cores."""

    HANDLERS: ClassVar[Mapping[type, Handler]]

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._drained_said = False
        self._freed_later: list[tuple[Key, float, Sequence[Any]]] = []  # aborted when, who

    # ------------------------------------------------------------------ of the role

    @abstractmethod
    def load(self) -> WorkerLoad:
        """Figures for heartbeats."""

    @property
    @abstractmethod
    def is_drained(self) -> bool:
        """Draining and nothing left."""

    @property
    @abstractmethod
    def _requests(self) -> int:
        """How many are here."""

    @abstractmethod
    def _held(self) -> list[RequestState]:
        """All requests here, for a Hello."""

    @abstractmethod
    def _abort(self, router: str, message: Abort, now: float) -> list[Any]:
        """Stop attempts; see :meth:`_freed`."""

    @abstractmethod
    def _adopt(self, router: str, request: bytes, position: int) -> list[Any]:
        """Say a request's tokens from ``position`` on again, to this router from now on."""

    @abstractmethod
    def _peer_dead(self, endpoint: str, incarnation: int, now: float) -> list[Any]:
        """A worker of the other role is finally dead."""

    def _assigned(self, router: str, message: Message, now: float) -> list[Any]:
        """What only this role is told by a router."""
        return []

    def _shares(self, held: Iterable[tuple[str, int]]) -> dict[str, Share]:
        """What each router has here, of ``(router, tokens)`` of each; nothing for a lone one."""
        if len(self._member.routers) < 2:
            return {}
        shares = Shares()
        for router, tokens in held:
            shares.add(router, tokens)
        return shares.report()

    # ------------------------------------------------------------------ routers

    def _on_router_up(self, event: RouterUp, now: float) -> list[Any]:
        return list(self._member.up(event.router, self.load(), self._held(), now))

    def _unknown_there(self, router: str, now: float) -> list[Any]:
        """A router has no memory of us; many words of ours may have met it."""
        if not self._member.may_introduce(now):
            return []
        return self._on_router_up(RouterUp(router), now)

    def _on_router_down(self, event: RouterDown, now: float) -> list[Any]:
        self._member.down(event.router)
        return []

    def _on_router(self, event: FromRouter, now: float) -> list[Any]:
        router = event.router
        match event.message:
            case TerminalAck(requests=ended):
                self._member.acknowledged(router, ended)
                return self._maybe_drained()
            case Abort() as message:
                return self._abort(router, message, now)
            case Adopt(request=request, position=position):
                return self._claim(router, self._adopt(router, request, position), now)
            case PeerDead(incarnation=incarnation, endpoint=endpoint):
                return self._peer_dead(endpoint, incarnation, now)
            case Drain():
                return self._drain()
            case Ping(nonce=nonce):
                return [ToRouter(router, Pong(nonce=nonce))]
            case Rejected(code="endpoint_unknown"):
                return self._unknown_there(router, now)
            case Rejected() as message:
                return list(self._member.rejected(router, message, now))
            case Welcome(key=key):
                self._member.welcomed(router, key)
                return []
            case Assign() as message:
                key_ = (message.request, message.attempt)
                self._member.assigned(key_, message.proof, now + message.deadline)
                return self._assigned(router, message, now)
            case message:
                return self._assigned(router, message, now)

    def _claim(self, router: str, answer: list[Any], now: float) -> list[Any]:
        """The answer to an Adopt, with the proof that what it tells was given to this worker."""
        for action in answer:
            if not isinstance(action, ToRouter) or action.router != router:
                continue
            said = action.message
            if isinstance(said, Tokens) and said.runs:
                said_of = (said.runs[0].request, said.runs[0].attempt)
            elif isinstance(said, Terminal):
                said_of = (said.request, said.attempt)
            else:
                continue
            return [self._member.claim(router, said_of, now), *answer]
        return answer

    # ------------------------------------------------------------------ aborts

    def _freed(self, key: Key, now: float, running: Sequence[Any]) -> list[Any]:
        """Note that an aborted attempt's blocks are free; after the steps that use them.

        ``running``: the engine's names for it that are part of a step which is out.
        """
        if not running:
            return [blocks_freed(*key, now, now)]
        self._freed_later.append((key, now, running))
        return []

    def _step_over(
        self, now: float, is_out: Callable[[Any], bool] = lambda _name: False
    ) -> list[Any]:
        """A step ended; ``is_out`` says whether another one still uses a name's blocks."""
        waiting, self._freed_later = self._freed_later, []
        notes: list[Any] = []
        for entry in waiting:
            key, heard, running = entry
            if any(is_out(name) for name in running):
                self._freed_later.append(entry)
            else:
                notes.append(blocks_freed(*key, heard, now))
        return notes

    def _introduce_again(self, now: float) -> list[Any]:
        """Say Hello again to routers whose Welcome is missing."""
        actions: list[Any] = []
        for router in self._member.unanswered(now):
            actions += self._on_router_up(RouterUp(router), now)
        return actions

    def _deserted(self, now: float) -> list[Any]:
        """Free what belongs to a router that has been away for long: nobody asked for it since."""
        gone = self._member.away(now)
        actions: list[Any] = []
        for held in self._held() if gone else ():
            if held.router in gone:
                abort = Abort(request=held.request, attempt=held.attempt, reason="deserted")
                actions += self._abort(held.router, abort, now)
        return [a for a in actions if not isinstance(a, ToRouter) or a.router not in gone]

    # ------------------------------------------------------------------ drain

    def _on_drain(self, event: DrainRequested, now: float) -> list[Any]:
        return self._drain()

    def _drain(self) -> list[Any]:
        self._member.draining = True
        return [Note("worker.draining", {"requests": self._requests}), *self._maybe_drained()]

    def _maybe_drained(self) -> list[Any]:
        if not self.is_drained or self._drained_said:
            return []
        self._drained_said = True
        message = Drained(worker=self._member.identity.worker)
        return [ToRouter(router, message) for router in self._member.routers]


WorkerCore.HANDLERS = {
    FromRouter: WorkerCore._on_router,
    RouterUp: WorkerCore._on_router_up,
    RouterDown: WorkerCore._on_router_down,
    DrainRequested: WorkerCore._on_drain,
}
