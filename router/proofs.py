"""Proofs of assignment, which decide whether a worker may report about a request.

Invariant: a worker's message about a known request has an effect only if this router assigned the
attempt to the worker, or if the worker proves that a router of this cluster assigned it. So a
malicious worker can harm only the requests assigned to it.

Pure.
"""

from __future__ import annotations

import msgspec

from ..proto.wire.messages import Hello
from ..proto.wire.proofs import assignment_proof, same
from .lifecycle import Lifecycle
from .recent import Recent
from .requests import Request
from .workers import Worker

REMEMBER_ASKED = 4096


class Proofs:
    """Checks proofs of assignment."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._key = life.config.key
        self._asked: Recent[tuple[int, bytes], float] = Recent(REMEMBER_ASKED)  # when to ask again

    def shown(self, worker: Worker, request: Request, attempt: int, proof: bytes) -> bool:
        """True if ``proof`` proves that ``attempt`` of the request was assigned to the worker."""
        return self._is_right(proof, request.key, attempt, worker.incarnation)

    def proven(self, hello: Hello) -> Hello:
        """Return the Hello without the requests whose proofs are missing or wrong."""
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
        """True if a worker may be asked for its proof: at most once per ``adopt_retry_s``."""
        key = (worker.incarnation, request.key)
        if now < self._asked.get(key, 0.0):
            return False
        self._asked.put(key, now + self._life.config.adopt_retry_s)
        return True

    def _is_right(self, proof: bytes, request: bytes, attempt: int, incarnation: int) -> bool:
        right = assignment_proof(self._key, request, attempt, incarnation) if proof else b""
        return same(proof, right)
