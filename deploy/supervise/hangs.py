"""Detection of hanging processes: lost by all routers, and without heartbeat to the supervisor.

Routers do not report gateways: a gateway hangs if it has no heartbeat.

A supervised process sends a heartbeat to its supervisor every second, from a completed turn of its
clock (``runtime.process.clock``). Without this second evidence, a cut connection would look like a
hang, and the supervisor would kill a serving process. A process without heartbeat is replaced even
if the routers reach it: its sockets are served, but its clock stands still, so nothing times out.

Pure. Times are seconds of one monotonic clock. Periods without router reports, and periods in
which the supervisor itself was suspended, do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton.runtime.liveness import DEFAULT_WORKER_TIMEOUT_S

from ..report import DEAD, DRAINED, ClusterReport, WorkerReport
from ..roles import GATEWAY, ROUTER

_PAUSE = 2.0  # a longer gap between the supervisor's checks means that it was suspended
_AWAY = 1.5  # after a longer gap between a router's reports, its observation restarts
_GLANCE = 0.5  # tolerance between the reports of different routers about one worker


class HangLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations in seconds."""

    worker_timeout: float = DEFAULT_WORKER_TIMEOUT_S
    """The setting ``worker_timeout``: a router declares a worker dead after this time."""
    router_timeout: float = 10.0
    """A router or gateway without heartbeat for this time hangs."""
    lost_timeout: float = 60.0
    """A worker lost by all routers for this time is restarted, even with heartbeats."""

    @property
    def hang_timeout(self) -> float:
        """A worker without heartbeat for this time, and lost by the routers, hangs.

        Twice the worker timeout, so that a briefly paused worker can return without a restart,
        which would load its weights again.
        """
        return max(3.0, 2 * self.worker_timeout)

    @property
    def clock_timeout(self) -> float:
        """A worker without heartbeat for this time hangs, even if the routers reach it."""
        return max(self.hang_timeout, self.router_timeout)


@dataclass(frozen=True, slots=True)
class Hang:
    """A hanging process, and the evidence."""

    name: str
    pid: int
    why: str


@dataclass(slots=True)
class _Process:
    role: str
    pid: int
    seen_at: float | None = None  # last report by any router; for a router: its last answer
    joined: bool = False  # a router has reported the process at least once
    served_since: float | None = None  # when its loop started to run, with the model loaded
    alive_at: float | None = None  # last heartbeat to the supervisor
    turns: int | None = None  # completed turns of its clock at that heartbeat
    declared: WorkerReport | None = None  # the last report of it as declared dead
    dead_at: set[str] = field(default_factory=set)  # routers that have declared it dead


@dataclass(slots=True)
class _Reports:
    since: float
    last: float


class Hangs:
    """Observations of all processes of a cluster, by name, and the hangs that follow."""

    def __init__(self, limits: HangLimits | None = None) -> None:
        self.limits = limits or HangLimits()
        self._processes: dict[str, _Process] = {}
        self._reports: dict[str, _Reports] = {}
        self._now: float | None = None

    # ------------------------------------------------------------- observations

    def started(self, name: str, pid: int, role: str) -> None:
        """Record a started process. Until it is first seen, it counts as loading, not hanging."""
        self._processes[name] = _Process(role, pid)
        self._reports.pop(name, None)

    def ended(self, name: str) -> None:
        """Remove an ended process."""
        self._processes.pop(name, None)
        self._reports.pop(name, None)

    def alive(self, name: str, now: float, turns: int | None = None) -> None:
        """Record a heartbeat to the supervisor.

        ``turns``: completed turns of the process's clock, if known; a heartbeat without a turn
        since the last one is no sign of life.
        """
        process = self._processes.get(name)
        if process is not None and (turns is None or turns != process.turns):
            process.turns = turns
            process.alive_at = now
            process.served_since = now if process.served_since is None else process.served_since

    def reported(self, router: str, report: ClusterReport, now: float) -> list[tuple[str, str]]:
        """Record a router's report: the live workers, and the workers declared dead.

        Returns ``(name, reason)`` of each running process that the router has newly declared dead.
        """
        # By name and pid: workers with different keys may state one name.
        alive = {(worker.id, worker.pid) for worker in report.workers if worker.alive}
        dead = {(one.id, one.pid): one for one in report.workers if _declared_dead(one)}
        news = []
        said = self._reports.get(router)
        if said is None or now - said.last > _AWAY:
            said = self._reports[router] = _Reports(now, now)
        said.last = now
        for name, process in self._processes.items():
            who = name, process.pid
            if name == router or (process.role != ROUTER and who in alive):
                process.seen_at, process.joined, process.declared = now, True, None
                process.dead_at.discard(router)
                if process.served_since is None:
                    process.served_since = now
            elif who in dead:
                process.declared = dead[who]
                if router not in process.dead_at:
                    process.dead_at.add(router)
                    news.append((name, dead[who].reason))
        return news

    def forgive_pause(self, now: float) -> None:
        """Shift all times if the supervisor itself was suspended. Call this often."""
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
        """Seconds that this process has run its loop; None if the loop never ran."""
        process = self._processes.get(name)
        if process is None or process.served_since is None:
            return None
        return now - process.served_since

    def quiet(self, name: str, now: float) -> float | None:
        """Seconds since this process's last heartbeat; None before the first."""
        process = self._processes.get(name)
        if process is None or process.alive_at is None:
            return None
        return now - process.alive_at

    def declared(self, name: str) -> str:
        """Return a router's reason for declaring this process dead; empty if none did."""
        process = self._processes.get(name)
        return "" if process is None or process.declared is None else process.declared.reason

    def hung(self, now: float) -> list[Hang]:
        """Return newly detected hanging processes, each once."""
        found = [
            (name, process.pid, self.why(name, now)) for name, process in self._processes.items()
        ]
        return [Hang(name, pid, why) for name, pid, why in found if why]

    def why(self, name: str, now: float) -> str:
        """Return why this process hangs, once; empty if it does not."""
        process = self._processes.get(name)
        if process is None:
            return ""
        seen_at = process.alive_at if process.role == GATEWAY else process.seen_at
        why = "" if seen_at is None else self._why(process, seen_at, now)
        if why:
            process.seen_at = process.alive_at = None
        return why

    def _why(self, process: _Process, seen_at: float, now: float) -> str:
        quiet = now - (seen_at if process.alive_at is None else process.alive_at)
        if process.role == GATEWAY:
            return f"no heartbeat for {quiet:.1f} s" if quiet >= self.limits.router_timeout else ""
        if process.role == ROUTER:
            answers = "" if now - seen_at < self.limits.router_timeout else "no answer and "
            limit = self.limits.router_timeout
            return f"{answers}no heartbeat for {quiet:.1f} s" if quiet >= limit else ""
        if process.alive_at is not None and quiet >= self.limits.clock_timeout:
            return f"no heartbeat for {quiet:.1f} s: its clock stands still"
        return self._why_worker(process, self._lost(seen_at), quiet)

    def _why_worker(self, process: _Process, lost: float, quiet: float) -> str:
        limits = self.limits
        reason = process.declared.reason if process.declared else "unknown to the routers"
        if lost >= _GLANCE and quiet >= limits.hang_timeout:
            return f"{reason}; no heartbeat for {quiet:.1f} s"
        stuck = process.declared is not None and process.declared.stuck
        limit = min(limits.hang_timeout, limits.lost_timeout) if stuck else limits.lost_timeout
        return f"{reason}; not seen alive by the routers for {lost:.1f} s" if lost >= limit else ""

    def _lost(self, seen_at: float) -> float:
        """Seconds in which routers sent reports, but none with this worker alive."""
        times = (r.last - max(seen_at, r.since) for r in self._reports.values())
        return max(times, default=0.0)


def _declared_dead(worker: WorkerReport) -> bool:
    """Whether the router declared the worker dead. A drained worker has exited by itself."""
    return worker.state == DEAD and worker.reason != DRAINED
