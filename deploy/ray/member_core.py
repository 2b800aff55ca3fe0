"""What the supervisor of one member decides: start, start again, give up, end.

Pure: ``handle(event, now) -> actions``; times are seconds of one monotonic clock. It is the local
supervisor's rule for a single child: back-off, then giving up, and no restart of what refuses its
settings. Invariants: the child is started only while none lives; after :data:`State.ENDED`
nothing is started any more.
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
class Stop:
    """End the child within ``grace`` seconds, and do not start it again."""

    grace: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Begin | Exited | Stop | Tick


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

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide; the actions are to be carried out in order."""
        match event:
            case Begin():
                return self._start()
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
        self.state, self._due = State.RUNNING, None
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
        delay = self._policy.delay(now)
        self.state = State.ENDED if delay is None else State.WAITING
        self._due = None if delay is None else now + delay

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
