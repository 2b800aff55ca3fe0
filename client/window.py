"""A bounded number of running requests for the many prompts of one call. Pure.

Invariant: at most ``size`` requests of a window run; the others wait in the order they came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..proto.errors import DeadlineExceeded
from .events import Ended, NewTokens, RequestSpec

Sink = Callable[[NewTokens | Ended], object]
WINDOW = 32
"""Requests of one call that run at a time; a router takes this many on its smallest cluster."""


class Window:
    """The requests of one call. ``now``: seconds of one clock, in all calls."""

    def __init__(self, size: int = WINDOW) -> None:
        self._size = size
        self._running: set[str] = set()
        self._waiting: dict[str, tuple[RequestSpec, Sink, float]] = {}

    def enter(self, spec: RequestSpec, sink: Sink, now: float) -> None:
        """Queue a request; :meth:`admit` hands it out."""
        self._waiting[spec.request_id] = (spec, sink, now)

    def admit(self, now: float) -> list[tuple[RequestSpec, Sink]]:
        """Requests to start now, their deadlines less the time they waited."""
        admitted = []
        while self._waiting and len(self._running) < self._size:
            request_id = next(iter(self._waiting))
            spec, sink, since = self._waiting.pop(request_id)
            self._running.add(request_id)
            if spec.deadline is not None:
                spec = replace(spec, deadline=spec.deadline - (now - since))
            admitted.append((spec, sink))
        return admitted

    def waits(self, request_id: str, sink: Sink) -> bool:
        """Whether the request of this sink has not started."""
        waiting = self._waiting.get(request_id)
        return waiting is not None and waiting[1] is sink

    def leave(self, request_id: str) -> None:
        """The request ended or is not wanted any more."""
        self._running.discard(request_id)
        self._waiting.pop(request_id, None)

    def close(self) -> dict[str, Sink]:
        """Start nothing more; the sinks of the requests that never started."""
        waiting, self._waiting = self._waiting, {}
        return {request_id: sink for request_id, (_, sink, _) in waiting.items()}


def overdue_end(spec: RequestSpec) -> Ended | None:
    """The end of a request whose deadline passed while it waited, else None."""
    if spec.deadline is None or spec.deadline > 0:
        return None
    error = DeadlineExceeded("the deadline passed while other prompts of the call were running")
    return Ended(request_id=spec.request_id, position=0, error=error)
