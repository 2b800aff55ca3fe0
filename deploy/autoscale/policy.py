"""The autoscaler: ``observe(metrics, now) -> targets``.

Pure: no clock, no socket; equal observations give equal targets. Prefill is sized by the work
that came and the time to the first token it would have had (:mod:`.prefill`), decode by KV blocks
and the length of steps (:mod:`.decode`). A target is the number of workers there should be, not a
number to add, so what already starts is never ordered again.

What cannot be true, is too old or is missing moves nothing: a pool of which one ready worker says
nothing usable keeps its target, and the time in which it may not shrink begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .decode import DecodeDemand
from .governor import Governor
from .metrics import ROLES, Metrics, WorkerSample
from .prefill import PrefillDemand
from .settings import ScaleSettings

LATE_S = 15.0
"""A pool that misses its limit for so long, with nobody starting, has one worker too few."""


class Autoscaler:
    """Targets of both pools; ``first``: what they are now."""

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
        self._cold = {role: ColdStart(settings.cold_start) for role in ROLES}
        self._late: dict[str, tuple[float, float] | None] = dict.fromkeys(ROLES)
        self._now = -math.inf

    @property
    def targets(self) -> dict[str, int]:
        """As decided last."""
        return {role: pool.target for role, pool in self._pools.items()}

    def adopt(self, targets: Mapping[str, int], now: float) -> None:
        """An operator set these targets."""
        for role, target in targets.items():
            self._pools[role].adopt(target, now)

    def observe(self, metrics: Metrics, now: float) -> dict[str, int]:
        """Note how the cluster stands at ``now`` (monotonic seconds) and decide."""
        if not math.isfinite(now) or now <= self._now:
            return self.targets
        self._now = now
        seen = {role: usable(metrics, role) for role in ROLES}
        routers = metrics.routers
        if not routers or not all(router.usable for router in routers):
            seen = dict.fromkeys(ROLES)
        for role, workers in seen.items():
            if workers:
                self._see(role, metrics, workers, now)
            else:
                self._pools[role].hold()
                self._late[role] = None
        return self.targets

    def _see(self, role: str, metrics: Metrics, workers: list[WorkerSample], now: float) -> None:
        pool, settings = self._pools[role], self._settings
        cold = self._cold[role]
        cold.see(len(workers), pool.target, now)
        if role == "prefill":
            self._prefill.see(metrics.routers, workers, now)
        else:
            self._decode.see(workers, now)
        demand = self._prefill if role == "prefill" else self._decode
        most = settings.bounds.most(role)
        # A worker that waits for a host for hours is no cold start: nothing is foreseen so far.
        ahead = min(cold.seconds, settings.window / 2)
        up = demand.needed(settings.up_margin, ahead, most)
        down = demand.needed(settings.down_margin, ahead, most, spare=True)
        if up is None or down is None:
            pool.hold()
            return
        if role == "prefill":
            if not self._prefill.lasting(pool.target, ahead):
                up = min(up, pool.target)
            coming = len(workers) < pool.target
            up = max(up, self._prefill.behind(pool.target, ahead, most, coming=coming))
            down = max(down, up)
        if self._misses(role, len(workers), pool.target, now):
            # At most twice of what the figures explain: a pool that hangs must not grow for ever.
            up = max(up, min(len(workers) + 1, 2 * up))
            down = max(down, up)
        pool.want(up, down, now)

    def _misses(self, role: str, ready: int, target: int, now: float) -> bool:
        """Whether the pool misses its limit for a while although nobody is on the way."""
        if role == "prefill":
            excess = self._prefill.wait(ready) - self._settings.slo_ttft
            late = excess > 0
        else:
            excess = self._decode.step_s - self._settings.slo_itl
            late = self._decode.can_keep() and excess > 0
        if not late or ready < target:
            self._late[role] = None
            return False
        since, then = self._late[role] or (now, excess)
        if role == "prefill" and excess < then:
            since, then = now, excess  # what is late already is being done
        self._late[role] = since, then
        return now - since >= LATE_S


class ColdStart:
    """Seconds from an order to its worker's first report, measured when only one is on its way."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._short_since: float | None = None

    def see(self, ready: int, target: int, now: float) -> None:
        """So many are ready of so many wanted."""
        if ready >= target:
            if self._short_since is not None:
                self.seconds += 0.5 * (now - self._short_since - self.seconds)
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now


def usable(metrics: Metrics, role: str) -> list[WorkerSample] | None:
    """The pool's ready workers, None when one of them says nothing that can be used."""
    ready = [worker for worker in metrics.workers if worker.role == role and worker.ready]
    return ready if all(worker.usable for worker in ready) else None
