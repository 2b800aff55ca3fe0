"""Access control at sockets with CURVE keys: the messages that a key may send.

Invariant: only an operator may drain workers and see the requests of other keys. A worker's key
permits its role and its name. While a worker is connected, no other key can register its name,
endpoint or incarnation.

Pure: takes key list entries and messages, returns rejections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..proto.errors import AccessDenied, BatonError, CapacityError
from ..proto.wire.messages import Drain, Drained, Hello, Message
from ..runtime.keys.allowed import OPERATOR, AllowedKeys, KeyEntry
from ..runtime.keys.name_owners import Claims


@dataclass(slots=True, frozen=True)
class Caller:
    """The sender of a query: the key of its connection, and whether it is an operator."""

    key: bytes = b""
    operator: bool = True


ANYBODY = Caller()
"""Sender at a socket without keys: an operator, since only this machine's user can connect."""


def client_refusals(entry: KeyEntry | None, messages: Sequence[Message]) -> list[Drained]:
    """Return the answers to messages that a client's key forbids; empty if all are allowed."""
    if entry is not None and entry.role == OPERATOR:
        return []
    text = "draining a worker requires an operator key"
    return [
        Drained(worker=message.worker, code=AccessDenied.code, message=text)
        for message in messages
        if type(message) is Drain
    ]


def without_drains(messages: Sequence[Message]) -> list[Message]:
    """Return the messages that :func:`client_refusals` does not answer."""
    return [message for message in messages if type(message) is not Drain]


class WorkerGate:
    """Checks which keys may register which workers."""

    def __init__(self) -> None:
        self._claims = Claims()

    def refusal(
        self, allowed: AllowedKeys, entry: KeyEntry | None, identity: bytes, hello: Hello
    ) -> BatonError | None:
        """Return why this Hello is rejected, or None after claiming its name and endpoint."""
        if entry is None or not allowed.may_be(entry, hello.role, hello.worker):
            what = "no worker" if entry is None else f"{entry.role} {' or '.join(entry.names)}"
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
            text = f"a worker with another key uses this {taken}; retry after it disconnects"
            return CapacityError(text, retry_after=1.0)
        return None

    def gone(self, identity: bytes) -> None:
        """Drop the claims of a lost connection."""
        self._claims.gone(identity)
