"""A bounded number of running requests for a call with many prompts. Pure.

Invariant: at most ``size`` requests of a window run. The others wait in order of arrival. A window
starts with :data:`WINDOW` requests. If more wait, it asks for the router's status once, and takes
the size from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from baton.proto.errors import DeadlineExceeded

from .events import Ended, NewTokens, RequestSpec

Sink = Callable[[NewTokens | Ended], object]
WINDOW = 32
"""Running requests of one call, as long as the cluster's size is unknown."""
ROUNDS = 2
"""Running requests of one call per batch slot of the cluster: the next ones wait there already."""
LARGEST = 4096


def size_for(report: Mapping[str, Any]) -> int:
    """Return the running requests of a call for a cluster with this status report."""
    router = report.get("router", {})
    slots, limit = router.get("batch_slots", 0), router.get("requests", {}).get("limit", 0)
    if not slots or not limit:  # no worker
        return WINDOW
    return int(min(max(ROUNDS * slots, WINDOW), limit, LARGEST))


class Window:
    """The requests of one call. ``now`` in all methods: seconds of one clock."""

    def __init__(self, size: int = WINDOW) -> None:
        self._size = size
        self._asked = False
        self._running: set[str] = set()
        self._waiting: dict[str, tuple[RequestSpec, Sink, float]] = {}

    def enter(self, spec: RequestSpec, sink: Sink, now: float) -> None:
        """Queue a request. :meth:`admit` returns it when there is room."""
        self._waiting[spec.request_id] = (spec, sink, now)

    def wants_size(self) -> bool:
        """Whether to ask for the cluster's size now: once, if requests wait."""
        if self._asked or not self._waiting:
            return False
        self._asked = True
        return True

    def resize(self, size: int) -> None:
        """Change the maximum number of running requests; more may still run."""
        self._size = size

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
