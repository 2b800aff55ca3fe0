"""What the supervisor of one member decides: start, start again, end.

Pure: ``handle(event, now) -> actions``; times are seconds of one monotonic clock. It is the local
supervisor's rule for a single child: it is started again however often it ends, after growing
waits, unless it refuses its settings at its first start. Invariants: the child is started only
while none lives; after :data:`State.ENDED` nothing is started any more.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..restart import RestartLimits, RestartPolicy


class State(enum.StrEnum):
    """Where the member stands."""

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
    """The child runs its loop: its model is loaded and it can answer."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the child within ``grace`` seconds, and do not start it again."""

    grace: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Begin | Served | Exited | Stop | Tick


class Action(enum.Enum):
    """What the shell is to do with the child."""

    START = "start"
    TERMINATE = "terminate"
    KILL = "kill"


class MemberCore:
    """One child of one member; see the module docstring.

    ``retires``: a child that leaves by itself with exit code 0 has finished (a drained worker).
    ``code``, ``reason``, ``refused``: of its last exit. ``starts``: how often it was started.
    """

    def __init__(self, limits: RestartLimits | None = None, *, retires: bool = True) -> None:
        self.state = State.WAITING
        self.starts = 0
        self.code = 0
        self.reason = ""
        self.refused = False
        self._retires = retires
        self._policy = RestartPolicy(limits)
        self._due: float | None = None  # of the next start, or of the kill while stopping
        self._served_since: float | None = None

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide; the actions are to be carried out in order."""
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
        """How often in a row the child ended."""
        return self._policy.ends

    def wait(self, now: float) -> float:
        """Seconds until the next start; 0 unless it waits for that."""
        due = self._due if self.state is State.WAITING else None
        return 0.0 if due is None else max(0.0, due - now)

    def _stop(self, until: float) -> list[Action]:
        """Asked again it asks again; the later word says until when."""
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
