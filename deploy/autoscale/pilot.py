"""The autoscaler in a controller: turns the routers' reports into targets, once a second.

Pure. If an operator or the controller changes a target, the autoscaler adopts the new target in
its next decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ..config import ServeSettings
from ..controller.core import ControllerCore
from ..controller.events import Measured
from ..plan.bounds import Bounds
from ..plan.plan import router_names
from ..report import ClusterReport, WorkerReport
from .metrics import ROLES, STALE_S, Metrics, RouterSample, WorkerSample
from .policy import ANY_ROOM, Autoscaler, Room
from .settings import ScaleSettings

EVERY_S = 1.0
SPARE = 0.2
"""Share of the stabilization window in which a worker must be spare before its role changes."""
WINDOW_S = 300.0
"""Maximum history in seconds. A shorter stabilization window shortens the history."""


def scale_settings(settings: ServeSettings, bounds: Bounds) -> ScaleSettings:
    """Make the policy's settings from the operator's settings."""
    return ScaleSettings(
        slo_ttft=settings.slo_ttft,
        slo_itl=settings.slo_itl,
        bounds=bounds,
        calm=settings.stabilization_window,
        window=min(WINDOW_S, settings.stabilization_window),
        spare=SPARE * settings.stabilization_window,
    )


class Pilot:
    """Collects reports and decides targets.

    ``routers``: names of all routers. While any router's report is missing or old, the targets
    stay.
    """

    def __init__(
        self, settings: ScaleSettings, routers: Iterable[str], targets: Mapping[str, int]
    ) -> None:
        self._scaler = Autoscaler(settings, targets)
        self._reports: dict[str, tuple[float, ClusterReport] | None] = dict.fromkeys(routers)
        self._next = -math.inf

    def reported(self, router: str, report: ClusterReport, now: float) -> None:
        """Store a router's report."""
        self._reports[router] = (now, report)

    def decide(
        self, targets: Mapping[str, int], now: float, room: Room = ANY_ROOM
    ) -> Measured | None:
        """Return new targets to replace ``targets``, or None to keep them."""
        if now < self._next:
            return None
        self._next = now + EVERY_S
        ours = self._scaler.targets
        changed = {role: targets[role] for role in ROLES if targets[role] != ours[role]}
        if changed:
            self._scaler.adopt(changed, now)
        decided = self._scaler.observe(self._metrics(now), now, room)
        if all(decided[role] == targets[role] for role in ROLES):
            return None
        return Measured(decided, self._scaler.why)

    def pause(self, now: float) -> None:
        """Skip observations while another operation, such as a rollout, changes the cluster."""
        self._scaler.observe(Metrics(), now)

    def _metrics(self, now: float) -> Metrics:
        """Merge the reports. Empty if any router's report is missing or old."""
        reports: dict[str, ClusterReport] = {}
        for name, report in self._reports.items():
            if report is None or now - report[0] > STALE_S:
                return Metrics()
            reports[name] = report[1]
        return metrics_of(reports)


def metrics_of(reports: Mapping[str, ClusterReport]) -> Metrics:
    """Merge the routers' reports. For each worker, use the report with the latest heartbeat."""
    workers: dict[str, WorkerReport] = {}
    for report in reports.values():
        for worker in report.workers:
            known = workers.get(worker.id)
            if known is None or worker.heard_s_ago < known.heard_s_ago:
                workers[worker.id] = worker
    return Metrics(
        workers=tuple(_worker(worker) for worker in workers.values()),
        routers=tuple(_router(name, report) for name, report in reports.items()),
    )


def _router(name: str, report: ClusterReport) -> RouterSample:
    router = report.router
    return RouterSample(
        name=name,
        life=0.0,  # not needed: after a restart the counters fall
        submitted=router.requests.submitted,
        started_tokens=router.prompt_tokens,
        queued_tokens=router.queued_tokens,
        image_tokens=router.image_tokens,
        queued_image_tokens=router.queued_image_tokens,
        encoder_tokens=router.encoder_tokens,
        queued_encoder_tokens=router.queued_encoder_tokens,
        picture_rows=router.picture_rows,
        queued_rows=router.queued_picture_rows,
    )


def _worker(worker: WorkerReport) -> WorkerSample:
    return WorkerSample(
        name=worker.id,
        role=worker.role,
        incarnation=worker.incarnation,
        ready=worker.state == "ready",
        heard_s_ago=worker.heard_s_ago,
        tokens_waiting=worker.tokens_waiting,
        kv_used=worker.kv_blocks_used,
        kv_total=worker.kv_blocks_total,
        running=worker.requests_running,
        waiting=worker.requests_waiting,
        prompt_tokens=worker.prompt_tokens,
        cached_tokens=worker.prefix_hit_tokens,
        compute_seconds=worker.compute_seconds,
        encode_seconds=worker.encode_seconds,
        image_tokens=worker.image_tokens,
        encoder_tokens=worker.encoder_tokens,
        step_rows=worker.step_rows,
        step_s=worker.step_s,
    )


def pilot_of(core: ControllerCore, settings: ServeSettings) -> Pilot | None:
    """Make the autoscaler of this controller, or return None if the settings disable it."""
    if settings.autoscale != "on":
        return None
    judged = scale_settings(settings, core.bounds)
    return Pilot(judged, router_names(settings), core.pools.targets)
