"""The children of one host: what to start, restart, signal and give up.

Pure: ``handle(event, now) -> actions``; no process, socket or clock. Times are seconds of
one monotonic clock. Children come and go (:class:`Add`, :class:`Remove`); which there should
be is the controller's to decide (:mod:`.controller`).

Invariants: a child is started only while none of its name lives; one that was removed is not
started again; :class:`Ended` is said once for each Add, when no process of it lives.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from .restart import RestartLimits, RestartPolicy

_PAUSE = 2.0  # the shell ticks several times a second; a longer gap was a pause of its own


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

    ``refused``: it ended by itself because a setting or its model is wrong.
    """

    name: str
    code: int
    reason: str = ""
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Reported:
    """A router answered: process id of each worker it finds alive (ready or draining)."""

    router: str
    alive: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Add | Remove | Exited | Reported | Tick

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
class Ended:
    """The child is gone for good: removed, drained (0), refused, or ended too often."""

    name: str
    code: int
    reason: str = ""
    refused: bool = False


Action = Start | Terminate | Kill | Say | Ended


class SupervisorLimits(RestartLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations in seconds, on top of the restart limits."""

    hang_timeout: float = 3.0
    """A worker the routers have lost for so long while its process lives is killed."""
    router_timeout: float = 10.0
    """A router that answers nothing for so long is killed."""


@dataclass(slots=True)
class _Child:
    policy: RestartPolicy
    router: bool
    running: bool = False
    pid: int = 0
    restart_at: float | None = None
    seen_at: float | None = None  # last report that found it alive, in this life
    reports_since: float | None = None  # of a router: its first report in this life
    was_seen: bool = False  # in any life
    killed: bool = False
    removed: bool = False
    kill_at: float | None = None


@dataclass
class SupervisorCore:
    """Routers and workers of one host; see the module docstring."""

    limits: SupervisorLimits = field(default_factory=SupervisorLimits)

    def __post_init__(self) -> None:
        self._children: dict[str, _Child] = {}
        self._now: float | None = None

    def started(self, name: str, pid: int) -> None:
        """The shell carried out :class:`Start`; a restart of the same pid is impossible."""
        self._children[name].pid = pid

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide; the actions are to be carried out in order."""
        self._forgive_pause(now)
        actions: list[Action] = []
        match event:
            case Add(name, router):
                self._children[name] = _Child(RestartPolicy(self.limits), router)
                actions.append(self._start(name))
            case Remove() if event.name in self._children:
                actions += self._remove(event, now)
            case Exited() if event.name in self._children:
                actions += self._exited(event, now)
            case Reported(router, alive):
                self._reported(router, alive, now)
            case _:
                pass
        return actions + self._due(now)

    def _forgive_pause(self, now: float) -> None:
        """A supervisor that was itself stopped must not blame its children for the silence."""
        gap = 0.0 if self._now is None else now - self._now
        self._now = now
        if gap <= _PAUSE:
            return
        for child in self._children.values():
            child.seen_at = None if child.seen_at is None else child.seen_at + gap
            if child.reports_since is not None:
                child.reports_since += gap

    # ------------------------------------------------------------- life of a child

    def _start(self, name: str) -> Start:
        child = self._children[name]
        child.running, child.killed = True, False
        child.restart_at = child.seen_at = child.reports_since = None
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
        child.running = False
        drained = event.code == 0 and not child.router and child.was_seen
        if child.removed or drained or (event.refused and not child.was_seen):
            return [self._ended(event)]
        delay = child.policy.delay(now)
        if delay is None:
            return [self._ended(Exited(name, event.code or 1, event.reason))]
        child.restart_at = now + delay
        reason = event.reason or describe_exit(event.code)
        return [Say("restarting", name, reason, delay)]

    def _ended(self, event: Exited) -> Ended:
        del self._children[event.name]
        return Ended(event.name, event.code, event.reason, event.refused)

    def _reported(self, router: str, alive: Mapping[str, int], now: float) -> None:
        reporter = self._children.get(router)
        if reporter is not None:
            reporter.seen_at, reporter.was_seen = now, True
            if reporter.reports_since is None:
                reporter.reports_since = now
        for name, child in self._children.items():
            if not child.router and child.running and alive.get(name) == child.pid:
                child.seen_at, child.was_seen = now, True

    # ------------------------------------------------------------- what the clock brings

    def _due(self, now: float) -> list[Action]:
        due: list[Action] = []
        for name, child in self._children.items():
            if child.restart_at is not None and now >= child.restart_at:
                due.append(self._start(name))
            elif child.kill_at is not None and now >= child.kill_at and not child.killed:
                child.killed = True
                due.append(Kill(name))
            else:
                due += self._hung(name, child, now)
        return due

    def _hung(self, name: str, child: _Child, now: float) -> list[Action]:
        if not child.running or child.killed or child.seen_at is None:
            return []
        if child.router:
            silent, limit = now - child.seen_at, self.limits.router_timeout
        else:
            silent, limit = self._unheard(child.seen_at), self.limits.hang_timeout
        if silent < limit:
            return []
        child.killed = True
        return [Say("hung", name, seconds=silent), Kill(name)]

    def _unheard(self, seen_at: float) -> float:
        """How long a worker was lost; only time in which a router could have seen it counts."""
        return max(
            (
                router.seen_at - max(seen_at, router.reports_since)
                for router in self._children.values()
                if router.seen_at is not None and router.reports_since is not None and router.router
            ),
            default=0.0,
        )

    def next_wakeup(self) -> float | None:
        """When :class:`Tick` could next matter; ``None`` if only an event can change anything."""
        children = self._children.values()
        times = [time for c in children for time in (c.restart_at, c.kill_at) if time is not None]
        return min(times, default=None)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
