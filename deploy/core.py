"""The supervisor's decisions: what to start, signal and announce, and when it is over.

Pure: ``handle(event, now) -> actions``; no process, socket or clock. Times are seconds of
one monotonic clock. Phases::

    STARTING ──all workers ready──▶ SERVING ──interrupt──▶ DRAINING ──router gone──▶ STOPPING
        └──────────────── interrupt, or a child that cannot run ───────────────────────▶┘

Invariants: a child is started only while none of its name lives; the core ends only when
no child lives; after :class:`End` nothing more is decided.
"""

from __future__ import annotations

import enum
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
class Begin:
    """Start everything."""


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
    """The router answered: process id of each worker it finds alive (ready or draining)."""

    alive: dict[str, int]


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The operator wants the end; a second time: at once."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Begin | Exited | Reported | Interrupted | Tick

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
class End:
    """Every child is gone; leave with this exit code."""

    code: int


Action = Start | Terminate | Kill | Say | End


class SupervisorLimits(RestartLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations in seconds, on top of the restart limits."""

    grace: float = 30.0
    """How long running requests may finish after the first interrupt."""
    stop_timeout: float = 5.0
    """How long a child may take to end after SIGTERM."""
    hang_timeout: float = 3.0
    """A worker the router has lost for so long while its process lives is killed."""
    router_timeout: float = 10.0
    """A router that answers nothing for so long is killed."""


@dataclass(slots=True)
class _Child:
    policy: RestartPolicy
    running: bool = False
    pid: int = 0
    restart_at: float | None = None
    seen_at: float | None = None  # last report that found it alive, in this life
    killed: bool = False
    retired: bool = False


@dataclass(slots=True)
class _Deadlines:
    drain: float = 0.0
    stop: float = 0.0
    killed: bool = False


@dataclass
class SupervisorCore:
    """One router and its workers; see the module docstring."""

    router: str
    workers: tuple[str, ...]
    limits: SupervisorLimits = field(default_factory=SupervisorLimits)
    phase: Phase = Phase.STARTING

    def __post_init__(self) -> None:
        names = (self.router, *self.workers)
        self._children = {name: _Child(RestartPolicy(self.limits)) for name in names}
        self._deadlines = _Deadlines()
        self._reports_since: float | None = None  # first report of the router's present life
        self._exit_code = 0
        self._now: float | None = None

    def started(self, name: str, pid: int) -> None:
        """The shell carried out :class:`Start`; a restart of the same pid is impossible."""
        self._children[name].pid = pid

    def handle(self, event: Event, now: float) -> list[Action]:
        """Decide; the actions are to be carried out in order."""
        if self.phase is Phase.ENDED:
            return []
        self._forgive_pause(now)
        actions: list[Action] = []
        match event:
            case Begin():
                actions += [self._start(name) for name in self._children]
            case Exited():
                actions += self._exited(event, now)
            case Reported(alive):
                actions += self._reported(alive, now)
            case Interrupted():
                actions += self._interrupted(now)
            case Tick():
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
        if self._reports_since is not None:
            self._reports_since += gap

    # ------------------------------------------------------------- life of a child

    def _start(self, name: str) -> Start:
        child = self._children[name]
        child.running, child.killed = True, False
        child.restart_at = child.seen_at = None
        if name == self.router:
            self._reports_since = None
        return Start(name)

    def _exited(self, event: Exited, now: float) -> list[Action]:
        name, code, reason = event.name, event.code, event.reason
        child = self._children[name]
        child.running = False
        if self.phase is Phase.STOPPING:
            return []
        if name == self.router and self.phase is Phase.DRAINING:
            return self._stop(now, 0 if code == 0 else 1)
        if code == 0 and name != self.router and self.phase is not Phase.STARTING:
            child.retired = True
            return [Say("retired", name)]
        if event.refused and self.phase is Phase.STARTING:
            return [Say("cannot_run", name, reason), *self._stop(now, 1)]
        delay = child.policy.delay(now)
        if delay is None:
            return [Say("gave_up", name, reason), *self._stop(now, 1)]
        child.restart_at = now + delay
        return [Say("restarting", name, reason or describe_exit(code), delay)]

    def _reported(self, alive: dict[str, int], now: float) -> list[Action]:
        if self._reports_since is None:
            self._reports_since = now
        self._children[self.router].seen_at = now
        for name in self.workers:
            child = self._children[name]
            if child.running and alive.get(name) == child.pid:
                child.seen_at = now
        if self.phase is Phase.STARTING and all(
            self._children[name].seen_at == now for name in self.workers
        ):
            self.phase = Phase.SERVING
            return [Say("ready")]
        return []

    # ------------------------------------------------------------- the end

    def _interrupted(self, now: float) -> list[Action]:
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING
            self._deadlines.drain = now + self.limits.grace
            if self._children[self.router].running:
                return [Say("draining", seconds=self.limits.grace), Terminate(self.router)]
            return self._stop(now, 0)
        if self.phase is Phase.STARTING:
            return self._stop(now, 0)
        return self._kill_all()

    def _stop(self, now: float, code: int) -> list[Action]:
        self.phase = Phase.STOPPING
        self._exit_code = max(self._exit_code, code)
        self._deadlines.stop = now + self.limits.stop_timeout
        for child in self._children.values():
            child.restart_at = None
        return [Terminate(name) for name, child in self._children.items() if child.running]

    def _kill_all(self) -> list[Action]:
        self.phase = Phase.STOPPING
        self._deadlines.killed = True
        for child in self._children.values():
            child.restart_at = None
        return [Kill(name) for name, child in self._children.items() if child.running]

    # ------------------------------------------------------------- what the clock brings

    def _due(self, now: float) -> list[Action]:
        if self.phase is Phase.STOPPING:
            return self._due_stopping(now)
        if self.phase is Phase.DRAINING and now >= self._deadlines.drain:
            return [Say("grace_over"), *self._stop(now, 0)]
        due: list[Action] = [
            self._start(name)
            for name, child in self._children.items()
            if child.restart_at is not None and now >= child.restart_at
        ]
        return due + [action for name in self._children for action in self._hung(name, now)]

    def _due_stopping(self, now: float) -> list[Action]:
        if not any(child.running for child in self._children.values()):
            self.phase = Phase.ENDED
            return [End(self._exit_code)]
        if now >= self._deadlines.stop and not self._deadlines.killed:
            return self._kill_all()
        return []

    def _hung(self, name: str, now: float) -> list[Action]:
        child = self._children[name]
        if not child.running or child.killed or child.seen_at is None:
            return []
        if name == self.router:
            silent, limit = now - child.seen_at, self.limits.router_timeout
        else:
            router = self._children[self.router]
            if self._reports_since is None or router.seen_at is None:
                return []
            # Only the time in which the router could have seen it counts.
            silent = router.seen_at - max(child.seen_at, self._reports_since)
            limit = self.limits.hang_timeout
        if silent < limit:
            return []
        child.killed = True
        return [Say("hung", name, seconds=silent), Kill(name)]

    def next_wakeup(self) -> float | None:
        """When :class:`Tick` could next matter; ``None`` if only an event can change anything."""
        times = [c.restart_at for c in self._children.values() if c.restart_at is not None]
        if self.phase is Phase.DRAINING:
            times.append(self._deadlines.drain)
        if self.phase is Phase.STOPPING:
            times.append(self._deadlines.stop)
        return min(times, default=None)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
