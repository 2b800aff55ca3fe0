"""Decisions of a member's supervisor: start, restart and end its child process.

Pure: ``handle(event, now) -> actions``; times are monotonic seconds. The rule is that of the local
supervisor for one child: always restart it, after increasing delays, unless it refuses its settings
at the first start. Invariants: at most one child lives at a time; after :data:`State.ENDED` no
child is started.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..supervise.restart import RestartLimits, RestartPolicy


class State(enum.StrEnum):
    """The member's state."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"  # for its next start
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the child."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The child ended; see ``deploy.core.Exited``."""

    code: int
    reason: str = ""
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """The child runs its event loop: its model is loaded, and it can answer."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the child within ``grace`` seconds, and do not restart it."""

    grace: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Begin | Served | Exited | Stop | Tick


class Action(enum.Enum):
    """An action of the shell on the child."""

    START = "start"
    TERMINATE = "terminate"
    KILL = "kill"


class MemberCore:
    """The child process of one member; see the module docstring.

    ``retires``: exit code 0 means that the child has finished (a drained worker) and is not
    restarted. ``code``, ``reason``, ``refused``: of the last exit. ``starts``: number of starts.
    """

    def __init__(self, limits: RestartLimits | None = None, *, retires: bool = True) -> None:
        self.state = State.WAITING
        self.starts = 0
        self.code = 0
        self.reason = ""
        self.refused = False
        self._retires = retires
        self._policy = RestartPolicy(limits)
        self._due: float | None = None  # time of the next start, or of the kill while stopping
        self._served_since: float | None = None

    def handle(self, event: Event, now: float) -> list[Action]:
        """Return the actions for an event; the shell executes them in order."""
        match event:
            case Begin():
                return self._start()
            case Served():
                self._served_since = now if self._served_since is None else self._served_since
            case Exited():
                self._exited(event, now)
            case Stop(grace):
                return self._stop(now + grace)
            case Tick():
                pass
        return self._look_at(now)

    @property
    def _lives(self) -> bool:
        return self.state in (State.RUNNING, State.STOPPING)

    def _start(self) -> list[Action]:
        if self._lives or self.state is State.ENDED:
            return []
        self.state, self._due, self._served_since = State.RUNNING, None, None
        self.starts += 1
        return [Action.START]

    def _exited(self, event: Exited, now: float) -> None:
        over = self.state is State.STOPPING or (event.code == 0 and self._retires)
        self.code, self.reason, self.refused = event.code, event.reason, event.refused
        self._due = None
        first = self.starts == 1
        if over or (event.refused and first):
            self.state = State.ENDED
            return
        served = None if self._served_since is None else now - self._served_since
        self.state, self._due = State.WAITING, now + self._policy.delay(served)

    @property
    def ends(self) -> int:
        """Number of consecutive exits of the child."""
        return self._policy.ends

    def wait(self, now: float) -> float:
        """Return the seconds until the next start; 0 if no start is scheduled."""
        due = self._due if self.state is State.WAITING else None
        return 0.0 if due is None else max(0.0, due - now)

    def _stop(self, until: float) -> list[Action]:
        """Terminate the child. A repeated stop terminates again and sets a new deadline."""
        if not self._lives:
            self.state, self._due = State.ENDED, None
            return []
        self.state, self._due = State.STOPPING, until
        return [Action.TERMINATE]

    def _look_at(self, now: float) -> list[Action]:
        if self._due is None or now < self._due:
            return []
        if self.state is State.WAITING:
            return self._start()
        self._due = None
        return [Action.KILL]
