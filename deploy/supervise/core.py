"""The supervisor's decisions for its child processes: start, restart, signal, end.

``baton serve`` has one supervisor for all processes of its machine. Under Ray, each actor has one
for its single child. Pure: ``handle(event, now) -> actions``, without process, socket or clock.
Times are seconds of one monotonic clock. The controller (:mod:`..controller.core`) decides which
children exist, with :class:`Add` and :class:`Remove`.

Invariants:

- A child is started only while no process of the same name lives.
- A removed child is never restarted. Every other child is, after growing delays.
- Each Add is followed by one MemberEnded, after the child's last process has ended.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ..controller.backend import MemberDown, MemberEnded, MemberServes
from ..report import ClusterReport
from ..roles import GATEWAY, POOLS
from .hangs import HangLimits, Hangs
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
    """Add a child with an unused name. ``role``: a constant of :mod:`..controller.backend`."""

    name: str
    role: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Stop a child permanently. ``grace``: seconds until it is killed."""

    name: str
    grace: float = 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """:class:`Start` was carried out: the child runs as process ``pid``."""

    name: str
    pid: int


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
    """A child sent a heartbeat to the supervisor. ``turns``: completed turns of its clock."""

    name: str
    turns: int


@dataclass(frozen=True, slots=True)
class Reported:
    """A router answered."""

    router: str
    report: ClusterReport


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Add | Remove | Started | Exited | Alive | Reported | Tick

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
class Log:
    """Print a message to the operator. ``event``: a key of ``messages._SENTENCES``."""

    event: str
    name: str = ""
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of our own code in the timers of one child."""

    name: str
    error: Exception


Action = Raised | Start | Terminate | Kill | Log | MemberServes | MemberDown | MemberEnded


@dataclass(slots=True)
class _Child:
    policy: RestartPolicy
    role: str
    running: bool = False
    restart_at: float | None = None
    was_seen: bool = False  # see SupervisorCore, possibly before a restart
    killed: bool = False
    hang: str = ""  # why it was killed
    removed: bool = False
    kill_at: float | None = None


@dataclass
class SupervisorCore:
    """The children of one supervisor; see the module docstring.

    A child that has been *seen* is restarted after a refusal, and a worker is drained if it then
    exits with code 0. ``reports``: routers report to this supervisor, and their reports show which
    children were seen. Without reports, as in an actor of Ray, and for gateways, a child is seen
    from its first heartbeat on.
    """

    limits: RestartLimits = field(default_factory=RestartLimits)
    hang_limits: HangLimits = field(default_factory=HangLimits)
    reports: bool = True

    def __post_init__(self) -> None:
        self._children: dict[str, _Child] = {}
        self._hangs = Hangs(self.hang_limits)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event. Returns actions for the caller to carry out in order."""
        self._hangs.forgive_pause(now)
        actions: list[Action] = []
        match event:
            case Add(name, role):
                self._children[name] = _Child(RestartPolicy(self.limits), role)
                actions.append(self._start(name))
            case Remove() if event.name in self._children:
                actions += self._remove(event, now)
            case Started(name, pid) if name in self._children:
                self._hangs.started(name, pid, self._children[name].role)
            case Exited() if event.name in self._children:
                actions += self._exited(event, now)
            case Alive(name, turns) if name in self._children:
                is_first = self._hangs.quiet(name, now) is None
                self._hangs.alive(name, now, turns)
                if is_first and self._children[name].role == GATEWAY:
                    actions.append(MemberServes(name))
            case Reported(router, report):
                timeout = self.hang_limits.worker_timeout
                actions += [
                    Log("declared_dead", name, reason, timeout)
                    for name, reason in self._hangs.reported(router, report, now)
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
            return [MemberEnded(event.name, 0)]
        if event.grace > 0:
            child.kill_at = now + event.grace
            return [Terminate(event.name)]
        child.killed = True
        return [Kill(event.name)]

    def _exited(self, event: Exited, now: float) -> list[Action]:
        name, child = event.name, self._children[event.name]
        served, declared = self._hangs.served(name, now), self._hangs.declared(name)
        by_report = self.reports and child.role != GATEWAY
        seen = self._hangs.joined(name) if by_report else served is not None
        child.was_seen = child.was_seen or seen
        self._hangs.ended(name)
        child.running = False
        drained = event.code == 0 and child.role in POOLS and child.was_seen
        if child.removed or drained or (event.refused and not child.was_seen):
            del self._children[name]
            return [MemberEnded(name, event.code, event.reason, event.refused)]
        delay = child.policy.delay(served)
        child.restart_at = now + delay
        why = _describe_end(event.code, event.reason, event.evidence, child.hang, declared)
        return [MemberDown(name, why, delay, child.policy.ends)]

    # ------------------------------------------------------------- timers

    def _due(self, now: float) -> list[Action]:
        """Return what each child's timers ask for. An error costs its child this turn alone."""
        due: list[Action] = []
        for name in list(self._children):
            try:
                due += self._due_of(name, now)
            except Exception as error:
                due.append(Raised(name, error))
        return due

    def _due_of(self, name: str, now: float) -> list[Action]:
        child = self._children[name]
        if child.restart_at is not None and now >= child.restart_at:
            return [self._start(name)]
        if child.killed:
            return []
        if child.kill_at is not None and now >= child.kill_at:
            child.killed = True
            return [Kill(name)]
        why = self._hangs.why(name, now) if child.running else ""
        if not why:
            return []
        child.killed, child.hang = True, why
        return [Log("hung", name, why), Kill(name)]

    def quiet(self, name: str, now: float) -> float | None:
        """Return the seconds since the child's last heartbeat; None before the first."""
        return self._hangs.quiet(name, now)


def _describe_end(
    code: int, reason: str, evidence: str = "", hang: str = "", dead: str = ""
) -> str:
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
