"""Orphans: requests that workers hold for this router, but without a record here.

They began before a restart of the router. For ``orphan_grace_s`` their clients may resume them.
After that the router aborts every unknown request that a worker reports, so that no blocks stay
allocated without a client. A client that resumes later gets a replay.
"""

from __future__ import annotations

from ..proto.wire.messages import RequestState
from .lifecycle import Lifecycle
from .requests import NEVER
from .workers import Worker


class Orphans:
    """Decides which unknown requests may continue."""

    def __init__(self, life: Lifecycle, now: float) -> None:
        self._life = life
        self._until = now + life.config.orphan_grace_s
        self._swept = False

    def expected(self, worker: Worker, key: bytes, attempt: int, now: float) -> bool:
        """True if a client may still resume the attempt that ``worker`` holds."""
        held = worker.reported.get(key)
        return held is not None and self._is_ours(held) and not self._is_over(key, attempt, now)

    def unknown(self, worker: Worker, key: bytes, attempt: int, now: float) -> None:
        """Abort a request without a record that a worker reports, unless it may continue."""
        if self._is_over(key, attempt, now):
            self._life.abort_on(worker, key, attempt, NEVER, "unknown")

    def reported(self, worker: Worker, now: float) -> None:
        """Abort the listed orphans of a worker that may not continue."""
        for held in list(worker.reported.values()):
            key = held.request
            known = key in self._life.requests
            if not known and self._is_ours(held) and self._is_over(key, held.attempt, now):
                self._drop(worker, held)

    def cancelled(self, key: bytes) -> None:
        """Abort an unknown request on every worker that holds it; its client cancelled it."""
        for worker in self._life.registry.reporting:
            held = worker.reported.get(key)
            if held is not None and self._is_ours(held):
                self._drop(worker, held)

    def highest(self, key: bytes) -> int:
        """Return the highest attempt of an unknown request that a worker reports, else 0."""
        highest = 0
        for worker in self._life.registry.reporting:
            held = worker.reported.get(key)
            if held is not None:
                highest = max(highest, held.attempt)
        return highest

    def tick(self, now: float) -> None:
        """Abort the remaining orphans once the grace period has passed."""
        if not self._swept and now >= self._until:
            self._swept = True
            for worker in self._life.registry.live():
                self.reported(worker, now)

    def _drop(self, worker: Worker, held: RequestState) -> None:
        del worker.reported[held.request]
        self._life.remember_attempt(held.request, held.attempt)
        self._life.abort_on(worker, held.request, held.attempt, NEVER, "not resumed")

    def _is_ours(self, held: RequestState) -> bool:
        return held.router == self._life.config.name

    def _is_over(self, key: bytes, attempt: int, now: float) -> bool:
        life = self._life
        ended = attempt <= life.last_attempt(key) or life.tombstones.holds(key, now)
        return ended or now >= self._until
