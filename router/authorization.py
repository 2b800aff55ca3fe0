"""Access control: the messages that a CURVE key may send, and proofs of assignment.

Invariant: only an operator may drain workers and see the requests of other keys. A worker's key
permits its role and its name, and is part of its incarnation. So no key can register the
incarnation of another key's worker, whoever registers first.

Pure: takes key list entries and messages, returns rejections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from baton.proto.errors import AccessDenied, BatonError, EndpointDead
from baton.proto.ids import worker_incarnation
from baton.proto.wire.messages import Drain, Drained, Hello, Message
from baton.proto.wire.proofs import Holder, assignment_proof, same
from baton.runtime.keys.allowed import OPERATOR, AllowedKeys, KeyEntry
from baton.runtime.tables import ExpiringMap

from .config import RouterConfig
from .records import Request, Worker

REMEMBER_ASKED = 4096
"""Above this, a worker may be asked for a proof more often."""


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


def hello_refusal(allowed: AllowedKeys, entry: KeyEntry | None, hello: Hello) -> BatonError | None:
    """Return why the key of a connection does not allow this Hello, or None.

    Nothing is remembered: the key list says which names a key may use, and a worker's incarnation
    is computed from its key.
    """
    if entry is None or not allowed.may_be(entry, hello.role, hello.worker):
        what = "no worker" if entry is None else f"{entry.role} {' or '.join(entry.names)}"
        return AccessDenied(
            f"the key of this worker is for {what}, not for {hello.role} {hello.worker!r}, "
            "or that name belongs to another key: see allowed.toml of the router"
        )
    if hello.incarnation != worker_incarnation(entry.public.encode(), hello.nonce):
        return EndpointDead(
            f"the incarnation of {hello.worker} was not made with the key of its connection; "
            "register again with a new incarnation"
        )
    return None


class Proofs:
    """Checks proofs of assignment, which decide whether a worker may report about a request.

    Invariant: a worker's message about a known request has an effect only if this router assigned
    the attempt to the worker, or if the worker proves that a router of this cluster assigned it. So
    a malicious worker can harm only the requests assigned to it.
    """

    def __init__(self, config: RouterConfig, dropped: Counter[str]) -> None:
        self._key = config.key
        self._ask_again_s = config.adopt_retry_s
        self._dropped = dropped
        self._asked: ExpiringMap[tuple[int, bytes], None] = ExpiringMap(REMEMBER_ASKED)

    def shown(self, worker: Worker, request: Request, attempt: int, proof: bytes) -> bool:
        """True if ``proof`` proves that ``attempt`` of the request was assigned to the worker."""
        return self._is_right(proof, request.key, attempt, worker.holder)

    def proven(self, hello: Hello, key: bytes) -> Hello:
        """Return the Hello without the requests whose proofs are missing or wrong.

        ``key``: of the worker's connection.
        """
        holder = Holder(hello.incarnation, key)
        held = [
            one
            for one in hello.requests
            if self._is_right(one.proof, one.request, one.attempt, holder)
        ]
        lacking = len(hello.requests) - len(held)
        if not lacking:
            return hello
        self._dropped["unproven"] += lacking
        return msgspec.structs.replace(hello, requests=held)

    def may_ask(self, worker: Worker, request: Request, now: float) -> bool:
        """True if a worker may be asked for its proof: at most once per ``adopt_retry_s``."""
        key = (worker.incarnation, request.key)
        if self._asked.holds(key, now):
            return False
        self._asked.put(key, None, now + self._ask_again_s)
        return True

    def _is_right(self, proof: bytes, request: bytes, attempt: int, holder: Holder) -> bool:
        right = assignment_proof(self._key, request, attempt, holder) if proof else b""
        return same(proof, right)
