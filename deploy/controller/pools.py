"""The actual and target state of the pools, and the next steps from one to the other.

Invariants: a member is started only with an unused name. A ready worker is drained, never stopped,
and only if the others meet the target. A gateway is stopped: it finishes its requests on SIGTERM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ..roles import GATEWAY, POOLS, ROUTER
from ..supervise.core import Log
from ..supervise.restart import RestartPolicy
from .events import Action, DrainMember, StartMember, StopMember, TurnMember
from .members import Member, Members, Stage


class ControllerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations in seconds.

    ``replace``: replace a worker after its process ended ``tries`` times in a row, because other
    hosts exist. Otherwise the worker is restarted forever.
    """

    grace: float = 30.0
    """Time for running requests to finish in a drain, and after the first Down."""
    stop_timeout: float = 5.0
    """Time for a process without requests to exit."""
    ready_timeout: float = 600.0
    """Time for an added member to become ready. Also the time for a crashed member to come back
    before a rollout or a scale order fails."""
    drain_repeat: float = 1.0
    """Interval for repeating a drain that no router has confirmed."""
    replace: bool = False
    tries: int = 6
    """Ends in a row after which a member is given up, if the cluster or the member never served."""


@dataclass
class Pools:
    """Members and targets of one cluster.

    ``gateways``: target number of gateways.
    ``revision``: number of the settings for new members. ``surge``: the pool that may have one
    extra worker for a rollout. ``in_place``: a rollout starts each replacement only after the old
    worker has ended, because an extra worker has no room. ``may_turn``: workers may change their
    role now. ``turn_cause``: why the present targets let them. ``last_turn``: worker and text
    of the last change of role.
    """

    routers: tuple[str, ...]
    targets: dict[str, int]
    limits: ControllerLimits
    gateways: int = 0
    members: Members = field(default_factory=Members)
    revision: int = 0
    surge: str = ""
    in_place: bool = False
    may_turn: bool = False
    turn_cause: str = ""
    last_turn: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        self._losses: dict[str, tuple[RestartPolicy, float]] = {}  # with the time of the last loss
        self._hold: dict[str, float] = {}  # by role: earliest time of the next start

    # ------------------------------------------------------------- one member

    def start(self, name: str, role: str, revision: int, now: float) -> StartMember:
        """Start a member with an unused name."""
        self.members.add(name, role, revision, now)
        return StartMember(name, role, revision)

    def stop(self, member: Member, grace: float, now: float) -> StopMember:
        """Stop a member within ``grace`` seconds."""
        member.enter(Stage.STOPPING, now)
        return StopMember(member.name, grace)

    def let_go(self, member: Member, now: float) -> Action:
        """Drain a ready worker. Stop others: they have no requests, or finish them on SIGTERM."""
        loading = member.stage is not Stage.READY and not member.unseen
        if loading or member.role == GATEWAY:
            return self.stop(member, self.limits.grace, now)
        member.enter(Stage.DRAINING, now)
        member.drain_sent_at = now
        return DrainMember(member.name)

    def turn(self, member: Member, role: str, why: str, now: float) -> list[Action]:
        """Let a ready worker drain and go on in another role. It belongs to the new pool at once.

        The caller changes the targets, so that no other worker is started or drained for it.
        """
        member.role, member.turning = role, why
        member.enter(Stage.STARTING, now)
        self.last_turn = member.name, f"its role to {role}: {why}"
        log = Log("turns", member.name, f"{role}: {why}")
        return [TurnMember(member.name, role, member.revision), log]

    def shrink(self, role: str, others: int) -> None:
        """Lower a pool's target by one, because a worker leaves and ``others`` remain.

        The target stays if the pool exceeds it, as after a scale order with pending drains.
        """
        if others >= self.target(role) + (role == self.surge):
            return
        if role == GATEWAY:
            self.gateways = max(0, self.gateways - 1)
        else:
            self.targets[role] = max(0, self.targets[role] - 1)

    def target(self, role: str) -> int:
        """Target number of the workers of a pool, or of the gateways."""
        return self.gateways if role == GATEWAY else self.targets[role]

    def resize(self, targets: Mapping[str, int]) -> None:
        """Set the targets of some pools, and of the gateways."""
        pools = dict(targets)
        self.gateways = pools.pop(GATEWAY, self.gateways)
        self.targets |= pools

    def sizes(self) -> dict[str, int]:
        """Return the targets of the pools, and of the gateways if there are any."""
        return {**self.targets, **({GATEWAY: self.gateways} if self.gateways else {})}

    def hold(self, role: str, now: float) -> float:
        """Record a loss. Returns the delay in seconds before the next start of this role."""
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
        """Change the grace in seconds; None: unchanged."""
        if grace is not None:
            self.limits = msgspec.structs.replace(self.limits, grace=grace)

    def ready(self, role: str) -> int:
        """Number of ready members of a role."""
        return sum(member.stage is Stage.READY for member in self.members.of_role(role))

    def serves(self, member: Member) -> bool:
        """Whether a worker accepts requests, by the last reports of all routers.

        A gateway accepts them from its first heartbeat on.
        """
        seen = member.role == GATEWAY or self.members.seen_ready(member)
        return member.stage is Stage.READY and seen

    # ------------------------------------------------------------- all of them

    def turns(self, now: float) -> list[Action]:
        """Let spare workers of one pool change their role for the other, if that lacks workers.

        A change of role loads no weights and needs no room, unlike a start and a drain.
        """
        actions: list[Action] = []
        for role, other in (POOLS, POOLS[::-1]):
            for worker in self._turners(role, other):
                spare = sum(map(self.serves, self.members.active(other)))
                if self.serves(worker) and spare > self.target(other):
                    actions += self.turn(worker, role, self.turn_cause, now)
        return actions

    def _turners(self, role: str, other: str) -> list[Member]:
        """Return the workers of ``other`` to change to ``role``, with the fewest requests first."""
        if not self.may_turn:
            return []
        lacks = self.target(role) - len(self.members.active(role))
        active = self.members.active(other)
        able = [
            member
            for member in active
            if member.stage is Stage.READY and member.revision == self.revision
        ]
        able.sort(key=lambda member: (self.members.requests(member), -member.index))
        return able[: max(0, min(lacks, len(active) - self.target(other)))]

    def fill(self, now: float) -> list[Action]:
        """Start missing members, except of roles with a delay after a loss."""
        actions: list[Action] = []
        if now >= self._hold.get(ROUTER, now):
            missing = [name for name in self.routers if self.members.get(name) is None]
            actions += [self.start(name, ROUTER, self.revision, now) for name in missing]
        for role in (*POOLS, GATEWAY):
            if now < self._hold.get(role, now):
                continue
            there = len(self.members.active(role))
            there += len(self.members.leaving(role)) if self.in_place else 0
            there += sum(len(self._turners(role, other)) for other in POOLS if other != role)
            for _ in range(self.target(role) - there):
                name = self.members.free_name(role)
                actions.append(self.start(name, role, self.revision, now))
        return actions

    def shed(self, now: float) -> list[Action]:
        """Drain or stop excess members. A rollout's extra member is not excess."""
        actions: list[Action] = []
        for role in (*POOLS, GATEWAY):
            active = self.members.active(role)
            while len(active) > self.target(role) + (role == self.surge):
                victim = self.victim(active, self.target(role))
                if victim is None:
                    break
                active.remove(victim)
                actions.append(self.let_go(victim, now))
        return actions

    def victim(self, active: list[Member], target: int) -> Member | None:
        """Choose a worker to remove: old settings first, then not ready, then the highest number.

        Returns None if only ready workers remain and fewer than ``target`` others serve. Members
        of a previous controller that are not found yet are never chosen: they may still serve.
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
        """Stop drained workers, stop drains beyond the grace, and repeat unconfirmed drains."""
        actions: list[Action] = []
        for member in self.members.workers():
            if member.stage is not Stage.DRAINING:
                continue
            states = self.members.states(member)
            if "left" in states:
                member.left = True
                actions.append(self.stop(member, self.limits.stop_timeout, now))
            elif now - member.since >= self.limits.grace:
                actions.append(Log("drain_over", member.name))
                actions.append(self.stop(member, self.limits.stop_timeout, now))
            elif now - member.drain_sent_at >= self.limits.drain_repeat:
                member.drain_sent_at = now
                if "draining" not in states:
                    actions.append(DrainMember(member.name))
        return actions

    def overdue(self, now: float) -> list[Member]:
        """Return added members that did not become ready within ``ready_timeout``."""
        return [
            member
            for member in self.members
            if member.stage is Stage.STARTING
            and not member.was_ready
            and now - member.since >= self.limits.ready_timeout
        ]

    def held_up_by(self, now: float) -> list[Member]:
        """Return members that were ready, ended, and did not come back in time.

        Empty while any other member is still starting or leaving.
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
        """Update the members' stages from the routers' reports. Reports members that are back."""
        back: list[str] = []
        for member in self.members:
            if member.stage is Stage.STARTING:
                see = self.members.sees_all if member.role == ROUTER else self.members.seen_ready
                if member.role != GATEWAY and see(member):
                    back += self.ready_now(member, now)
            elif member.stage is Stage.READY and "draining" in self.members.states(member):
                member.enter(Stage.DRAINING, now)  # an operator's order went directly to a router
                self.shrink(member.role, len(self.members.active(member.role)))
        return [Log("back", name) for name in back]

    def ready_now(self, member: Member, now: float) -> list[str]:
        """Mark a starting member as ready. Returns its name if it had crashed."""
        member.enter(Stage.READY, now)
        back = [member.name] if member.cause else []
        member.was_ready, member.turning, member.cause = True, "", ""
        return back

    # ------------------------------------------------------------- progress

    def settled(self) -> bool:
        """Whether exactly the target members exist, and all are ready."""
        size = self.size()
        members = list(self.members)
        return len(members) == size and all(m.stage is Stage.READY for m in members)

    def size(self) -> int:
        """Target number of all members."""
        return len(self.routers) + sum(self.targets.values()) + self.gateways

    def reached(self) -> bool:
        """Whether pools and gateways have their target sizes, apart from a rollout's extra one."""
        return all(
            self.ready(role) >= count
            and len(self.members.of_role(role)) <= count + (role == self.surge)
            for role, count in {**self.targets, GATEWAY: self.gateways}.items()
        )

    def wanted(self) -> dict[str, int]:
        """Number of members that need room, including extra and draining workers.

        Gateways need none: they are small and run beside the routers.
        """
        wanted = {ROUTER: len(self.routers)}
        for role, count in self.targets.items():
            wanted[role] = max(count, len(self.members.of_role(role)))
        return wanted
