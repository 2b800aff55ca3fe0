"""Replacing every member by one of another revision, one after the other.

Workers first, with one on top: a new one is started, and when every router finds it ready an old
one is drained; nothing else happens until that has left. In place, where there is no room for one
more: an old one is drained, and when it has left a new one is started. Then the routers, each at
its predecessor's address: it is ended at once, because its clients go on at its successor or at
another router, and the next one has to wait until the successor knows every worker.

Invariant: at most one worker more than wanted exists, or in place one less in its pool, and at
most one router is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .launcher import POOLS, ROUTER
from .members import Member, Stage
from .orders import Action
from .pools import Pools


@dataclass(slots=True)
class Replacement:
    """One rollout. ``before``: the revision it began from."""

    ticket: object
    revision: int
    before: int
    in_place: bool = False
    grace_before: float | None = None
    """Holds again when it cannot go on."""
    said: str = ""
    finished: bool = field(default=False)

    def olds(self, members: list[Member]) -> list[Member]:
        """Those not replaced yet."""
        return [member for member in members if member.revision != self.revision]

    def is_new(self, member: Member) -> bool:
        """Whether it was started by this rollout and never became ready."""
        return member.revision == self.revision and not member.was_ready

    def progress(self, pools: Pools) -> str:
        """How far it is, for people."""
        wanted = len(pools.routers) + sum(pools.targets.values())
        new = [m for m in pools.members if m.revision == self.revision]
        return f"{sum(m.stage is Stage.READY for m in new)} of {wanted} replaced"

    def advance(self, pools: Pools, now: float) -> list[Action]:
        """The next step, if there is one now."""
        pools.in_place = self.in_place
        for role in POOLS:
            if not self.olds(pools.members.active(role)):
                continue
            if self.in_place:
                return self._worker_in_place(role, pools, now)
            pools.surge = role
            return self._worker(role, pools, now)
        pools.surge = ""
        if not pools.settled() or not all(map(pools.serves, pools.members.workers())):
            return []
        olds = self.olds(pools.members.of_role(ROUTER))
        if olds:
            # Beside another one it may finish what it has: its new requests go there.
            grace = pools.limits.grace if len(pools.routers) > 1 else 0.0
            return [pools.stop(olds[0], grace, now)]
        self.finished = True
        return []

    def _worker_in_place(self, role: str, pools: Pools, now: float) -> list[Action]:
        """Drain an old one, if the pool is whole but for workers that are old and down."""
        active = pools.members.active(role)
        if len(active) < pools.targets[role] or pools.members.leaving(role):
            return []
        victim = pools.victim(self.olds(active), 0)
        others = [member for member in active if member is not victim]
        if victim is None or not all(map(pools.serves, others)):
            return []
        return [pools.let_go(victim, now)]

    def _worker(self, role: str, pools: Pools, now: float) -> list[Action]:
        active = pools.members.active(role)
        news = [member for member in active if member.revision == self.revision]
        if any(member.stage is not Stage.READY for member in news):
            return []
        if len(active) <= pools.targets[role]:
            if not all(member.active for member in pools.members.workers()):
                return []  # one is still leaving
            name = pools.members.free_name(role)
            return [pools.start(name, role, self.revision, now)]
        victim = pools.victim(self.olds(active), 0)
        others = sum(pools.serves(member) for member in active if member is not victim)
        if victim is None or others < pools.targets[role]:
            return []
        return [pools.let_go(victim, now)]
