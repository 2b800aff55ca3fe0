"""Which processes hang: no router has a use for them, and they show no sign of life themselves.

A supervised process writes a sign of life to its supervisor every second, from the loop that
answers its sockets (``runtime.process``). That is the evidence from the process itself: without
it a cut connection would look like a hang, and a serving process would be killed for it.

Pure; times are seconds of one monotonic clock. Only time counts in which a router could have seen
a worker, and none in which the supervisor itself was stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ..runtime.liveness import DEFAULT_WORKER_TIMEOUT_S
from .report import DEAD, DRAINED, ClusterReport

_PAUSE = 2.0  # the supervisor looks several times a second; a longer gap was a pause of its own
_AWAY = 1.5  # a router reports several times a second; after a longer gap it begins anew
_GLANCE = 0.5  # a worker that one of two routers reports first is not lost


class HangLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations in seconds."""

    worker_timeout: float = DEFAULT_WORKER_TIMEOUT_S
    """What the routers give a worker until they declare it dead; the setting of that name."""
    router_timeout: float = 10.0
    """Neither an answer nor a sign of life for so long: the router hangs."""
    lost_timeout: float = 60.0
    """A worker that the routers have lost for so long is restarted in spite of signs of life."""

    @property
    def hang_timeout(self) -> float:
        """No sign of life for so long, and the routers have lost it: the worker hangs.

        Twice the worker timeout: a worker that was only paused returns by itself, and need not
        load its weights again.
        """
        return max(3.0, 2 * self.worker_timeout)


class Declared(msgspec.Struct, frozen=True):
    """What a router says of a worker it has declared dead. ``stuck``: alive, but no progress."""

    pid: int
    reason: str
    stuck: bool = False


def declared_dead(report: ClusterReport) -> dict[str, Declared]:
    """The workers a router has declared dead, by name."""
    return {
        worker.id: Declared(worker.pid, worker.reason, worker.stuck)
        for worker in report.workers
        if worker.state == DEAD and worker.reason != DRAINED
    }


@dataclass(frozen=True, slots=True)
class Hang:
    """A process that hangs, and why that is certain."""

    name: str
    pid: int
    why: str


@dataclass(slots=True)
class _Process:
    router: bool
    pid: int
    seen_at: float | None = None  # by any router; of a router: its last answer
    joined: bool = False  # it was ever seen
    served_since: float | None = None  # its loop runs: the model is loaded
    alive_at: float | None = None  # last sign of life
    declared: Declared | None = None
    dead_at: set[str] = field(default_factory=set)  # routers that have declared it dead


@dataclass(slots=True)
class _Reports:
    since: float
    last: float


class Hangs:
    """The processes of a cluster, as far as hangs are concerned; by name."""

    def __init__(self, limits: HangLimits | None = None) -> None:
        self.limits = limits or HangLimits()
        self._processes: dict[str, _Process] = {}
        self._reports: dict[str, _Reports] = {}
        self._now: float | None = None

    # ------------------------------------------------------------- what is seen

    def started(self, name: str, pid: int, *, router: bool) -> None:
        """A process runs; one that never was seen does not hang, it loads."""
        self._processes[name] = _Process(router, pid)
        self._reports.pop(name, None)

    def ended(self, name: str) -> None:
        """The process is gone."""
        self._processes.pop(name, None)
        self._reports.pop(name, None)

    def alive(self, name: str, now: float) -> None:
        """It wrote a sign of life."""
        process = self._processes.get(name)
        if process is not None:
            process.alive_at = now
            process.served_since = now if process.served_since is None else process.served_since

    def reported(
        self, router: str, alive: Mapping[str, int], dead: Mapping[str, Declared], now: float
    ) -> list[tuple[str, str]]:
        """A router answered: process ids of the workers it finds alive, and its dead ones.

        Returns ``(name, reason)`` of the live processes it has declared dead since it last found
        them alive.
        """
        news = []
        said = self._reports.get(router)
        if said is None or now - said.last > _AWAY:
            said = self._reports[router] = _Reports(now, now)
        said.last = now
        for name, process in self._processes.items():
            if name == router or (not process.router and alive.get(name) == process.pid):
                process.seen_at, process.joined, process.declared = now, True, None
                process.dead_at.discard(router)
                if process.served_since is None:
                    process.served_since = now
            elif name in dead and dead[name].pid == process.pid:
                process.declared = dead[name]
                if router not in process.dead_at:
                    process.dead_at.add(router)
                    news.append((name, dead[name].reason))
        return news

    def forgive_pause(self, now: float) -> None:
        """A supervisor that was itself stopped must not blame others for it; call it often."""
        gap = 0.0 if self._now is None else now - self._now
        self._now = now
        if gap <= _PAUSE:
            return
        for process in self._processes.values():
            process.seen_at = None if process.seen_at is None else process.seen_at + gap
            process.alive_at = None if process.alive_at is None else process.alive_at + gap
        for reports in self._reports.values():
            reports.since, reports.last = reports.since + gap, reports.last + gap

    # ------------------------------------------------------------- what follows

    def joined(self, name: str) -> bool:
        """Whether a router has ever seen this process."""
        return name in self._processes and self._processes[name].joined

    def served(self, name: str, now: float) -> float | None:
        """For how long this process has run its loop; None if it never did."""
        process = self._processes.get(name)
        if process is None or process.served_since is None:
            return None
        return now - process.served_since

    def declared(self, name: str) -> str:
        """Why a router has declared this process dead; empty if none has."""
        process = self._processes.get(name)
        return "" if process is None or process.declared is None else process.declared.reason

    def hung(self, now: float) -> list[Hang]:
        """Processes that hang; each is named once."""
        found = []
        for name, process in self._processes.items():
            if process.seen_at is None:
                continue
            why = self._why(process, process.seen_at, now)
            if why:
                process.seen_at = None
                found.append(Hang(name, process.pid, why))
        return found

    def _why(self, process: _Process, seen_at: float, now: float) -> str:
        quiet = now - (seen_at if process.alive_at is None else process.alive_at)
        if process.router:
            silent = min(now - seen_at, quiet)
            limit = self.limits.router_timeout
            return f"no answer and no sign of life for {silent:.1f} s" if silent >= limit else ""
        return self._why_worker(process, self._lost(seen_at), quiet)

    def _why_worker(self, process: _Process, lost: float, quiet: float) -> str:
        limits = self.limits
        reason = process.declared.reason if process.declared else "unknown to the routers"
        if lost >= _GLANCE and quiet >= limits.hang_timeout:
            return f"{reason}; no sign of life for {quiet:.1f} s"
        stuck = process.declared is not None and process.declared.stuck
        limit = min(limits.hang_timeout, limits.lost_timeout) if stuck else limits.lost_timeout
        return f"{reason}; lost to the routers for {lost:.1f} s" if lost >= limit else ""

    def _lost(self, seen_at: float) -> float:
        """Seconds in which routers reported and did not see a worker."""
        times = (r.last - max(seen_at, r.since) for r in self._reports.values())
        return max(times, default=0.0)
