"""The pools as they are beside the pools as they should be, and the next steps between.

Invariants: a name is started only while no member has it; a ready worker is drained, never
stopped, and only while the target is met without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from .core import Say
from .launcher import POOLS, ROUTER
from .members import Member, Members, Stage
from .orders import Action, DrainMember, StartMember, StopMember
from .restart import RestartPolicy


class ControllerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations in seconds.

    ``replace``: a worker whose process ended ``tries`` times in a row is replaced by a new one,
    as where there are other hosts; otherwise it is started again for ever.
    """

    grace: float = 30.0
    """How long requests may run on in a drain, and after the first Down."""
    stop_timeout: float = 5.0
    """How long a process with nothing to do may take to end."""
    ready_timeout: float = 600.0
    """How long a member that a rollout or a scale added may take to become ready, and how long
    one that crashed may take to come back before a rollout or a scale stops waiting for it."""
    drain_repeat: float = 1.0
    """How often a drain is repeated that no router has confirmed."""
    replace: bool = False
    tries: int = 6
    """How often in a row the process of a member may end before the member is given up, where
    it is to be given up at all: before the cluster or the member ever served."""


@dataclass
class Pools:
    """Members and targets of one cluster.

    ``revision``: of the settings members are started with. ``surge``: the pool that may have
    one more for a rollout. ``in_place``: a rollout has no room for one more, so a worker is started
    only when the one before it has left.
    """

    routers: tuple[str, ...]
    targets: dict[str, int]
    limits: ControllerLimits
    members: Members = field(default_factory=Members)
    revision: int = 0
    surge: str = ""
    in_place: bool = False

    def __post_init__(self) -> None:
        self._losses: dict[str, tuple[RestartPolicy, float]] = {}  # and the time of the last one
        self._hold: dict[str, float] = {}  # by role: nothing is started before

    # ------------------------------------------------------------- one member

    def start(self, name: str, role: str, revision: int, now: float) -> StartMember:
        """Start a member whose name is free."""
        self.members.add(name, role, revision, now)
        return StartMember(name, role, revision)

    def stop(self, member: Member, grace: float, now: float) -> StopMember:
        """End a member within ``grace`` seconds."""
        member.enter(Stage.STOPPING, now)
        return StopMember(member.name, grace)

    def let_go(self, member: Member, now: float) -> Action:
        """Drain a worker; one that is not ready has nothing, or drains itself when stopped."""
        if member.stage is not Stage.READY and not member.unseen:
            return self.stop(member, self.limits.grace, now)
        member.enter(Stage.DRAINING, now)
        member.drain_said_at = now
        return DrainMember(member.name)

    def shrink(self, role: str, others: int) -> None:
        """A worker leaves for good, ``others`` stay: its pool is meant to be one smaller.

        Unless it was one too many already, as after a scale whose drains have to wait.
        """
        if others < self.targets[role] + (role == self.surge):
            self.targets[role] = max(0, self.targets[role] - 1)

    def hold(self, role: str, now: float) -> float:
        """A loss: wait before the next start of this role; returns how long."""
        policy, last = self._losses.get(role, (RestartPolicy(), now))
        if now - last > 2 * policy.limits.max_delay:
            policy = RestartPolicy()
        self._losses[role] = policy, now
        wait = policy.delay(None)
        self._hold[role] = now + wait
        return wait

    def held(self, role: str, now: float) -> float:
        """Seconds until the next start of this role."""
        return max(0.0, self._hold.get(role, now) - now)

    def change_grace(self, grace: float | None) -> None:
        """Seconds that drains may take from now on; None: as before."""
        if grace is not None:
            self.limits = msgspec.structs.replace(self.limits, grace=grace)

    def ready(self, role: str) -> int:
        """How many of a pool are ready."""
        return sum(member.stage is Stage.READY for member in self.members.of_role(role))

    def serves(self, member: Member) -> bool:
        """Whether a worker takes requests, by the last words of every router."""
        return member.stage is Stage.READY and self.members.seen_ready(member)

    # ------------------------------------------------------------- all of them

    def fill(self, now: float) -> list[Action]:
        """Start what is missing, unless a loss of this role is waited out."""
        actions: list[Action] = []
        if now >= self._hold.get(ROUTER, now):
            missing = [name for name in self.routers if self.members.get(name) is None]
            actions += [self.start(name, ROUTER, self.revision, now) for name in missing]
        for role in POOLS:
            if now < self._hold.get(role, now):
                continue
            there = len(self.members.active(role))
            there += len(self.members.leaving(role)) if self.in_place else 0
            for _ in range(self.targets[role] - there):
                name = self.members.free_name(role)
                actions.append(self.start(name, role, self.revision, now))
        return actions

    def shed(self, now: float) -> list[Action]:
        """Let go what is too much; what a rollout has on top may stay."""
        actions: list[Action] = []
        for role in POOLS:
            active = self.members.active(role)
            while len(active) > self.targets[role] + (role == self.surge):
                victim = self.victim(active, self.targets[role])
                if victim is None:
                    break
                active.remove(victim)
                actions.append(self.let_go(victim, now))
        return actions

    def victim(self, active: list[Member], target: int) -> Member | None:
        """Old settings go first, then what is not ready, then the highest number.

        None: a ready one would have to go, and the routers do not see ``target`` others. One
        that was ready under a predecessor of this controller may still be.
        """
        spare = sum(self.serves(member) for member in active) > target
        able = [
            member
            for member in active
            if not member.unseen and (spare or member.stage is not Stage.READY)
        ]

        def rank(member: Member) -> tuple[bool, bool, int]:
            old = member.revision != self.revision
            return old, member.stage is not Stage.READY, member.index

        return max(able, key=rank, default=None)

    def drains(self, now: float) -> list[Action]:
        """Stop what has left, bound what does not end, repeat what no router has heard."""
        actions: list[Action] = []
        for member in self.members.workers():
            if member.stage is not Stage.DRAINING:
                continue
            states = self.members.states(member)
            if "left" in states:
                member.left = True
                actions.append(self.stop(member, self.limits.stop_timeout, now))
            elif now - member.since >= self.limits.grace:
                actions.append(Say("drain_over", member.name))
                actions.append(self.stop(member, self.limits.stop_timeout, now))
            elif now - member.drain_said_at >= self.limits.drain_repeat:
                member.drain_said_at = now
                if "draining" not in states:
                    actions.append(DrainMember(member.name))
        return actions

    def overdue(self, now: float) -> list[Member]:
        """Added members that take too long to become ready."""
        return [
            member
            for member in self.members
            if member.stage is Stage.STARTING
            and not member.was_ready
            and now - member.since >= self.limits.ready_timeout
        ]

    def held_up_by(self, now: float) -> list[Member]:
        """Members that were ready, ended and take too long to come back.

        Empty while anything else is on its way.
        """
        missing = [member for member in self.members if member.stage is not Stage.READY]
        gone = [
            member
            for member in missing
            if member.stage is Stage.STARTING
            and member.was_ready
            and now - member.since >= self.limits.ready_timeout
        ]
        return gone if len(gone) == len(missing) else []

    def observe(self, now: float) -> list[Action]:
        """Take over what the routers see of the members; say which are back."""
        back: list[str] = []
        for member in self.members:
            if member.stage is Stage.STARTING:
                see = self.members.sees_all if member.role == ROUTER else self.members.seen_ready
                if see(member):
                    member.enter(Stage.READY, now)
                    member.was_ready = True
                    back += [member.name] if member.cause else []
                    member.cause = ""
            elif member.stage is Stage.READY and "draining" in self.members.states(member):
                member.enter(Stage.DRAINING, now)  # an operator asked a router for it
                self.shrink(member.role, len(self.members.active(member.role)))
        return [Say("back", name) for name in back]

    # ------------------------------------------------------------- how far

    def settled(self) -> bool:
        """Whether everything wanted is ready and nothing else is there."""
        size = len(self.routers) + sum(self.targets.values())
        members = list(self.members)
        return len(members) == size and all(m.stage is Stage.READY for m in members)

    def reached(self) -> bool:
        """Whether the pools have their size, but for what a rollout has on top."""
        return all(
            self.ready(role) >= count
            and len(self.members.of_role(role)) <= count + (role == self.surge)
            for role, count in self.targets.items()
        )

    def wanted(self) -> dict[str, int]:
        """Members to have room for, with what is on top and what still drains."""
        wanted = {ROUTER: len(self.routers)}
        for role, count in self.targets.items():
            wanted[role] = max(count, len(self.members.of_role(role)))
        return wanted
