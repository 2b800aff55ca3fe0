"""What the controller is told and what it wants done: its events and actions.

``ticket``: the edge's name for whoever asked; each gets Answers until one that is final.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .core import Say
from .launcher import MemberDown, MemberEnded, MemberStarted, MemberUnplaced
from .report import ClusterReport

# ----------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Begin:
    """Start everything."""


@dataclass(frozen=True, slots=True)
class Scale:
    """An operator wants pools of this size; a role that is not named stays as it is."""

    ticket: object
    targets: dict[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """The autoscaler wants pools of this size; what is out of bounds is moved into them."""

    targets: dict[str, int]


@dataclass(frozen=True, slots=True)
class Drain:
    """A worker is wanted out; its pool is one smaller from then on.

    ``replace``: its host leaves, and the pool stays as large. ``force``: also if it is the last
    that serves.
    """

    ticket: object
    worker: str
    replace: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """Replace every member by one of ``revision``, which the edge has settings for.

    ``grace``: holds from now on; None: as before. ``in_place``: each worker leaves before its
    successor starts.
    """

    ticket: object
    revision: int
    grace: float | None = None
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Down:
    """Drain and end everything; a second time: at once. ``ticket``: None for a signal."""

    ticket: object = None


@dataclass(frozen=True, slots=True)
class Reported:
    """A router answered."""

    router: str
    report: ClusterReport


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    Begin
    | Scale
    | Measured
    | Drain
    | Rollout
    | Down
    | Reported
    | MemberStarted
    | MemberDown
    | MemberEnded
    | MemberUnplaced
    | Tick
)

# ----------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class StartMember:
    """Start a member of these settings; its name is free."""

    name: str
    role: str
    revision: int


@dataclass(frozen=True, slots=True)
class DrainMember:
    """Have every router tell this worker to finish what it has and leave."""

    name: str


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
    """Members wanted by role, all of them; replaces the request before."""

    bundles: dict[str, int]


class Outcome(enum.Enum):
    """What an Answer means; after DONE and FAILED nothing more comes for its ticket."""

    ACCEPTED = "accepted"
    PROGRESS = "progress"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell whoever holds the ticket."""

    ticket: object
    outcome: Outcome
    text: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """Every member is gone; leave with this exit code."""

    code: int


Action = StartMember | DrainMember | StopMember | KillMember | RequestResources | Say | Answer | End
