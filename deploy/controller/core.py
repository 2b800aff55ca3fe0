"""The controller's decisions: target sizes, drains, rollouts, shutdown.

Pure: ``handle(event, now) -> actions``, without process, socket or clock. Times are seconds of one
monotonic clock. After every event, the core compares the actual with the target state, so the
result does not depend on the order of events. Phases::

    STARTING ──all ready──▶ SERVING ──Down──▶ DRAINING ──routers gone──▶ STOPPING ──▶ ENDED
        └──────────────── Down, or a member that cannot run ────────────────▶┘

Invariants: those of :mod:`.pools`, :mod:`.rollout` and :class:`.events.Waiters`. The core ends only
after the last member has ended. After :class:`End`, it returns no actions.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Self

from baton.router.registry import keep_one, last_worker

from ..config import ServeSettings
from ..plan.bounds import Bounds, clamped, describe_targets, scale_refusal
from ..plan.plan import router_names
from ..roles import DECODE, GATEWAY, POOLS, PREFILL, ROUTER
from ..supervise.core import Log, Phase, Reported, Tick
from .backend import MemberDown, MemberEnded, MemberServes, MemberStarted, MemberUnplaced
from .events import (
    Action,
    Answer,
    Begin,
    Down,
    Drain,
    End,
    Event,
    KillMember,
    Measured,
    Outcome,
    RequestResources,
    Rollout,
    Scale,
    Turn,
    Waiters,
)
from .members import Member, Stage, View
from .pools import ControllerLimits, Pools
from .rollout import Replacement

GOING_DOWN = "the cluster is going down"


_STOPPED = (0, -signal.SIGTERM)
"""Exit codes of a router after an order to end; the second if it had only just been started."""


class ControllerCore:
    """One cluster. ``targets``: initial number of workers of each pool; ``gateways``: of those."""

    def __init__(
        self,
        targets: dict[str, int],
        routers: Iterable[str] = (ROUTER,),
        limits: ControllerLimits | None = None,
        bounds: Bounds | None = None,
        gateways: int = 0,
    ) -> None:
        sizes = {role: targets.get(role, 0) for role in POOLS}
        self.pools = Pools(tuple(routers), sizes, limits or ControllerLimits(), gateways)
        self.bounds = bounds or Bounds()
        self.phase = Phase.STARTING
        self.can_turn = False
        """Whether the workers of this cluster can change their role."""
        self.rollout: Replacement | None = None
        self.last_rollout = ""
        """Text about the end of the last rollout."""
        self._waiters = Waiters()
        self._requested: dict[str, int] = {}
        self._exit_code = 0
        self._drain_until = 0.0
        self._drain_shown = False

    @classmethod
    def of(cls, settings: ServeSettings, *, replace: bool = False) -> Self:
        """Return the core of a new cluster. ``replace``: see :class:`.pools.ControllerLimits`."""
        targets = {PREFILL: settings.prefill, DECODE: settings.decode}
        limits = ControllerLimits(grace=settings.grace, replace=replace)
        bounds = Bounds.of(settings)
        return cls(targets, router_names(settings), limits, bounds, settings.gateways)

    @property
    def limits(self) -> ControllerLimits:
        """Durations. A rollout may change the grace."""
        return self.pools.limits

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event. Returns actions for the caller to carry out in order."""
        if self.phase is Phase.ENDED:
            return []
        return [*self._apply(event, now), *self._look(now)]

    def _apply(self, event: Event, now: float) -> list[Action]:
        match event:
            case Scale():
                return self._scale(event)
            case Drain():
                return self._drain(event, now)
            case Turn():
                return self._turn(event, now)
            case Rollout():
                return self._begin_rollout(event)
            case Down():
                return self._down(event, now)
            case Measured(targets, why):
                if self.phase is Phase.SERVING:
                    self.pools.resize(clamped(targets, self.bounds))
                    self.pools.turn_cause = why or "autoscaler"
            case Reported(router, report):
                reporter = self.pools.members.get(router)
                if reporter is not None:
                    reporter.heard_at = now
                    self.pools.members.views[router] = view = View.of(report)
                    if view.in_flight and self.phase is Phase.DRAINING:
                        return [*self._show_drain(now), *self.pools.observe(now)]
                return self.pools.observe(now)
            case MemberStarted():
                return self._started(event, now)
            case MemberServes(name):
                member = self.pools.members.get(name)
                if member is not None and member.stage is Stage.STARTING:
                    return [Log("back", each) for each in self.pools.ready_now(member, now)]
            case MemberDown():
                return self._process_ended(event, now)
            case MemberEnded():
                return self._ended(event, now)
            case MemberUnplaced():
                return self._unplaced(event, now)
            case Begin() | Tick():
                pass
        return []

    @property
    def _ending(self) -> bool:
        return self.phase not in (Phase.STARTING, Phase.SERVING)

    # ------------------------------------------------------------- orders of operators

    def _scale(self, event: Scale) -> list[Action]:
        problem = GOING_DOWN if self._ending else self._size_refusal(event.targets)
        if problem:
            return [Answer(event.ticket, Outcome.FAILED, problem)]
        replaced = self._waiters.end_scales("replaced by a later scale")
        self.pools.resize(event.targets)
        self.pools.turn_cause = "baton scale"
        self._waiters.scales.append(event.ticket)
        text = describe_targets(self.pools.sizes())
        return [*replaced, Answer(event.ticket, Outcome.ACCEPTED, text)]

    def _drain(self, event: Drain, now: float) -> list[Action]:
        member = self.pools.members.get(event.worker)
        problem = GOING_DOWN if self._ending else ""
        if member is None or member.role == ROUTER:
            names = (each.name for each in self.pools.members if each.role != ROUTER)
            known = ", ".join(sorted(names))
            problem = problem or f"no worker {event.worker[:80]!r}; workers: {known or 'none'}"
        elif not (event.force or event.replace) and self._is_last(member):
            problem = problem or _last(member)
        if problem or member is None:
            return [Answer(event.ticket, Outcome.FAILED, problem)]
        self._waiters.drains[event.ticket] = member.name
        actions: list[Action] = [Answer(event.ticket, Outcome.ACCEPTED, "draining")]
        if member.active:
            if not event.replace:
                others = len(self.pools.members.active(member.role)) - 1
                self.pools.shrink(member.role, others)
            actions.append(self.pools.let_go(member, now))
        return actions

    def _is_last(self, member: Member) -> bool:
        """Whether draining ``member`` leaves its role without a serving worker."""
        others = [each for each in self.pools.members.active(member.role) if each is not member]
        if any(map(self.pools.serves, others)):
            return False
        return member.active and (member.stage is Stage.READY or not others)

    def _turn(self, event: Turn, now: float) -> list[Action]:
        member = self.pools.members.get(event.worker)
        problem = self._turn_refusal(member, event)
        if problem or member is None:
            return [Answer(event.ticket, Outcome.FAILED, problem)]
        replaced = self._waiters.end_scales("replaced by a later change of role")
        self.pools.resize(self._turned_sizes(member, event.role))
        turn = self.pools.turn(member, event.role, "baton role", now)
        self._waiters.scales.append(event.ticket)
        text = describe_targets(self.pools.sizes())
        return [*replaced, Answer(event.ticket, Outcome.ACCEPTED, text), *turn]

    def _turn_refusal(self, member: Member | None, event: Turn) -> str:
        """Return why a worker cannot change its role, or an empty text."""
        if self._ending:
            return GOING_DOWN
        if self.rollout is not None:
            return f"a rollout is running, {self.rollout.progress(self.pools)}"
        if member is None or member.role not in POOLS:
            known = ", ".join(sorted(each.name for each in self.pools.members.workers()))
            return f"no worker {event.worker[:80]!r}; workers: {known or 'none'}"
        if event.role not in POOLS:
            return f"no role {event.role[:80]!r}; roles: {', '.join(POOLS)}"
        if member.role == event.role:
            return f"{member.name} is a {member.role} worker already"
        if member.stage is not Stage.READY:
            return f"{member.name} is {member.stage.value}; only a ready worker changes its role"
        if self._is_last(member):
            return keep_one(member.name, member.role)
        return self._size_refusal(self._turned_sizes(member, event.role))

    def _size_refusal(self, targets: dict[str, int]) -> str:
        return scale_refusal(targets, self.bounds, self.pools.targets)

    def _turned_sizes(self, member: Member, role: str) -> dict[str, int]:
        """Return the targets after a change of the member's role."""
        sizes = self.pools.targets
        return {member.role: sizes[member.role] - 1, role: sizes[role] + 1}

    def rollout_refusal(self) -> str:
        """Return why no rollout can begin now, or an empty text if one can."""
        if self._ending:
            return GOING_DOWN
        if self.rollout is not None:
            return f"a rollout is running, {self.rollout.progress(self.pools)}"
        if self.phase is Phase.STARTING:
            return "the cluster is not ready yet; see baton wait-ready"
        return ""

    def _begin_rollout(self, event: Rollout) -> list[Action]:
        problem = self.rollout_refusal()
        if problem:
            return [Answer(event.ticket, Outcome.FAILED, problem)]
        before = self.pools.revision
        self.rollout = Replacement(event.ticket, event.revision, before, event.in_place)
        self.pools.in_place = event.in_place
        self.rollout.grace_before = self.limits.grace
        self.pools.change_grace(event.grace)
        self.pools.revision = event.revision
        self.rollout.last_progress = self.rollout.progress(self.pools)
        return [Answer(event.ticket, Outcome.ACCEPTED, self.rollout.last_progress)]

    # ------------------------------------------------------------- events of members

    def _started(self, event: MemberStarted, now: float) -> list[Action]:
        member = self.pools.members.get(event.name)
        if member is None:
            return []
        member.restarts += member.pid != 0
        member.pid, member.host, member.waits_for = event.pid, event.host, ""
        member.restart_at = 0.0
        if member.role == ROUTER:
            self.pools.members.views.pop(member.name, None)
        if member.stage is Stage.READY:
            member.enter(Stage.STARTING, now)
        elif member.stage is Stage.DRAINING and member.restarts:
            member.died = True  # the routers have moved its requests to other workers
            return [self.pools.stop(member, self.limits.grace, now)]
        return []

    def _process_ended(self, event: MemberDown, now: float) -> list[Action]:
        """Handle a crash. The process manager restarts the member, unless it never served."""
        member = self.pools.members.get(event.name)
        if member is None or member.stage is Stage.STOPPING or self._ending:
            return []
        if member.stage is Stage.DRAINING:
            member.died = True  # the routers have moved its requests to other workers
            return [self.pools.stop(member, 0.0, now)]
        member.cause, member.ends = event.why, event.ends
        member.restart_at = now + event.seconds
        if member.stage is Stage.READY:
            member.enter(Stage.STARTING, now)
        if member.ends < self.limits.tries or not self._gives_up(member):
            return [Log("restarting", member.name, event.why, event.seconds)]
        stop = self.pools.stop(member, 0.0, now)
        return [stop, *self._lost(member, event.why, now, refused=False)]

    def _gives_up(self, member: Member) -> bool:
        """Whether to stop restarting a member that crashes repeatedly.

        If the cluster never served, it fails with the reason. If the member never served, it is
        not added. A member that once served is restarted forever, or on another host if the
        process manager has other hosts.
        """
        if self.phase is Phase.STARTING or not member.was_ready:
            return True
        return self.limits.replace and member.role != ROUTER

    def _ended(self, event: MemberEnded, now: float) -> list[Action]:
        member = self.pools.members.remove(event.name)
        if member is None:
            return []
        actions: list[Action] = [*self._waiters.end_drains(member, event.code)]
        if member.role == ROUTER and self.phase is Phase.DRAINING and event.code not in _STOPPED:
            self._exit_code = 1
        if member.left and event.code == 0 and not self._ending:
            return [*actions, Log("retired", member.name)]
        if member.stage is Stage.STOPPING or self._ending:
            return actions
        if member.role in POOLS and event.code == 0 and member.was_ready:
            if member.active:  # drained without an order of this controller
                self.pools.shrink(member.role, len(self.pools.members.active(member.role)))
            return [*actions, Log("retired", member.name)]
        if member.stage is Stage.DRAINING:
            return actions
        return [*actions, *self._lost(member, event.reason, now, refused=event.refused)]

    def _lost(self, member: Member, why: str, now: float, *, refused: bool) -> list[Action]:
        """Handle a needed member that cannot run: fail the order, or replace the member later."""
        if self.phase is Phase.STARTING:
            what = "cannot_run" if refused else "gave_up"
            return [Log(what, member.name, why), *self._stop_all(now, 1)]
        if self.rollout is not None and self.rollout.is_new(member):
            return self._end_rollout(f"{member.name} cannot run: {why or 'no message'}")
        if not member.was_ready and member.role != ROUTER:
            text = f"{member.name} cannot run: {why or 'no message'}"
            ended = self._waiters.end_scales(text)
            others = len(self.pools.members.active(member.role))
            if others >= self.bounds.least(member.role):  # keep the pool's present size
                self.pools.shrink(member.role, others)
                return [Log("not_added", member.name, why), *ended]
            wait = self.pools.hold(member.role, now)  # the pool would fall below its minimum
            return [Log("replacing", member.name, why, wait), *ended]
        wait = self.pools.hold(member.role, now)
        return [Log("replacing", member.name, why, wait)]

    def _unplaced(self, event: MemberUnplaced, now: float) -> list[Action]:
        member = self.pools.members.get(event.name)
        if member is None or not member.active or self._ending:
            return []
        if event.final:
            stop = self.pools.stop(member, self.limits.stop_timeout, now)
            return [stop, *self._lost(member, event.why, now, refused=True)]
        if member.waits_for == event.why:
            return []
        member.waits_for = event.why
        text = f"{member.name} waits for a host: {event.why}"
        return [Log("unplaced", member.name, event.why), *self._waiters.progress(text)]

    def _overdue(self, now: float) -> list[Action]:
        """Stop members that were added while serving and did not become ready in time."""
        actions: list[Action] = []
        for member in self.pools.overdue(now) if self.phase is Phase.SERVING else ():
            why = member.waits_for or f"not ready after {self.limits.ready_timeout:g} s"
            actions.append(self.pools.stop(member, self.limits.stop_timeout, now))
            actions += self._lost(member, why, now, refused=True)
        return actions

    # ------------------------------------------------------------- actual and target state

    def _look(self, now: float) -> list[Action]:
        """Return all actions that follow from the present state of the members."""
        actions: list[Action] = []
        self.pools.may_turn = self.can_turn and self.rollout is None
        if self.phase is Phase.STARTING or self.phase is Phase.SERVING:
            actions += self._overdue(now)
        if self.phase is Phase.STARTING or self.phase is Phase.SERVING:
            actions += self.pools.turns(now) if self.phase is Phase.SERVING else []
            actions += [*self.pools.fill(now), *self.pools.shed(now), *self.pools.drains(now)]
            actions += [*self._arrived(now), *self._held_up(now)]
        if self.phase is Phase.DRAINING:
            actions += self._look_draining(now)
        actions += self._request()
        if self.phase is Phase.STOPPING and not self.pools.members:
            self.phase = Phase.ENDED
            ended = [Log("ended")] if self._waiters.downs else []
            actions += [*ended, *self._waiters.end_downs(), End(self._exit_code)]
        return actions

    def _arrived(self, now: float) -> list[Action]:
        """Report reached targets, and take the rollout's next step."""
        actions: list[Action] = []
        if self.phase is Phase.STARTING and self.pools.settled():
            self.phase = Phase.SERVING
            actions.append(Log("ready"))
        if self.phase is not Phase.SERVING:
            return actions
        if self.rollout is not None:
            actions += self._advance_rollout(self.rollout, now)
        if self.pools.reached():
            text = describe_targets(self.pools.sizes())
            actions += self._waiters.end_scales(text, Outcome.DONE)
        return actions

    def _held_up(self, now: float) -> list[Action]:
        """Fail orders that wait for members that ended and did not come back."""
        waits = self.rollout is not None or self._waiters.scales
        gone = self.pools.held_up_by(now) if waits and self.phase is Phase.SERVING else []
        if not gone:
            return []
        names = ", ".join(member.name for member in gone)
        text = (
            f"{names} ended and did not come back within {self.limits.ready_timeout:g} s; see the "
            f"last lines of the log for the reason. Remove it with baton drain {gone[0].name}, add "
            "another with baton scale, then repeat the order"
        )
        return [*self._end_rollout(text), *self._waiters.end_scales(text)]

    def _request(self) -> list[Action]:
        wanted = {} if self._ending else self.pools.wanted()
        if wanted == self._requested:
            return []
        self._requested = wanted
        return [RequestResources(dict(wanted))]

    # ------------------------------------------------------------- rollout

    def _advance_rollout(self, rollout: Replacement, now: float) -> list[Action]:
        actions = rollout.advance(self.pools, now)
        text = rollout.progress(self.pools)
        if rollout.finished:
            self.rollout, self.last_rollout = None, f"finished: {text}"
            self.pools.in_place = False
            log = Log("rolled_out", detail=text)
            return [*actions, Answer(rollout.ticket, Outcome.DONE, text), log]
        if text != rollout.last_progress:
            rollout.last_progress = text
            actions.append(Answer(rollout.ticket, Outcome.PROGRESS, text))
        return actions

    def _end_rollout(self, why: str) -> list[Action]:
        """Stop the rollout. Members not yet replaced stay; a missing router returns unchanged."""
        rollout, self.rollout = self.rollout, None
        if rollout is None:
            return []
        self.pools.revision, self.pools.surge = rollout.before, ""
        self.pools.in_place = False
        self.pools.change_grace(rollout.grace_before)
        text = f"stopped at {rollout.progress(self.pools)}: {why}"
        self.last_rollout = text
        return [Log("rollout_stopped", detail=text), Answer(rollout.ticket, Outcome.FAILED, text)]

    # ------------------------------------------------------------- the end

    def _down(self, event: Down, now: float) -> list[Action]:
        actions: list[Action] = []
        if event.ticket is not None:
            self._waiters.downs.append(event.ticket)
            actions.append(Answer(event.ticket, Outcome.ACCEPTED, "going down"))
        if self._ending:
            return actions if event.ticket is not None else [*actions, *self._kill_all()]
        if event.ticket is not None:
            actions.append(Log("going_down"))
        actions += [*self._end_rollout(GOING_DOWN), *self._waiters.end_all(GOING_DOWN)]
        if self.phase is Phase.STARTING:
            return [*actions, *self._stop_all(now, 0)]
        self.phase = Phase.DRAINING
        self._drain_until = now + self.limits.grace
        for router in self.pools.members.of_role(ROUTER):
            # This core enforces the grace, to report its end. The process manager's limit is later.
            grace = self.limits.grace + self.limits.stop_timeout
            actions.append(self.pools.stop(router, grace, now))
        for gateway in self.pools.members.of_role(GATEWAY):
            actions.append(self.pools.stop(gateway, self.limits.grace, now))
        return actions

    def _show_drain(self, now: float) -> list[Action]:
        """Report once that requests still run.

        Reports from before the shutdown do not count: their requests may have ended since.
        """
        if self._drain_shown:
            return []
        self._drain_shown = True
        return [Log("draining", seconds=max(0.0, self._drain_until - now))]

    def _look_draining(self, now: float) -> list[Action]:
        if not self.pools.members.of_role(ROUTER):
            return self._stop_all(now, 0)
        if now >= self._drain_until:
            return [Log("grace_over"), *self._stop_all(now, 0)]
        return []

    def _stop_all(self, now: float, code: int) -> list[Action]:
        """Stop all members, with the stop timeout and without grace for requests."""
        ended = [*self._end_rollout(GOING_DOWN), *self._waiters.end_all(GOING_DOWN)]
        self.phase = Phase.STOPPING
        self._exit_code = max(self._exit_code, code)
        timeout = self.limits.stop_timeout
        stops = [self.pools.stop(member, timeout, now) for member in self.pools.members]
        return [*ended, *stops]

    def _kill_all(self) -> list[Action]:
        self.phase = Phase.STOPPING
        return [KillMember(member.name) for member in self.pools.members]


def _last(member: Member) -> str:
    """Return why the last ready member of its role is not drained."""
    if member.role == GATEWAY:
        return f"{member.name} is the last gateway: HTTP would end; give --force to drain it"
    return last_worker(member.name, member.role)
