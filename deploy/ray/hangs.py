"""Which members hang: their processes live and nothing is heard of them.

Pure; times are seconds of one monotonic clock. Only time counts in which a router could have
heard a worker: one that was itself away, or just came, blames nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..launcher import ROUTER
from ..report import ClusterReport

_AWAY = 1.5  # a router reports several times a second; after a longer gap it begins anew


@dataclass(slots=True)
class _Process:
    role: str
    pid: int
    seen_at: float | None = None  # by any router, or answering itself


@dataclass(slots=True)
class _Reports:
    since: float
    last: float


class Hangs:
    """``worker_limit``, ``router_limit``: silence of a live process that counts as a hang."""

    def __init__(self, worker_limit: float = 3.0, router_limit: float = 10.0) -> None:
        self._limits = (worker_limit, router_limit)
        self._processes: dict[str, _Process] = {}
        self._reports: dict[str, _Reports] = {}

    def started(self, name: str, role: str, pid: int) -> None:
        """A member's process runs; one that has never been heard does not hang, it loads."""
        self._processes[name] = _Process(role, pid)
        self._reports.pop(name, None)

    def ended(self, name: str) -> None:
        """The member is gone."""
        self._processes.pop(name, None)
        self._reports.pop(name, None)

    def heard(self, router: str, report: ClusterReport, now: float) -> None:
        """A router answered."""
        said = self._reports.get(router)
        if said is None or now - said.last > _AWAY:
            said = self._reports[router] = _Reports(now, now)
        said.last = now
        alive = {worker.id: worker.pid for worker in report.workers if worker.alive}
        for name, process in self._processes.items():
            if name == router or (process.role != ROUTER and alive.get(name) == process.pid):
                process.seen_at = now

    def hung(self, now: float) -> list[tuple[str, int]]:
        """``(name, pid)`` of those that hang; each is said once."""
        found = []
        for name, process in self._processes.items():
            if process.seen_at is None:
                continue
            if self._silence(process, now) >= self._limits[process.role == ROUTER]:
                process.seen_at = None
                found.append((name, process.pid))
        return found

    def _silence(self, process: _Process, now: float) -> float:
        seen = 0.0 if process.seen_at is None else process.seen_at
        if process.role == ROUTER:
            return now - seen
        return max((r.last - max(seen, r.since) for r in self._reports.values()), default=0.0)
