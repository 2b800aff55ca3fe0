"""The supervisor's decisions for the child processes of one host: start, restart, signal, end.

Pure: ``handle(event, now) -> actions``, without process, socket or clock. Times are seconds of one
monotonic clock. The controller (:mod:`..controller.core`) decides which children exist, with
:class:`Add` and :class:`Remove`.

Invariants:

- A child is started only while no process of the same name lives.
- A removed child is never restarted. Every other child is, after growing delays.
- Each Add is followed by one :class:`Ended`, after the child's last process has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from .hangs import Declared, HangLimits, Hangs
from .restart import RestartLimits, RestartPolicy


class Phase(enum.Enum):
    """Phase of the cluster as a whole."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


# ----------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Add:
    """Add a child with an unused name. ``router``: the child is a router, which reports workers."""

    name: str
    router: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    """Stop a child permanently. ``grace``: seconds until it is killed."""

    name: str
    grace: float = 0.0


@dataclass(frozen=True, slots=True)
class Exited:
    """A child ended. ``code``: exit code, negative for a signal. ``reason``: its last error line.

    ``refused``: the child exited because of a wrong setting or model. ``evidence``: the system's
    record of a kill from outside, such as out of memory.
    """

    name: str
    code: int
    reason: str = ""
    refused: bool = False
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Alive:
    """A child sent a heartbeat to the supervisor."""

    name: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A router answered.

    ``alive``: process id of each worker that the router reports as ready or draining. ``dead``:
    workers that the router declared dead, by name.
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
    """Print a message to the operator. ``what``: a key of ``banner._SENTENCES``."""

    what: str
    name: str = ""
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Restarting:
    """The child ended and will be restarted in ``seconds``. ``ends``: ends in a row."""

    name: str
    why: str
    seconds: float
    ends: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The child ended permanently: removed, drained (code 0), or refused at its first start."""

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
    was_seen: bool = False  # a router has seen the child, possibly before a restart
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
        """Record that the shell carried out :class:`Start`."""
        self._hangs.started(name, pid, router=self._children[name].router)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event. Returns actions for the caller to carry out in order."""
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

    # ------------------------------------------------------------- timers

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
        """Return the time of the next restart or kill, or None if no timer runs."""
        children = self._children.values()
        times = [time for c in children for time in (c.restart_at, c.kill_at) if time is not None]
        return min(times, default=None)


def describe_end(code: int, reason: str, evidence: str = "", hang: str = "", dead: str = "") -> str:
    """Describe why a process ended.

    ``reason``: the last error line of the process. ``evidence``: see :class:`Exited`. ``hang``: why
    the supervisor killed the process. ``dead``: why a router declared the worker dead.
    """
    if hang:
        return f"it did not answer: {hang}"
    why = reason or describe_exit(code)
    if code < 0:
        why = f"{describe_exit(code)} {evidence}".strip()
        why = f"{why}; its last error was: {reason}" if reason else why
    return f"declared dead: {dead}; {why}" if dead else why


def describe_exit(code: int) -> str:
    """Describe an exit code or signal."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
