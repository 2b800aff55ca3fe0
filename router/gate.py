"""What the key of a caller lets it say to the router; asked only where sockets have keys.

Invariant: only an operator drains, and sees what belongs to others. A worker registers in the role
and under a name its key may use; while it lives no other key registers with its name, endpoint or
incarnation.

Pure: entries of the key list and messages come in, refusals come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..proto.errors import AccessDenied, BatonError, CapacityError
from ..proto.messages import Drain, Drained, Hello, Message
from ..runtime.allowed_keys import OPERATOR, AllowedKeys, KeyEntry
from ..runtime.claims import Claims


@dataclass(slots=True, frozen=True)
class Caller:
    """Who asks. ``key``: of its connection; ``operator``: sees what belongs to others."""

    key: bytes = b""
    operator: bool = True


ANYBODY = Caller()
"""Who asks over a socket without keys: only this machine's user can, so nothing is hidden."""


def client_refusals(entry: KeyEntry | None, messages: Sequence[Message]) -> list[Drained]:
    """Answers to what a client's key does not let it ask; empty when all may pass."""
    if entry is not None and entry.role == OPERATOR:
        return []
    text = "draining a worker takes the key of an operator"
    return [
        Drained(worker=message.worker, code=AccessDenied.code, message=text)
        for message in messages
        if type(message) is Drain
    ]


def without_drains(messages: Sequence[Message]) -> list[Message]:
    """What may pass beside :func:`client_refusals`."""
    return [message for message in messages if type(message) is not Drain]


class WorkerGate:
    """Who may say Hello as whom."""

    def __init__(self) -> None:
        self._claims = Claims()

    def refusal(
        self, allowed: AllowedKeys, entry: KeyEntry | None, identity: bytes, hello: Hello
    ) -> BatonError | None:
        """Why this Hello must not be taken; None notes it as taken."""
        if entry is None or not allowed.may_be(entry, hello.role, hello.worker):
            what = "nobody" if entry is None else f"{entry.role} {' or '.join(entry.names)}"
            return AccessDenied(
                f"the key of this worker is for {what}, not for {hello.role} {hello.worker!r}, "
                "or that name belongs to another key: see allowed.toml of the router"
            )
        taken = self._claims.take(
            identity,
            entry.public.encode(),
            hello.incarnation,
            f"name {hello.worker}",
            f"endpoint {hello.endpoint}",
        )
        if taken:
            text = f"a worker with another key has this {taken}; it is free when that one is gone"
            return CapacityError(text, retry_after=1.0)
        return None

    def gone(self, identity: bytes) -> None:
        """Its connection was lost."""
        self._claims.gone(identity)
