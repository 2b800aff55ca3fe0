"""Find the worker that holds a request of another router.

The search sends Adopt to every worker. The worker that holds the request proves the assignment
(:mod:`.proofs`) and sends its tokens; every other worker denies it with Aborted.

A request can move from a prefill to a decode worker during the search, but never back. So after
all workers have denied it, a second round asks the decode workers once more. If all of them deny
it again, no worker holds the request.

Adopt is repeated to a worker that does not answer, until the worker is dead or the search ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..proto.wire.messages import Adopt
from .events import ToWorker
from .lifecycle import Lifecycle
from .requests import Request
from .workers import Worker

SEARCH_S = 2.5
"""Longest search in seconds; after it the request is replayed."""


@dataclass(slots=True)
class Sought:
    """State of one search: its end, the workers without an answer, and the round."""

    until: float
    waiting: dict[int, Worker] = field(default_factory=dict)  # by incarnation
    again: bool = False  # in the second round


class Search:
    """Sends the Adopts and collects the denials; :class:`.recovery.Recovery` acts on the result."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life

    def begin(self, request: Request, now: float) -> bool:
        """Ask all workers; return False if no worker can answer."""
        sought = request.attempt.search = Sought(now + SEARCH_S)
        return self._ask(request, sought, request.roles, now)

    def repeat(self, request: Request, now: float) -> bool:
        """Ask the workers without an answer again; return False if the search has ended."""
        sought = request.attempt.search
        if sought is None or now >= sought.until:
            return False
        sought.waiting = {key: one for key, one in sought.waiting.items() if _answers(one)}
        if not sought.waiting:
            return self._second_round(request, sought, now)
        self._send(request, sought, now)
        return True

    def denied(self, request: Request, worker: Worker, now: float) -> bool:
        """Note that ``worker`` does not hold the request; return False if the search has ended."""
        sought = request.attempt.search
        if sought is None or sought.waiting.pop(worker.incarnation, None) is None:
            return True  # not asked, or has answered already
        return bool(sought.waiting) or self._second_round(request, sought, now)

    def _second_round(self, request: Request, sought: Sought, now: float) -> bool:
        if sought.again or request.embeds:
            return False
        sought.again = True
        return self._ask(request, sought, ("decode",), now)

    def _ask(self, request: Request, sought: Sought, roles: tuple[str, ...], now: float) -> bool:
        live = self._life.registry.live()
        workers = [worker for worker in live if worker.role in roles and _answers(worker)]
        sought.waiting = {worker.incarnation: worker for worker in workers}
        self._send(request, sought, now)
        return bool(workers)

    def _send(self, request: Request, sought: Sought, now: float) -> None:
        adopt = Adopt(request=request.key, position=request.next)
        self._life.out += [ToWorker(one.identity, adopt) for one in sought.waiting.values()]
        retry = now + self._life.config.adopt_retry_s
        self._life.wake(request, min(retry, sought.until), now)


def _answers(worker: Worker) -> bool:
    """True if the worker can answer. A disconnected one lists its requests when it returns."""
    return worker.live and not worker.hung_up
