"""Which workers may speak about a request: those it was assigned to, and those that prove it.

Invariant: what a worker says of a request that is here has an effect only if this router assigned
the request's attempt to the worker, or if the worker shows the proof that a router of this cluster
did. So a worker harms nothing but what was given to it.

Pure.
"""

from __future__ import annotations

import msgspec

from ..proto.messages import Hello
from ..proto.proofs import assignment_proof, same
from .lifecycle import Lifecycle
from .recent import Recent
from .registry import Worker
from .request import Request

REMEMBER_ASKED = 4096


class Proofs:
    """Checks what workers show."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._key = life.config.key
        self._asked: Recent[tuple[int, bytes], float] = Recent(REMEMBER_ASKED)  # when to ask again

    def shown(self, worker: Worker, request: Request, attempt: int, proof: bytes) -> bool:
        """Whether ``proof`` shows that the request's ``attempt`` was given to the worker."""
        return self._is_right(proof, request.key, attempt, worker.incarnation)

    def proven(self, hello: Hello) -> Hello:
        """The same Hello, with those requests only that were given to its worker."""
        held = [
            one
            for one in hello.requests
            if self._is_right(one.proof, one.request, one.attempt, hello.incarnation)
        ]
        lacking = len(hello.requests) - len(held)
        if not lacking:
            return hello
        self._life.counters.dropped["unproven"] += lacking
        return msgspec.structs.replace(hello, requests=held)

    def may_ask(self, worker: Worker, request: Request, now: float) -> bool:
        """Whether to ask a worker for its proof: not again before it can have answered."""
        key = (worker.incarnation, request.key)
        if now < self._asked.get(key, 0.0):
            return False
        self._asked.put(key, now + self._life.config.adopt_retry_s)
        return True

    def _is_right(self, proof: bytes, request: bytes, attempt: int, incarnation: int) -> bool:
        right = assignment_proof(self._key, request, attempt, incarnation) if proof else b""
        return same(proof, right)
