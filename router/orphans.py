"""Requests that workers hold for this router and that nobody here knows.

They belong to clients of an earlier life of the router. For a while their clients may come
back; after that whatever a worker reports or says of an unknown request is aborted there, so
no blocks are held for nobody. A client that comes still later is served by replay.
"""

from __future__ import annotations

from ..proto.messages import RequestState
from .lifecycle import Lifecycle
from .registry import Worker
from .request import NEVER


class Orphans:
    """Decides which unknown requests may run on."""

    def __init__(self, life: Lifecycle, now: float) -> None:
        self._life = life
        self._until = now + life.config.orphan_grace_s
        self._swept = False

    def expected(self, worker: Worker, key: bytes, attempt: int, now: float) -> bool:
        """Whether a client may still come back for what ``worker`` holds of ``key``."""
        held = worker.reported.get(key)
        return held is not None and self._is_ours(held) and not self._is_over(key, attempt, now)

    def unknown(self, worker: Worker, key: bytes, attempt: int, now: float) -> None:
        """A worker speaks of a request that has no record here: free it unless it may run on."""
        if self._is_over(key, attempt, now):
            self._life.abort_on(worker, key, attempt, NEVER, "unknown")

    def reported(self, worker: Worker, now: float) -> None:
        """A worker has listed what it holds."""
        for held in list(worker.reported.values()):
            key = held.request
            known = key in self._life.requests
            if not known and self._is_ours(held) and self._is_over(key, held.attempt, now):
                self._drop(worker, held)

    def cancelled(self, key: bytes) -> None:
        """The client of an unknown request wants its end."""
        for worker in self._life.registry.reporting:
            held = worker.reported.get(key)
            if held is not None and self._is_ours(held):
                self._drop(worker, held)

    def highest(self, key: bytes) -> int:
        """Highest attempt any worker reports of an unknown request, 0 for none."""
        highest = 0
        for worker in self._life.registry.reporting:
            held = worker.reported.get(key)
            if held is not None:
                highest = max(highest, held.attempt)
        return highest

    def tick(self, now: float) -> None:
        """End the time of grace, once."""
        if not self._swept and now >= self._until:
            self._swept = True
            for worker in self._life.registry.live():
                self.reported(worker, now)

    def _drop(self, worker: Worker, held: RequestState) -> None:
        del worker.reported[held.request]
        self._life.remember_attempt(held.request, held.attempt)
        self._life.abort_on(worker, held.request, held.attempt, NEVER, "nobody resumed it")

    def _is_ours(self, held: RequestState) -> bool:
        return held.router == self._life.config.name

    def _is_over(self, key: bytes, attempt: int, now: float) -> bool:
        life = self._life
        ended = attempt <= life.last_attempt(key) or life.tombstones.holds(key, now)
        return ended or now >= self._until
