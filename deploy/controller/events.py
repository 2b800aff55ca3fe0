"""Events and actions of the controller.

``ticket``: the shell's id of an operator's request. Each ticket receives Answers until a final one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ..supervise.core import Log, Reported, Tick
from .backend import MemberDown, MemberEnded, MemberServes, MemberStarted, MemberUnplaced
from .members import Member

# ----------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the cluster."""


@dataclass(frozen=True, slots=True)
class Scale:
    """An operator's order for pool sizes. Roles without an entry keep their size."""

    ticket: object
    targets: dict[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """The autoscaler's pool sizes. Sizes outside the bounds are moved into the bounds.

    ``why``: the reason of a change of role among them.
    """

    targets: dict[str, int]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Drain:
    """An order to drain a worker or gateway, and to keep one less.

    ``replace``: the worker's host leaves, and the pool keeps its size. ``force``: also if no other
    worker of its role serves.
    """

    ticket: object
    worker: str
    replace: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """An order to change the role of a worker, on its loaded model."""

    ticket: object
    worker: str
    role: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """Replace every member by a member of ``revision``, whose settings the shell has.

    ``grace``: new grace in seconds; None: unchanged. ``in_place``: stop each worker before its
    replacement starts.
    """

    ticket: object
    revision: int
    grace: float | None = None
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Down:
    """Drain and stop the cluster; the second time, stop at once. ``ticket``: None for a signal."""

    ticket: object = None


Event = (
    Begin
    | Scale
    | Measured
    | Drain
    | Turn
    | Rollout
    | Down
    | Reported
    | MemberStarted
    | MemberServes
    | MemberDown
    | MemberEnded
    | MemberUnplaced
    | Tick
)

# ----------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class StartMember:
    """Start a member with an unused name and the settings of ``revision``."""

    name: str
    role: str
    revision: int


@dataclass(frozen=True, slots=True)
class DrainMember:
    """Order every router to drain this worker."""

    name: str


@dataclass(frozen=True, slots=True)
class TurnMember:
    """Let a worker drain and go on in this role, with the settings of ``revision``."""

    name: str
    role: str
    revision: int


@dataclass(frozen=True, slots=True)
class StopMember:
    """SIGTERM, and SIGKILL ``grace`` seconds later."""

    name: str
    grace: float


@dataclass(frozen=True, slots=True)
class KillMember:
    """SIGKILL."""

    name: str


@dataclass(frozen=True, slots=True)
class RequestResources:
    """Request room for all members, by role. Replaces the previous request."""

    bundles: dict[str, int]


class Outcome(enum.Enum):
    """Kind of an Answer. DONE and FAILED are final for the ticket."""

    ACCEPTED = "accepted"
    PROGRESS = "progress"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Answer:
    """Send an answer to the request of this ticket."""

    ticket: object
    outcome: Outcome
    text: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """The last member has ended. Exit with this code."""

    code: int


Action = (
    StartMember
    | DrainMember
    | TurnMember
    | StopMember
    | KillMember
    | RequestResources
    | Log
    | Answer
    | End
)


@dataclass(slots=True)
class Waiters:
    """Operators' orders that have not ended, by ticket, and their final answers.

    Invariant: each ticket receives one final answer, DONE or FAILED, and is then dropped. The
    rollout holds its own ticket.
    """

    scales: list[object] = field(default_factory=list)
    downs: list[object] = field(default_factory=list)
    drains: dict[object, str] = field(default_factory=dict)
    """Worker name by ticket."""

    def end_scales(self, text: str, outcome: Outcome = Outcome.FAILED) -> list[Answer]:
        """Return final answers for all scale orders."""
        ended, self.scales = self.scales, []
        return [Answer(ticket, outcome, text) for ticket in ended]

    def progress(self, text: str) -> list[Answer]:
        """Return progress answers for all scale orders."""
        return [Answer(ticket, Outcome.PROGRESS, text) for ticket in self.scales]

    def end_drains(self, member: Member, code: int) -> list[Answer]:
        """Return final answers for the drains of a worker that ended with ``code``."""
        ended = [ticket for ticket, name in self.drains.items() if name == member.name]
        for ticket in ended:
            del self.drains[ticket]
        if member.left or (code == 0 and not member.died):
            return [Answer(ticket, Outcome.DONE, "left") for ticket in ended]
        text = f"{member.name} ended before its drain finished; its requests move to other workers"
        return [Answer(ticket, Outcome.FAILED, text) for ticket in ended]

    def end_all(self, text: str) -> list[Answer]:
        """Fail all scale orders and drains, because the cluster shuts down."""
        ended = [*self.scales, *self.drains]
        self.scales, self.drains = [], {}
        return [Answer(ticket, Outcome.FAILED, text) for ticket in ended]

    def end_downs(self) -> list[Answer]:
        """Return final answers for all shutdown orders, after the last process has ended."""
        ended, self.downs = self.downs, []
        return [Answer(ticket, Outcome.DONE, "everything has ended") for ticket in ended]
