"""Finding the worker that holds a request which began at another router.

Every worker is asked to hand it over (Adopt). The one that has it proves that a router assigned it
(:mod:`.proofs`) and sends its tokens; the others say no. While nobody looks a request moves from a
prefill to a decode worker, never back: so once all have said no the decode workers are asked again,
and a second no of all of them is the truth.
A worker that says nothing is asked again until it is dead, or the time of the search is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..proto.messages import Adopt
from .events import ToWorker
from .lifecycle import Lifecycle
from .registry import Worker
from .request import Request

SEARCH_S = 2.5
"""Longest time of a search: a silent worker is declared dead sooner."""


@dataclass(slots=True)
class Sought:
    """One search: until when, who has not answered yet, and whether it is the second round."""

    until: float
    waiting: dict[int, Worker] = field(default_factory=dict)  # by incarnation
    again: bool = False


class Search:
    """Asks the workers; what follows is :class:`.recovery.Recovery`'s business."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life

    def begin(self, request: Request, now: float) -> bool:
        """Ask all workers; false when there are none to ask."""
        sought = request.sought = Sought(now + SEARCH_S)
        return self._ask(request, sought, request.roles, now)

    def repeat(self, request: Request, now: float) -> bool:
        """Ask the silent ones again; false when nobody is left to be waited for."""
        sought = request.sought
        if sought is None or now >= sought.until:
            return False
        sought.waiting = {key: one for key, one in sought.waiting.items() if _answers(one)}
        if not sought.waiting:
            return self._second_round(request, sought, now)
        self._send(request, sought, now)
        return True

    def denied(self, request: Request, worker: Worker, now: float) -> bool:
        """``worker`` does not have it; false when nobody is left to be waited for."""
        sought = request.sought
        if sought is None or sought.waiting.pop(worker.incarnation, None) is None:
            return True  # not asked, or answered before
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
    """Whether an answer may come; one that hung up lists what it holds if it returns."""
    return worker.live and not worker.hung_up
