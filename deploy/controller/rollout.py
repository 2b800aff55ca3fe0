"""A rollout: replaces every member by a member of another revision, one at a time.

Workers are first. Normally the rollout starts a new worker, waits until every router reports it as
ready, drains an old worker, and waits until that has ended. In place, for pools without room for
an extra worker, it drains an old worker, waits until that has ended, and starts a new worker. Then
the rollout replaces the routers. A new router uses the old router's address. An old router is
stopped without delay, because its clients move to the new or another router. The next router
follows after the new router reports every worker. The gateways are last: a new one listens at the
same port before an old one stops, which finishes its HTTP requests.

Invariant: at most one extra worker or gateway exists, or in place at most one worker is missing in
a pool, and at most one router is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..roles import GATEWAY, POOLS, ROUTER
from .events import Action
from .members import Member, Stage
from .pools import Pools


@dataclass(slots=True)
class Replacement:
    """One rollout. ``before``: the revision before the rollout."""

    ticket: object
    revision: int
    before: int
    in_place: bool = False
    grace_before: float | None = None
    """The grace before the rollout, restored if the rollout stops."""
    last_progress: str = ""
    finished: bool = field(default=False)

    def olds(self, members: list[Member]) -> list[Member]:
        """Return the members that are not replaced yet."""
        return [member for member in members if member.revision != self.revision]

    def is_new(self, member: Member) -> bool:
        """Whether this rollout started the member and the member was never ready."""
        return member.revision == self.revision and not member.was_ready

    def progress(self, pools: Pools) -> str:
        """Describe the progress."""
        new = [m for m in pools.members if m.revision == self.revision]
        return f"{sum(m.stage is Stage.READY for m in new)} of {pools.size()} replaced"

    def advance(self, pools: Pools, now: float) -> list[Action]:
        """Return the actions of the next step, if the step is possible now."""
        pools.in_place = self.in_place
        for role in POOLS:
            if not self.olds(pools.members.active(role)):
                continue
            if self.in_place:
                return self._worker_in_place(role, pools, now)
            pools.surge = role
            return self._worker(role, pools, now)
        if pools.surge != GATEWAY or not self.olds(pools.members.active(GATEWAY)):
            pools.surge = ""
            if not pools.settled() or not all(map(pools.serves, pools.members.workers())):
                return []
        olds = self.olds(pools.members.of_role(ROUTER))
        if olds:
            # With several routers, the old router can finish its requests: new requests go to the
            # other routers.
            grace = pools.limits.grace if len(pools.routers) > 1 else 0.0
            return [pools.stop(olds[0], grace, now)]
        if self.olds(pools.members.active(GATEWAY)):
            pools.surge = GATEWAY
            return self._worker(GATEWAY, pools, now)
        self.finished = True
        return []

    def _worker_in_place(self, role: str, pools: Pools, now: float) -> list[Action]:
        """Drain an old worker if all other workers of the pool serve."""
        active = pools.members.active(role)
        if len(active) < pools.targets[role] or pools.members.leaving(role):
            return []
        victim = pools.victim(self.olds(active), 0)
        others = [member for member in active if member is not victim]
        if victim is None or not all(map(pools.serves, others)):
            return []
        return [pools.let_go(victim, now)]

    def _worker(self, role: str, pools: Pools, now: float) -> list[Action]:
        """Start a new worker or gateway, or let an old one go after the new one serves."""
        active = pools.members.active(role)
        news = [member for member in active if member.revision == self.revision]
        if any(member.stage is not Stage.READY for member in news):
            return []
        if len(active) <= pools.target(role):
            if not all(member.active for member in pools.members.workers()):
                return []  # an old worker has not ended yet
            name = pools.members.free_name(role)
            return [pools.start(name, role, self.revision, now)]
        victim = pools.victim(self.olds(active), 0)
        others = sum(pools.serves(member) for member in active if member is not victim)
        if victim is None or others < pools.target(role):
            return []
        return [pools.let_go(victim, now)]
