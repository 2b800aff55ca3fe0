"""Access control of a decode worker: which messages a peer's key allows. Needs CURVE sockets.

Invariant: only prefill workers reserve, and each can act only on its own handoffs. An
incarnation belongs to the key that opened a link with it, and a grant to the incarnation that
reserved it. Routers and operators may send Probe and Ping.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from ..proto.errors import AccessDenied
from ..proto.wire.messages import (
    Commit,
    Fence,
    GrantRef,
    Message,
    Open,
    Ping,
    Pong,
    Probe,
    Release,
    Reserve,
)
from ..runtime.keys.allowed import PREFILL, AllowedKeys, KeyEntry
from ..runtime.keys.name_owners import Claims

_ANYBODY = (Probe, Ping, Pong)


class PeerGate:
    """Checks the messages of prefill workers to one decode worker.

    ``owner_of(request, attempt)`` and ``owner_of_grant(grant)``: incarnation that reserved the
    live grant; None if there is no such grant.
    """

    def __init__(
        self,
        owner_of: Callable[[bytes, int], int | None],
        owner_of_grant: Callable[[GrantRef], int | None],
    ) -> None:
        self._owner_of = owner_of
        self._owner_of_grant = owner_of_grant
        self._claims = Claims()

    def refusal(
        self, allowed: AllowedKeys, entry: KeyEntry | None, peer: bytes, message: Message
    ) -> AccessDenied | None:
        """Return why a message must be rejected, or None if it is allowed."""
        if isinstance(message, _ANYBODY):
            return None
        name = type(message).__name__
        if entry is None or entry.role != PREFILL:
            return AccessDenied(f"{name} needs the key of a prefill worker")
        key = entry.public.encode()
        if isinstance(message, Open):
            if not allowed.may_be(entry, PREFILL, message.worker):
                return AccessDenied(f"the key of the caller is not valid for {message.worker!r}")
            return _foreign(name) if self._claims.take(peer, key, message.incarnation) else None
        if isinstance(message, Reserve | Release) and not self.holds(key, message.incarnation):
            return _foreign(name)
        owner = self._owner(message)
        return None if owner is None or self.holds(key, owner) else _foreign(name)

    def holds(self, key: bytes, incarnation: int) -> bool:
        """True if the incarnation opened a link here with this key."""
        return self._claims.lives(key, incarnation)

    def _owner(self, message: Message) -> int | None:
        match message:
            case Reserve() | Release():
                return self._owner_of(message.request, message.attempt)
            case Commit() | Fence():
                return self._owner_of_grant(message.grant)
            case _:
                return None


def _foreign(name: str) -> AccessDenied:
    return AccessDenied(f"{name} concerns a worker or a handoff of another key")
