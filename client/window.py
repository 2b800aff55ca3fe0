"""A bounded number of running requests for a call with many prompts. Pure.

Invariant: at most ``size`` requests of a window run. The others wait in order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..proto.errors import DeadlineExceeded
from .events import Ended, NewTokens, RequestSpec

Sink = Callable[[NewTokens | Ended], object]
WINDOW = 32
"""Maximum running requests of one call. Even the smallest cluster accepts this many."""


class Window:
    """The requests of one call. ``now`` in all methods: seconds of one clock."""

    def __init__(self, size: int = WINDOW) -> None:
        self._size = size
        self._running: set[str] = set()
        self._waiting: dict[str, tuple[RequestSpec, Sink, float]] = {}

    def enter(self, spec: RequestSpec, sink: Sink, now: float) -> None:
        """Queue a request. :meth:`admit` returns it when there is room."""
        self._waiting[spec.request_id] = (spec, sink, now)

    def admit(self, now: float) -> list[tuple[RequestSpec, Sink]]:
        """Return the requests to start now, with deadlines reduced by the time they waited."""
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
        """Whether this sink's request is waiting."""
        waiting = self._waiting.get(request_id)
        return waiting is not None and waiting[1] is sink

    def leave(self, request_id: str) -> None:
        """Remove a request that ended or was cancelled."""
        self._running.discard(request_id)
        self._waiting.pop(request_id, None)

    def close(self) -> dict[str, Sink]:
        """Remove all waiting requests and return their sinks by request id."""
        waiting, self._waiting = self._waiting, {}
        return {request_id: sink for request_id, (_, sink, _) in waiting.items()}


def overdue_end(spec: RequestSpec) -> Ended | None:
    """Return the end of a request whose deadline passed while it waited, else None."""
    if spec.deadline is None or spec.deadline > 0:
        return None
    error = DeadlineExceeded("the deadline passed while other prompts of the call were running")
    return Ended(request_id=spec.request_id, position=0, error=error)
