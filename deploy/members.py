"""The members of a cluster and where each stands.

Invariant: no two members have one name; a name is free again only when its member has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from .launcher import ROUTER
from .report import DRAINED, ClusterReport


class Stage(enum.Enum):
    """Where a member stands."""

    STARTING = "starting"  # not ready yet, or not ready again after a crash
    READY = "ready"
    DRAINING = "draining"  # told to finish and leave, or seen to
    STOPPING = "stopping"  # the backend ends it

    __hash__ = object.__hash__


@dataclass(slots=True)
class Member:
    """One member. Times are seconds of the controller's clock."""

    name: str
    role: str
    revision: int
    since: float
    """When it was started, or began to drain or stop."""
    stage: Stage = Stage.STARTING
    pid: int = 0
    host: str = ""
    was_ready: bool = False
    restarts: int = 0
    died: bool = False
    """It ended in mid-drain."""
    left: bool = False
    """A router said that it had finished, before its end was known."""
    drain_said_at: float = 0.0
    waits_for: str = ""
    """Why it has no host yet."""
    cause: str = ""
    """Why its last process ended, until it is ready again."""
    ends: int = 0
    """How often in a row its process ended."""
    restart_at: float = 0.0
    """When the next one starts, while there is a cause and no process."""
    heard_at: float = 0.0
    """Of a router: its last answer."""

    @property
    def active(self) -> bool:
        """Whether it counts for its pool's size."""
        return self.stage in (Stage.STARTING, Stage.READY)

    @property
    def unseen(self) -> bool:
        """Whether it was taken over from another controller, as ready, and not seen since."""
        return self.stage is Stage.STARTING and self.was_ready and not self.restarts

    @property
    def index(self) -> int:
        """The number in its name; 0 where it has none."""
        number = self.name.rpartition("-")[2]
        return int(number) if number.isdigit() else 0

    def enter(self, stage: Stage, now: float) -> None:
        """Change stage."""
        self.stage = stage
        self.since = now


@dataclass(slots=True)
class View:
    """What one router last said: ``(pid, state, reason)`` of each worker."""

    workers: dict[str, tuple[int, str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, report: ClusterReport) -> View:
        """What matters here of a report."""
        return cls({w.id: (w.pid, w.state, w.reason) for w in report.workers})

    def state(self, member: Member) -> str:
        """State of the member's present process; empty if this router does not know it."""
        pid, state, reason = self.workers.get(member.name, (0, "", ""))
        if not member.pid or pid != member.pid:
            return ""
        return "left" if state == "dead" and reason == DRAINED else state


class Members:
    """All members by name, and what the routers see of them."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self.views: dict[str, View] = {}
        """Last words of each router since it was started."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def get(self, name: str) -> Member | None:
        """The member of this name."""
        return self._members.get(name)

    def add(self, name: str, role: str, revision: int, now: float) -> Member:
        """A new member; its name must be free."""
        member = self._members[name] = Member(name, role, revision, now)
        return member

    def remove(self, name: str) -> Member | None:
        """It ended."""
        self.views.pop(name, None)
        return self._members.pop(name, None)

    def free_name(self, role: str) -> str:
        """``role-N`` with the lowest N that no member has."""
        taken = {member.index for member in self.of_role(role)}
        return f"{role}-{next(n for n in range(len(taken) + 1) if n not in taken)}"

    def of_role(self, role: str) -> list[Member]:
        """All of a role, in every stage."""
        return [member for member in self if member.role == role]

    def active(self, role: str) -> list[Member]:
        """Those that count for the pool's size."""
        return [member for member in self.of_role(role) if member.active]

    def leaving(self, role: str) -> list[Member]:
        """Those that do not count any more and are still there."""
        return [member for member in self.of_role(role) if not member.active]

    def workers(self) -> list[Member]:
        """All but the routers."""
        return [member for member in self if member.role != ROUTER]

    def seen_ready(self, worker: Member) -> bool:
        """Whether every router would give this worker requests now."""
        routers = self.of_role(ROUTER)
        views = [self.views.get(router.name) for router in routers]
        return bool(views) and all(v is not None and v.state(worker) == "ready" for v in views)

    def sees_all(self, router: Member) -> bool:
        """Whether a router knows every ready worker as ready."""
        view = self.views.get(router.name)
        ready = [member for member in self.workers() if member.stage is Stage.READY]
        return view is not None and all(view.state(member) == "ready" for member in ready)

    def states(self, worker: Member) -> set[str]:
        """The states the routers give this worker."""
        return {view.state(worker) for view in self.views.values()} - {""}
