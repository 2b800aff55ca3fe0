"""The children of one host: what to start, restart, signal and end.

Pure: ``handle(event, now) -> actions``; no process, socket or clock. Times are seconds of
one monotonic clock. Children come and go (:class:`Add`, :class:`Remove`); which there should
be is the controller's to decide (:mod:`.controller`).

Invariants: a child is started only while none of its name lives; one that was removed is not
started again, every other one is, after growing waits; :class:`Ended` is said once for each Add,
when no process of it lives.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from .hangs import Declared, HangLimits, Hangs
from .restart import RestartLimits, RestartPolicy


class Phase(enum.Enum):
    """Where the cluster as a whole stands."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


# ----------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Add:
    """Have a child of this name, which is free; ``router``: it serves and reports the others."""

    name: str
    router: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    """End it and do not start it again; ``grace``: seconds until it is killed."""

    name: str
    grace: float = 0.0


@dataclass(frozen=True, slots=True)
class Exited:
    """A child ended; ``code`` is negative for a signal. ``reason``: its last error line.

    ``refused``: it ended by itself because a setting or its model is wrong. ``evidence``: what
    the system says of a kill from outside, such as out of memory.
    """

    name: str
    code: int
    reason: str = ""
    refused: bool = False
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Alive:
    """A child wrote a sign of life."""

    name: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A router answered.

    ``alive``: process id of each worker it finds alive (ready or draining). ``dead``: those it has
    declared dead, by name.
    """

    router: str
    alive: Mapping[str, int]
    dead: Mapping[str, Declared] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Add | Remove | Exited | Alive | Reported | Tick

# ----------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Start:
    """Start the child of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the child to finish (SIGTERM)."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the child's process group at once (SIGKILL)."""

    name: str


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the operator; ``what`` is one of the keys of ``banner.SENTENCES``."""

    what: str
    name: str = ""
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Restarting:
    """The child ended and is started again in ``seconds``; ``ends``: how often so in a row."""

    name: str
    why: str
    seconds: float
    ends: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The child is gone for good: removed, drained (0), or refused at its first start."""

    name: str
    code: int
    reason: str = ""
    refused: bool = False


Action = Start | Terminate | Kill | Say | Restarting | Ended


@dataclass(slots=True)
class _Child:
    policy: RestartPolicy
    router: bool
    running: bool = False
    restart_at: float | None = None
    was_seen: bool = False  # in any life
    killed: bool = False
    hang: str = ""  # why it was killed
    removed: bool = False
    kill_at: float | None = None


@dataclass
class SupervisorCore:
    """Routers and workers of one host; see the module docstring."""

    limits: RestartLimits = field(default_factory=RestartLimits)
    hang_limits: HangLimits = field(default_factory=HangLimits)

    def __post_init__(self) -> None:
        self._children: dict[str, _Child] = {}
        self._hangs = Hangs(self.hang_limits)

    def started(self, name: str, pid: int) -> None:
        """The shell carried out :class:`Start`; a restart of the same pid is impossible."""
        self._hangs.started(name, pid, router=self._children[name].router)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide; the actions are to be carried out in order."""
        self._hangs.forgive_pause(now)
        actions: list[Action] = []
        match event:
            case Add(name, router):
                self._children[name] = _Child(RestartPolicy(self.limits), router)
                actions.append(self._start(name))
            case Remove() if event.name in self._children:
                actions += self._remove(event, now)
            case Exited() if event.name in self._children:
                actions += self._exited(event, now)
            case Alive(name):
                self._hangs.alive(name, now)
            case Reported(router, alive, dead):
                timeout = self.hang_limits.worker_timeout
                actions += [
                    Say("declared_dead", name, reason, timeout)
                    for name, reason in self._hangs.reported(router, alive, dead, now)
                ]
            case _:
                pass
        return actions + self._due(now)

    # ------------------------------------------------------------- life of a child

    def _start(self, name: str) -> Start:
        child = self._children[name]
        child.running, child.killed, child.hang, child.restart_at = True, False, "", None
        return Start(name)

    def _remove(self, event: Remove, now: float) -> list[Action]:
        child = self._children[event.name]
        child.removed = True
        if not child.running:
            del self._children[event.name]
            return [Ended(event.name, 0)]
        if event.grace > 0:
            child.kill_at = now + event.grace
            return [Terminate(event.name)]
        child.killed = True
        return [Kill(event.name)]

    def _exited(self, event: Exited, now: float) -> list[Action]:
        name, child = event.name, self._children[event.name]
        served, declared = self._hangs.served(name, now), self._hangs.declared(name)
        child.was_seen = child.was_seen or self._hangs.joined(name)
        self._hangs.ended(name)
        child.running = False
        drained = event.code == 0 and not child.router and child.was_seen
        if child.removed or drained or (event.refused and not child.was_seen):
            del self._children[name]
            return [Ended(name, event.code, event.reason, event.refused)]
        delay = child.policy.delay(served)
        child.restart_at = now + delay
        why = describe_end(event.code, event.reason, event.evidence, child.hang, declared)
        return [Restarting(name, why, delay, child.policy.ends)]

    # ------------------------------------------------------------- what the clock brings

    def _due(self, now: float) -> list[Action]:
        due: list[Action] = []
        for name, child in self._children.items():
            if child.restart_at is not None and now >= child.restart_at:
                due.append(self._start(name))
            elif child.kill_at is not None and now >= child.kill_at and not child.killed:
                child.killed = True
                due.append(Kill(name))
        for hang in self._hangs.hung(now):
            child = self._children[hang.name]
            if child.running and not child.killed:
                child.killed, child.hang = True, hang.why
                due += [Say("hung", hang.name, hang.why), Kill(hang.name)]
        return due

    def next_wakeup(self) -> float | None:
        """When :class:`Tick` could next matter; ``None`` if only an event can change anything."""
        children = self._children.values()
        times = [time for c in children for time in (c.restart_at, c.kill_at) if time is not None]
        return min(times, default=None)


def describe_end(code: int, reason: str, evidence: str = "", hang: str = "", dead: str = "") -> str:
    """Why a process ended, in words.

    ``reason``: its last error line. ``evidence``: see :class:`Exited`. ``hang``: why the supervisor
    ended it. ``dead``: why a router had declared it dead.
    """
    if hang:
        return f"it did not answer: {hang}"
    why = reason or describe_exit(code)
    if code < 0:
        why = f"{describe_exit(code)} {evidence}".strip()
        why = f"{why}; its last error was: {reason}" if reason else why
    return f"declared dead: {dead}; {why}" if dead else why


def describe_exit(code: int) -> str:
    """An exit code in words."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
