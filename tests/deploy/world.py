"""A simulated cluster: the events that a controller receives when processes start, crash and end.

Members start, register, crash, drain and end as :mod:`baton.deploy.controller.backend` specifies.
Every action is checked against the invariants in the controller's docstrings.
"""

import random

from baton.deploy.config import ServeSettings
from baton.deploy.controller.backend import (
    MemberDown,
    MemberEnded,
    MemberServes,
    MemberStarted,
    MemberUnplaced,
)
from baton.deploy.controller.core import ControllerCore
from baton.deploy.controller.events import (
    Answer,
    Begin,
    Down,
    Drain,
    DrainMember,
    End,
    KillMember,
    Measured,
    Outcome,
    RequestResources,
    Rollout,
    Scale,
    StartMember,
    StopMember,
    Turn,
    TurnMember,
)
from baton.deploy.controller.members import Stage
from baton.deploy.controller.pools import ControllerLimits
from baton.deploy.plan.bounds import Bounds
from baton.deploy.ray.saved import decode_saved, encode_saved, restore, saved_of
from baton.deploy.report import ClusterReport, WorkerReport
from baton.deploy.roles import GATEWAY, POOLS, ROUTER
from baton.deploy.supervise.core import Log, Phase, Reported, Tick

GRACE = 10.0
SETTINGS = ServeSettings(grace=GRACE)


class Process:
    """The true state of one member."""

    def __init__(self, action: StartMember, pid: int) -> None:
        self.name, self.role, self.revision = action.name, action.role, action.revision
        self.pid = pid
        self.up = False  # its process runs
        self.ready = False  # it has registered
        self.drained_at: float | None = None  # first DrainMember of this process
        self.left = False
        self.stopping = False
        self.lost = False  # disconnected from all routers
        self.turns_to = ""  # the role after this drain

    def turned(self) -> None:
        """Go on in the new role, not registered yet."""
        self.role, self.turns_to = self.turns_to or self.role, ""
        self.drained_at, self.ready = None, False


class World:
    """The core under test and its environment."""

    def __init__(
        self,
        seed: int,
        prefill=2,
        decode=2,
        routers=("router",),
        gateways=0,
        can_turn=False,
        **limits,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.routers, self.gateways = routers, gateways
        self.restarts = False  # of the controller
        self.can_turn = can_turn
        self.targets = {"prefill": prefill, "decode": decode}
        self.limits = ControllerLimits(grace=GRACE, ready_timeout=60.0, **limits)
        self.core = self.new_core()
        self.processes: dict[str, Process] = {}
        self.bad: set = set()  # revisions that cannot run, or (role, revision)
        self.pid = 100
        self.tickets = 0
        self.open: set[int] = set()
        self.outcomes: dict[int, Outcome] = {}
        self.operator: set[str] = set()  # workers that an operator drains
        self.seen: dict[str, dict[str, int]] = {}  # router: pid of each worker reported as ready
        self.requested: dict[str, int] = {}
        self.ended: int | None = None
        self.logs: list[Log] = []
        self.requests: dict[str, int] = {}  # running ones by worker
        self.feed(Begin())

    def new_core(self) -> ControllerCore:
        bounds = Bounds(decode_max=6, gateway_max=4 if self.gateways else 0)
        targets = dict(self.targets)
        core = ControllerCore(targets, self.routers, self.limits, bounds, self.gateways)
        core.can_turn = self.can_turn
        return core

    def restart_controller(self) -> None:
        """Replace the controller; it continues from the saved state. Pending tickets are lost."""
        settings = dict.fromkeys(self.revisions() | {self.core.pools.revision}, SETTINGS)
        if self.core.rollout is not None:
            settings[self.core.rollout.before] = SETTINGS
        saved = decode_saved(encode_saved(saved_of(self.core, "key", settings)))
        self.open.clear()
        recorded = {name for name, member in saved.members.items() if member.was_ready}
        for view in self.seen.values():  # the successor has no other reports
            for name in set(view) - recorded:
                del view[name]
        self.core = self.new_core()
        restore(self.core, saved, list(self.processes), self.now)
        for process in list(self.processes.values()):
            member = self.core.pools.members.get(process.name)
            process.stopping |= member is not None and member.stage is Stage.STOPPING
            if process.up and process.name in self.processes:
                self.feed(MemberStarted(process.name, "", process.pid))
                self.serve(process)
        self.feed(Begin())
        if saved.ending:
            self.feed(Down())

    # ------------------------------------------------------------- in

    @property
    def said(self) -> list[str]:
        return [log.event for log in self.logs]

    def ticket(self) -> int:
        self.tickets += 1
        self.open.add(self.tickets)
        return self.tickets

    def feed(self, event) -> None:
        for action in self.core.handle(event, self.now):
            self.carry_out(action)

    def report(self, router: str) -> None:
        process = self.processes.get(router)
        if process is None or not process.ready or process.stopping:
            return
        workers = []
        for p in self.processes.values():
            if p.role not in POOLS or p.lost or not (p.ready or p.left):
                continue
            state = "dead" if p.left else "draining" if p.drained_at is not None else "ready"
            reason = "drained" if p.left else ""
            workers.append(
                WorkerReport(
                    id=p.name, role=p.role, pid=p.pid, state=state, reason=reason,
                    requests_running=self.requests.get(p.name, 0),
                )
            )  # fmt: skip
        self.seen[router] = {w.id: w.pid for w in workers if w.state == "ready"}
        self.feed(Reported(router, ClusterReport(workers=workers)))

    # ------------------------------------------------------------- out

    def carry_out(self, action) -> None:
        assert self.ended is None
        match action:
            case StartMember(name):
                assert name not in self.processes, f"{name} twice"
                there = [p for p in self.processes.values() if p.role == action.role]
                if self.core.pools.in_place and action.role in POOLS:
                    assert len(there) < self.core.pools.targets[action.role], "no room for it"
                self.pid += 1
                self.processes[name] = Process(action, self.pid)
            case DrainMember(name):
                self.drain(self.processes[name])
            case TurnMember(name, role):
                process = self.processes[name]
                assert process.role != role and process.ready and not process.stopping
                process.turns_to, process.drained_at = role, self.now
            case StopMember(name):
                self.stop(self.processes[name])
            case KillMember(name):
                self.processes[name].stopping = True
            case RequestResources(bundles):
                self.requested = bundles
            case Answer(ticket, outcome):
                self.answer(ticket, outcome)
            case End(code):
                assert not self.processes
                self.ended = code
            case log:
                self.logs.append(log)
                if log.event == "turns" and not log.detail.endswith("baton role"):
                    role = self.processes[log.name].role
                    left = len(self.serving(role))
                    assert left >= self.core.pools.targets[role], "turned below the target"

    def answer(self, ticket, outcome) -> None:
        if ticket is None:
            return
        assert ticket in self.open, "an answer after the final one"
        if outcome in (Outcome.DONE, Outcome.FAILED):
            self.open.discard(ticket)
            self.outcomes[ticket] = outcome

    @property
    def ending(self) -> bool:
        return self.core.phase not in (Phase.STARTING, Phase.SERVING)

    def serving(self, role: str) -> list[str]:
        """Return the workers that accept requests by the routers' last reports."""
        return [
            p.name
            for p in self.processes.values()
            if p.role == role and p.drained_at is None and not p.stopping and self.is_seen(p)
        ]

    def is_seen(self, process: Process) -> bool:
        """Whether every router's last report lists it as ready."""
        return all(self.seen.get(r, {}).get(process.name) == process.pid for r in self.routers)

    def drain(self, process: Process) -> None:
        if process.drained_at is None and process.up:
            process.drained_at = self.now
            if process.name not in self.operator:
                left = len(self.serving(process.role))
                least = self.core.pools.targets[process.role] - self.core.pools.in_place
                assert left >= least, "drained below the target"

    def stop(self, process: Process) -> None:
        known = self.is_seen(process)
        if process.role == ROUTER and not self.ending:
            others = [self.processes.get(r) for r in self.routers if r != process.name]
            assert all(p is not None and p.up and not p.stopping for p in others)
        elif process.role == GATEWAY:
            if not self.ending and process.ready and process.name not in self.operator:
                others = [
                    p for p in self.processes.values()
                    if p.role == GATEWAY and p.ready and not p.stopping and p is not process
                ]  # fmt: skip
                assert len(others) >= self.core.pools.gateways, "too few gateways left"
        elif not self.ending and process.ready and known and not process.left:
            assert process.drained_at is not None, f"{process.name} stopped without a drain"
            in_time = self.now - process.drained_at < GRACE and not process.turns_to
            assert not in_time, f"{process.name} stopped in its drain"
        process.stopping = True

    # ------------------------------------------------------------- what may happen

    def start_up(self, process: Process) -> None:
        """Start the process: it runs, registers, or fails."""
        if not process.up:
            process.up = True
            self.feed(MemberStarted(process.name, "", process.pid))
        elif {process.revision, (process.role, process.revision)} & self.bad:
            self.end(process, MemberEnded(process.name, 1, "bad", refused=True))
        else:
            process.ready = True
            self.serve(process)

    def serve(self, process: Process) -> None:
        """Report a gateway's first heartbeat."""
        if process.role == GATEWAY and process.ready:
            self.feed(MemberServes(process.name))

    def crash(self, process: Process, *, for_good: bool, ends: int = 0) -> None:
        for view in self.seen.values():
            view.pop(process.name, None)
        if process.role == ROUTER:
            self.seen.pop(process.name, None)
        if for_good:
            self.end(process, MemberEnded(process.name, -9, "crashed"))
            return
        process.ready = False
        ends = ends or self.rng.randint(1, 8)
        self.feed(MemberDown(process.name, "crashed", 0.5, ends))
        if not process.stopping:
            self.start_again(process)

    def start_again(self, process: Process) -> None:
        self.pid += 1
        process.pid, process.ready, process.left = self.pid, False, False
        process.lost = False
        process.turned()
        self.feed(MemberStarted(process.name, "", process.pid))

    def end(self, process: Process, event: MemberEnded) -> None:
        del self.processes[process.name]
        self.seen.pop(process.name, None)
        self.operator.discard(process.name)
        self.feed(event)

    def go_on(self, process: Process) -> None:
        """Do the next event of this process without faults."""
        if process.stopping:
            self.end(process, MemberEnded(process.name, 0 if process.ready else -15))
        elif process.left:
            self.end(process, MemberEnded(process.name, 0))
        elif process.turns_to:
            process.turned()
        elif process.drained_at is not None:
            process.left = True
        elif not process.ready:
            self.start_up(process)

    def step(self) -> None:
        """Do one random event."""
        if self.ended is not None:
            return
        self.now += self.rng.choice((0.0, 0.1, 0.3, 1.0))
        process = self.rng.choice(list(self.processes.values()) or [None])
        kind = self.rng.random()
        if process is None:
            self.feed(Tick())
        elif kind < 0.45:
            self.go_on(process)
        elif kind < 0.75:
            self.report(self.rng.choice(self.routers))
        elif kind < 0.80:
            self.feed(Tick())
        elif kind < 0.86 and process.up and not process.stopping:
            self.crash(process, for_good=False)
        elif kind < 0.865 and process.up and not process.stopping:
            self.crash(process, for_good=True)
        elif kind < 0.885 and process.role in POOLS:
            process.lost = not process.lost
        elif kind < 0.89 and not process.up and not process.stopping:
            final = self.rng.random() < 0.2
            self.feed(MemberUnplaced(process.name, "no host is free", final=final))
        elif kind < 0.91 and self.restarts:
            self.restart_controller()
        elif kind < 0.98:
            self.order(self.rng.random())
        elif kind < 0.985:
            self.feed(Down(self.ticket()))

    def order(self, kind: float) -> None:
        if kind < 0.4:
            targets = {r: self.rng.randint(-1, 5) for r in ("prefill", "decode")}
            self.feed(Scale(self.ticket(), targets))
        elif kind < 0.5:
            self.feed(Measured({"prefill": self.rng.randint(0, 4), "decode": 3}))
        elif kind < 0.6 and not self.restarts:  # Ray refuses a change of role
            workers = [p.name for p in self.processes.values()]
            name = self.rng.choice([*workers, "decode-99"])
            self.feed(Turn(self.ticket(), name, self.rng.choice(POOLS)))
        elif kind < 0.65:
            workers = [p.name for p in self.processes.values() if p.role != ROUTER]
            name = self.rng.choice([*workers, "decode-99"])
            self.operator.add(name)
            self.feed(Drain(self.ticket(), name))
        else:
            revision = self.core.pools.revision + self.rng.randint(1, 3)
            if self.rng.random() < 0.3 and revision not in self.revisions():
                self.bad.add(revision)
            in_place = self.rng.random() < 0.4
            self.feed(Rollout(self.ticket(), revision, in_place=in_place))

    def revisions(self) -> set[int]:
        return {p.revision for p in self.processes.values()} | {0}

    def settle(self, rounds: int = 60) -> None:
        """Let time pass without faults."""
        for process in list(self.processes.values()):
            if process.lost:  # the backend detects the hang
                self.crash(process, for_good=False)
        for _ in range(rounds):
            self.now += 1.0
            for process in list(self.processes.values()):
                if self.processes.get(process.name) is process:
                    self.go_on(process)
            for router in self.routers:
                self.report(router)
            if self.ended is None:
                self.feed(Tick())
