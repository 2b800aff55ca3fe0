"""A decode worker's control socket: messages from prefill workers, checked, and the answers.

Invariant on sockets with CURVE: only prefill workers reserve, and each can act only on its own
handoffs. An incarnation belongs to the key that opened a link with it, and a grant to the
incarnation that reserved it. Routers and operators may send Probe and Ping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from ..kv_transfer.checksums import envelope_digest
from ..proto.errors import AccessDenied, EnvelopeDamaged, ProtocolError
from ..proto.wire.envelope import EnvelopeDecoder
from ..proto.wire.messages import (
    Commit,
    Fence,
    GrantRef,
    Message,
    Open,
    Ping,
    Pong,
    PrefillToDecode,
    Probe,
    Rejected,
    Release,
    Reserve,
)
from ..runtime.keys.allowed import PREFILL, AllowedKeys, KeyEntry
from ..runtime.keys.identity_owners import Callers
from ..runtime.keys.name_owners import Claims
from ..runtime.net.channel import Frames
from ..runtime.net.loop import Loop
from ..runtime.net.outbox import Outbox
from ..runtime.net.sockets import RouterChannel
from ..runtime.process.limited_log import LimitedLog

_ANYBODY = (Probe, Ping, Pong)


class GrantOwners(Protocol):
    """Which prefill incarnation owns a live grant; the receiver of handoffs knows it."""

    def owner_of_attempt(self, request: bytes, attempt: int) -> int | None:
        """Return the incarnation that reserved for this attempt, or None."""
        ...

    def owner(self, grant: GrantRef) -> int | None:
        """Return the incarnation that holds this grant, or None."""
        ...


class PeerGate:
    """Checks the messages of prefill workers to one decode worker. Pure."""

    def __init__(self, owners: GrantOwners) -> None:
        self._owners = owners
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
                return self._owners.owner_of_attempt(message.request, message.attempt)
            case Commit() | Fence():
                return self._owners.owner(message.grant)
            case _:
                return None


def _foreign(name: str) -> AccessDenied:
    return AccessDenied(f"{name} concerns a worker or a handoff of another key")


class ControlSocket:
    """The bound socket for prefill workers; ``dropped`` counts messages that were not accepted."""

    def __init__(
        self, channel: RouterChannel, loop: Loop, gate: PeerGate, dropped: Counter[str]
    ) -> None:
        self._channel = channel
        self._loop = loop
        self._gate = gate
        self._dropped = dropped
        self._log = LimitedLog(loop)
        self._decoder: EnvelopeDecoder[PrefillToDecode] = EnvelopeDecoder(
            PrefillToDecode, digest=envelope_digest
        )
        self._outbox: Outbox[bytes] = Outbox(channel.send, digest=envelope_digest)

    def attach(
        self, on_message: Callable[[bytes, Message], object], on_gone: Callable[[bytes], object]
    ) -> None:
        """Start listening; ``on_message(peer, message)`` receives the accepted messages."""
        self._channel.attach(
            self._loop, lambda peer, frames: self._hear(peer, frames, on_message), on_gone
        )

    def send(self, peer: bytes, message: Message) -> None:
        """Queue a message until :meth:`flush`."""
        self._outbox.put(peer, message)

    def flush(self) -> None:
        """Send everything queued."""
        self._outbox.flush()

    def _hear(
        self, peer: bytes, frames: Frames, on_message: Callable[[bytes, Message], object]
    ) -> None:
        try:
            messages = self._decoder.decode(frames)
        except EnvelopeDamaged as error:
            self._dropped[f"peer_{error.code}"] += 1
            self._log.warning("peer.damaged", count=self._decoder.damaged)
            return  # treated as a lost message: the peer repeats it
        except ProtocolError as error:
            self._reject(peer, "peer.malformed", error)
            return
        if self._channel.callers is not None:
            messages = self._allowed(self._channel.callers, peer, messages)
        for message in messages:
            on_message(peer, message)

    def _allowed(
        self, callers: Callers, peer: bytes, messages: list[PrefillToDecode]
    ) -> list[PrefillToDecode]:
        """Return the messages that the peer's key allows; reject the others."""
        entry, allowed = callers.entry_of(peer), callers.allowed()
        passed = []
        for message in messages:
            error = self._gate.refusal(allowed, entry, peer, message)
            if error is None:
                passed.append(message)
            else:
                self._reject(peer, "peer.denied", error)
        return passed

    def _reject(self, peer: bytes, event: str, error: ProtocolError | AccessDenied) -> None:
        self._dropped[f"peer_{error.code}"] += 1
        self._log.warning(event, error=str(error))
        self._outbox.put(peer, Rejected(code=error.code, message=str(error)))
