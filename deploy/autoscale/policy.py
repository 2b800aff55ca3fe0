"""The autoscaler: ``observe(metrics, now) -> targets``.

Pure, without clock or socket: equal observations give equal targets. The prefill pool is sized by
the arrived work and the TTFT that it would have had, the decode pool by KV blocks and step times;
of a picture model, by the prompts and the steps of the pictures that arrived (:mod:`.demand`). A
target rises at once and falls after the stabilization window (:class:`Governor`). A target is a
total number of workers, not a number to add, so starting workers are never ordered twice.

If a pool lacks workers and no further one has room, or a start takes much longer than a change of
role, one target rises and the other falls at once: the controller then lets a worker change its
role. The other pool must have had that worker to spare for a while, and must not have grown within
the stabilization window. So a load that alternates moves a worker once per window at most.

Implausible, old or missing data changes no target. If the data of any ready worker of a pool is
unusable, the pool keeps its target, and its stabilization window restarts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .demand import DecodeDemand, EncoderDemand, PictureDemand, PrefillDemand, QueueDemand
from .metrics import ROLES, Metrics, WorkerSample
from .settings import ScaleSettings

LATE_S = 15.0
"""Seconds of a missed limit, while no worker starts, after which a pool gets one more worker."""
MOST_PATIENCE = 8
"""Maximum factor on the stabilization window of a pool that grew again soon after shrinking."""
TURN_S = 5.0
"""First estimate of the seconds from the order of a change of role to its end."""
MUCH_FASTER = 2.0
"""A change of role replaces a start that takes more than this many times as long."""


@dataclass(frozen=True)
class Room:
    """What the hosts allow. ``fits``: whether they have room for pools of these sizes.

    ``turns``: workers can change their role.
    """

    fits: Callable[[Mapping[str, int]], bool] = lambda _targets: True
    turns: bool = False


ANY_ROOM = Room()


class Autoscaler:
    """Targets of both pools. ``first``: their present targets."""

    def __init__(self, settings: ScaleSettings, first: Mapping[str, int]) -> None:
        self._settings = settings
        self._pools = {
            role: Governor(
                settings.bounds.least(role), settings.bounds.most(role), settings.calm, first[role]
            )
            for role in ROLES
        }
        self._prefill = PrefillDemand(settings)
        self._decode = DecodeDemand(settings)
        self._encoders = EncoderDemand(settings)
        self._pictures = PictureDemand(settings)
        self._draws = False  # a picture was received, so the model is one of pictures
        self._cold = {role: ColdStart(settings.cold_start) for role in ROLES}
        self._late: dict[str, tuple[float, float] | None] = dict.fromkeys(ROLES)
        self._turns = ColdStart(TURN_S)
        self._turned = ""  # the pool that waits for a worker that changes its role
        self._now = -math.inf
        self.why = ""
        """Why the last decision lets workers change their role; empty if it does not."""

    @property
    def targets(self) -> dict[str, int]:
        """The targets of the last decision."""
        return {role: pool.target for role, pool in self._pools.items()}

    def adopt(self, targets: Mapping[str, int], now: float) -> None:
        """Take over targets that an operator set."""
        for role, target in targets.items():
            self._pools[role].adopt(target, now)

    def observe(self, metrics: Metrics, now: float, room: Room = ANY_ROOM) -> dict[str, int]:
        """Record the cluster's metrics at ``now`` (monotonic seconds) and return the targets."""
        if not math.isfinite(now) or now <= self._now:
            return self.targets
        self._now, self.why = now, ""
        seen: dict[str, list[WorkerSample] | None] = {role: usable(metrics, role) for role in ROLES}
        routers = metrics.routers
        if not routers or not all(router.usable for router in routers):
            seen = dict.fromkeys(ROLES)
        elif any(router.picture_rows for router in routers):
            self._draws = True
        wants: dict[str, tuple[int, int] | None] = {
            role: self._see(role, metrics, workers, now, room) if workers else None
            for role, workers in seen.items()
        }
        for role, want in wants.items():
            if want is None:
                self._pools[role].hold()
            if not seen[role]:
                self._late[role] = None
        for role, want in wants.items():
            if want is not None:
                self._order(role, want, now, room)
        return self.targets

    def _order(self, role: str, want: tuple[int, int], now: float, room: Room) -> None:
        """Let the pool have the workers it wants: by changes of role, else by starts."""
        pool, (up, down) = self._pools[role], want
        lacks = pool.lacks(up, now)
        if lacks and room.turns:
            self._turn(role, lacks, now, full=not room.fits(self._with(role, pool.target + 1)))
        before = fitting = pool.target
        while fitting < up and room.fits(self._with(role, fitting + 1)):
            fitting += 1
        if pool.want(min(up, fitting), down, now) > before and self._turned == role:
            self._turned = ""  # a worker starts too, and decides when the pool is complete

    def _turn(self, role: str, lacks: int, now: float, *, full: bool) -> None:
        """Take spare workers of the other pool, if that is better than to start some."""
        (other,) = set(ROLES) - {role}
        slow = self._cold[role].seconds > MUCH_FASTER * self._turns.seconds
        count = min(lacks, self._pools[other].spare(now, self._settings.spare))
        if not count or not (full or slow):
            return
        pool, giver = self._pools[role], self._pools[other]
        reason = (
            "no further worker has room"
            if full
            else (f"a start takes {self._cold[role].seconds:.0f} s")
        )
        self.why = (
            f"{role} needs {pool.target + lacks} workers and has {pool.target}, {reason}, and "
            f"{other} needed {giver.target - count} of {giver.target} in the last "
            f"{self._settings.spare:.0f} s"
        )
        giver.release(count, now)
        pool.take(count, now)
        self._turned = role

    def _with(self, role: str, size: int) -> dict[str, int]:
        return {**self.targets, role: size}

    def _see(
        self, role: str, metrics: Metrics, workers: list[WorkerSample], now: float, room: Room
    ) -> tuple[int, int] | None:
        """Record the pool's state. Returns how many workers it needs, and how many suffice."""
        pool, settings = self._pools[role], self._settings
        cold = self._cold[role]
        turned = self._turned == role
        (self._turns if turned else cold).see(len(workers), pool.target, now)
        if turned and len(workers) >= pool.target:
            self._turned = ""
        if role == "prefill":
            self._prefill.see(metrics.routers, workers, now)
            self._encoders.see(metrics.routers, workers, now)
        else:
            self._decode.see(workers, now)
            self._pictures.see(metrics.routers, workers, now)
        demand = self._demand(role)
        most = settings.bounds.most(role)
        # Limited, because a worker may wait hours for a host, and no trend reaches that far ahead.
        soon = cold.seconds
        if room.turns and not room.fits(self._with(role, pool.target + 1)):
            soon = max(LATE_S, self._turns.seconds)
        ahead = min(soon, settings.window / 2)
        up = demand.needed(settings.up_margin, ahead, most)
        down = demand.needed(settings.down_margin, ahead, most, spare=True)
        if up is None or down is None:
            return None
        if isinstance(demand, QueueDemand):
            if not demand.lasting(pool.target, ahead):
                up = min(up, pool.target)
            coming = len(workers) < pool.target
            up = max(up, demand.behind(pool.target, ahead, most, coming=coming))
            down = max(down, up)
        if self._misses(role, len(workers), pool.target, now):
            # At most twice the calculated number, so that a hanging pool does not grow forever.
            up = max(up, min(len(workers) + 1, 2 * up))
            down = max(down, up)
        return up, down

    def _demand(self, role: str) -> QueueDemand | DecodeDemand:
        if role == "prefill":
            return self._encoders if self._draws else self._prefill
        return self._pictures if self._draws else self._decode

    def _misses(self, role: str, ready: int, target: int, now: float) -> bool:
        """Whether the pool has missed its limit for ``LATE_S`` while no worker was starting."""
        demand = self._demand(role)
        if isinstance(demand, QueueDemand):
            excess = demand.wait(ready) - demand.limit()
            late = excess > 0
        else:
            excess = self._decode.step_s - self._settings.slo_itl
            late = self._decode.can_keep() and excess > 0
        if not late or ready < target:
            self._late[role] = None
            return False
        since, then = self._late[role] or (now, excess)
        if isinstance(demand, QueueDemand) and excess < then:
            since, then = now, excess  # the pool is catching up
        self._late[role] = since, then
        return now - since >= LATE_S


class Governor:
    """One pool's target, from ``least`` to ``most``. ``calm_s``: stabilization window in seconds.

    Invariants: the target lies within the bounds. The target falls only to a number that was
    enough during the whole last window, and at the earliest one window after it last rose. If the
    target rises within ``calm_s`` of a fall, or the pool lacks workers within that time, the fall
    was a mistake, and the window doubles for the next fall. So on average the target changes
    direction at most once per window.

    A change of role moves a worker between two pools: :meth:`release` and :meth:`take`.
    """

    def __init__(self, least: int, most: int, calm_s: float, target: int) -> None:
        self._least, self._most = least, most
        self._calm = self._patience = calm_s
        # Times and wanted numbers, in falling order: each is the maximum of all later numbers.
        self._wanted: deque[tuple[float, int]] = deque()
        self._since: float | None = None  # start of the record without gaps
        self._rose_at = self._fell_at = -math.inf
        self._early = False  # workers were missed soon after the last fall
        self._up = 0
        self.target = self._bounded(target)

    def adopt(self, target: int, now: float) -> None:
        """Set an operator's target. It falls no further within the stabilization window."""
        self.target = self._bounded(target)
        self._rose_at = now
        self.hold()

    def hold(self) -> None:
        """Restart the stabilization window, because no observation is usable now."""
        self._wanted.clear()
        self._since = None

    def want(self, up: int, down: int, now: float) -> int:
        """Update and return the target.

        ``up``: the pool must have at least this many workers. ``down``: this many workers are
        enough with a safety margin.
        """
        self._up = up
        if self._since is None:
            self._since = now
        while self._wanted and self._wanted[-1][1] <= down:
            self._wanted.pop()
        self._wanted.append((now, down))
        while self._wanted[0][0] < now - self._patience:
            self._wanted.popleft()
        if self._bounded(up) > self.target:
            self._rise(self._bounded(up), now)
        elif now - max(self._since, self._rose_at) >= self._patience:
            lower = self._bounded(max(up, self._wanted[0][1]))
            if lower < self.target:
                self._fall(lower, now)
        return self.target

    def lacks(self, up: int, now: float) -> int:
        """Return how many workers are missing if at least ``up`` are needed."""
        lacks = max(0, self._bounded(up) - self.target)
        if lacks and now - self._fell_at < self._calm:
            self._early = True
        return lacks

    def spare(self, now: float, seconds: float) -> int:
        """Return how many workers were never needed in the last ``seconds`` and may leave now.

        None may leave in the stabilization window after the target last rose.
        """
        calm = now - self._rose_at >= self._patience
        if self._since is None or now - self._since < seconds or not calm:
            return 0
        needed = max((number for at, number in self._wanted if at >= now - seconds), default=0)
        return max(0, self.target - self._bounded(max(needed, self._up)))

    def release(self, count: int, now: float) -> None:
        """Give spare workers to the other pool."""
        self._fall(self.target - count, now)

    def take(self, count: int, now: float) -> None:
        """Take workers of the other pool."""
        self._rise(self.target + count, now)

    def _fall(self, target: int, now: float) -> None:
        self.target, self._fell_at, self._early = target, now, False

    def _rise(self, target: int, now: float) -> None:
        if self._fell_at > self._rose_at:  # else the target has not fallen since it last rose
            early = self._early or now - self._fell_at < self._calm
            longer = min(2 * self._patience, MOST_PATIENCE * self._calm)
            self._patience = longer if early else self._calm
        self.target, self._rose_at, self._early = target, now, False

    def _bounded(self, target: int) -> int:
        return min(max(target, self._least), self._most)


class ColdStart:
    """Mean seconds from an order for a worker to the worker's first report, as a moving average.

    ``seconds``: first estimate.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._short_since: float | None = None

    def see(self, ready: int, target: int, now: float) -> None:
        """Record the number of ready workers and the target."""
        if ready >= target:
            if self._short_since is not None:
                self.seconds += 0.5 * (now - self._short_since - self.seconds)
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now


def usable(metrics: Metrics, role: str) -> list[WorkerSample] | None:
    """Return the pool's ready workers, or None if the data of any of them is unusable."""
    ready = [worker for worker in metrics.workers if worker.role == role and worker.ready]
    return ready if all(worker.usable for worker in ready) else None
