"""The members of a cluster and their stages.

Invariant: names are unique. A name becomes free only after its member has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..report import DRAINED, ClusterReport
from ..roles import POOLS, ROUTER


class Stage(enum.Enum):
    """Stage of a member."""

    STARTING = "starting"  # not ready yet, or not ready again after a crash
    READY = "ready"
    DRAINING = "draining"  # ordered to drain, or reported as draining by a router
    STOPPING = "stopping"  # the process manager stops it

    __hash__ = object.__hash__


@dataclass(slots=True)
class Member:
    """One member. Times are seconds of the controller's clock."""

    name: str
    role: str
    revision: int
    since: float
    """When the present stage began."""
    stage: Stage = Stage.STARTING
    pid: int = 0
    host: str = ""
    was_ready: bool = False
    restarts: int = 0
    died: bool = False
    """The process died during a drain."""
    left: bool = False
    """A router reported the drain as finished."""
    drain_sent_at: float = 0.0
    waits_for: str = ""
    """Why the member has no host yet."""
    turning: str = ""
    """Why the worker drains its former role, or registers in its new one."""
    cause: str = ""
    """Why its last process ended; empty after the member is ready again."""
    ends: int = 0
    """Number of ends in a row."""
    restart_at: float = 0.0
    """Time of the next restart, while ``cause`` is set and no process runs."""
    heard_at: float = 0.0
    """Time of a router's last answer."""

    @property
    def active(self) -> bool:
        """Whether the member counts for the size of its pool."""
        return self.stage in (Stage.STARTING, Stage.READY)

    @property
    def unseen(self) -> bool:
        """Whether the member was ready under a previous controller and is not found yet."""
        return self.stage is Stage.STARTING and self.was_ready and not self.restarts

    @property
    def index(self) -> int:
        """The number in the member's name, or 0."""
        number = self.name.rpartition("-")[2]
        return int(number) if number.isdigit() else 0

    def enter(self, stage: Stage, now: float) -> None:
        """Change stage."""
        self.stage = stage
        self.since = now


class Seen(NamedTuple):
    """One worker in a router's report."""

    state: str = ""
    reason: str = ""
    role: str = ""
    requests: int = 0


UNSEEN = Seen()


@dataclass(slots=True)
class View:
    """The last report of one router: its workers, and the number of its requests.

    By name and pid: workers with different keys may state one name.
    """

    workers: dict[tuple[str, int], Seen] = field(default_factory=dict)
    in_flight: int = 0

    @classmethod
    def of(cls, report: ClusterReport) -> View:
        """Extract the view from a report."""
        workers = {
            (w.id, w.pid): Seen(w.state, w.reason, w.role, w.requests_running + w.requests_waiting)
            for w in reversed(report.workers)
        }
        return cls(workers, report.router.requests.in_flight)

    def state(self, member: Member) -> str:
        """State of the member's present process; empty if the router has not seen it in its role.

        The former role of a worker that changes it is draining, and no matter of its new pool.
        """
        if not member.pid:
            return ""
        seen = self.workers.get((member.name, member.pid), UNSEEN)
        if seen.role != member.role:
            return ""
        return "left" if seen.state == "dead" and seen.reason == DRAINED else seen.state

    def requests(self, member: Member) -> int:
        """Return the running and waiting requests of the member's present process."""
        return self.workers.get((member.name, member.pid), UNSEEN).requests


class Members:
    """All members by name, and the routers' views of the workers."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self.views: dict[str, View] = {}
        """Last report of each router since the router's start."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def get(self, name: str) -> Member | None:
        """Return the member with this name, or None."""
        return self._members.get(name)

    def add(self, name: str, role: str, revision: int, now: float) -> Member:
        """Add a member. Its name must be free."""
        member = self._members[name] = Member(name, role, revision, now)
        return member

    def remove(self, name: str) -> Member | None:
        """Remove an ended member and return it, or None."""
        self.views.pop(name, None)
        return self._members.pop(name, None)

    def free_name(self, role: str) -> str:
        """Return ``role-N`` with the lowest free N.

        A worker that changed its role keeps its name.
        """
        names = (f"{role}-{number}" for number in range(len(self._members) + 1))
        return next(name for name in names if name not in self._members)

    def of_role(self, role: str) -> list[Member]:
        """Return all members of a role, in any stage."""
        return [member for member in self if member.role == role]

    def active(self, role: str) -> list[Member]:
        """Return the members that count for the size of a pool."""
        return [member for member in self.of_role(role) if member.active]

    def leaving(self, role: str) -> list[Member]:
        """Return the draining and stopping members of a role."""
        return [member for member in self.of_role(role) if not member.active]

    def workers(self) -> list[Member]:
        """Return the members of the pools."""
        return [member for member in self if member.role in POOLS]

    def seen_ready(self, worker: Member) -> bool:
        """Whether every router reports this worker as ready."""
        routers = self.of_role(ROUTER)
        views = [self.views.get(router.name) for router in routers]
        return bool(views) and all(v is not None and v.state(worker) == "ready" for v in views)

    def requests(self, worker: Member) -> int:
        """Return the requests of a worker by the routers' reports."""
        return max((view.requests(worker) for view in self.views.values()), default=0)

    def sees_all(self, router: Member) -> bool:
        """Whether a router reports every ready worker as ready."""
        view = self.views.get(router.name)
        ready = [member for member in self.workers() if member.stage is Stage.READY]
        return view is not None and all(view.state(member) == "ready" for member in ready)

    def states(self, worker: Member) -> set[str]:
        """Return the states of this worker in the routers' reports."""
        return {view.state(worker) for view in self.views.values()} - {""}
