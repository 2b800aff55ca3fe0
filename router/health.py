"""When a worker is suspect or dead.

Invariant: a pause of this process is never a worker's fault, and a router without messages from any
worker first suspects its own network. Pure: the caller passes the workers and the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from baton.runtime.liveness import suspect_after

from .config import RouterConfig
from .records import Worker
from .states import CONNECTION_CLOSED, NO_HEARTBEAT, WorkerState

ALL_SILENT_FACTOR = 6
"""Factor of the worker timeout while all workers are silent.

Then this router is probably cut off, and no other worker could take their requests."""
REUNION_S = 2.0
"""Seconds for which :data:`ALL_SILENT_FACTOR` still applies after the first worker is back.

All workers reconnect, but not at the same moment."""
STALL_S = 0.25
"""A longer gap between two :meth:`WorkerHealth.look` calls is a pause of this process.

Workers may have closed their connections during the pause."""
AFTER_STALL_S = 1.0
"""Seconds after such a pause in which no worker becomes suspect."""


class WorkerHealth:
    """Judges workers by the seconds since their last heartbeat and since their last progress."""

    def __init__(self, config: RouterConfig, now: float) -> None:
        self._config = config
        self._looked_at = now
        self._excused_until = now
        self._alone_until = now  # all workers are silent, or were until recently

    def look(self, workers: Iterable[Worker], now: float) -> None:
        """Detect pauses of this process; call many times per second."""
        if now - self._looked_at > STALL_S:
            self._excuse(workers, now)
        self._looked_at = now

    def excused(self, now: float) -> bool:
        """True if this process paused, so that a lost connection is not the worker's fault."""
        return now < self._excused_until or now - self._looked_at > STALL_S

    def _excuse(self, workers: Iterable[Worker], now: float) -> None:
        """Give every worker :data:`AFTER_STALL_S` to send a heartbeat."""
        self._excused_until = now + AFTER_STALL_S
        for worker in workers:
            seen = now + AFTER_STALL_S - self._config.worker_timeout_s
            worker.seen_at = max(worker.seen_at, seen)
            progress = now + AFTER_STALL_S - self._hang_s(worker)
            worker.progress_at = max(worker.progress_at, progress)

    def doubtful(self, workers: Iterable[Worker], now: float) -> list[tuple[Worker, str]]:
        """Return the workers that become suspect now, each with the reason."""
        if now < self._excused_until:
            return []
        found = []
        after = suspect_after(self._config.worker_timeout_s)
        for worker in workers:
            if worker.state is WorkerState.SUSPECT:
                continue
            stuck = self._stuck(worker, now)
            if now - worker.seen_at > after:
                found.append((worker, f"{NO_HEARTBEAT} for {now - worker.seen_at:.1f} s"))
            elif stuck > self._suspect_s(worker):
                found.append((worker, f"no progress for {stuck:.1f} s"))
        return found

    def failing(self, workers: Collection[Worker], now: float) -> list[tuple[Worker, str]]:
        """Return the live workers whose worker timeout has passed, each with the reason."""
        found = []
        timeout = self._config.worker_timeout_s
        after = suspect_after(timeout)
        silences = [now - worker.seen_at for worker in workers]
        if min(silences, default=0.0) > after:
            self._alone_until = now + REUNION_S
        alone = now < self._alone_until
        for worker in workers:
            silent, stuck = now - worker.seen_at, self._stuck(worker, now)
            factor = ALL_SILENT_FACTOR if alone and not worker.hung_up else 1
            if silent > timeout * factor:
                reason = NO_HEARTBEAT if worker.connected else CONNECTION_CLOSED
                found.append((worker, f"{reason}, silent for {silent:.1f} s"))
            elif stuck > self._hang_s(worker) and silent <= after:
                found.append((worker, f"no progress for {stuck:.1f} s"))
        return found

    def overdue(self, worker: Worker, now: float) -> float:
        """Return the seconds for which a worker without heartbeat or progress has been suspect."""
        silent = now - worker.seen_at - suspect_after(self._config.worker_timeout_s)
        return max(silent, self._stuck(worker, now) - self._suspect_s(worker))

    def progresses(self, worker: Worker, now: float) -> bool:
        """True if the worker is idle, or has made progress recently."""
        return self._stuck(worker, now) < self._suspect_s(worker)

    @staticmethod
    def _stuck(worker: Worker, now: float) -> float:
        """Return the seconds without progress of a busy worker, else 0."""
        return now - worker.progress_at if worker.busy else 0.0

    def _suspect_s(self, worker: Worker) -> float:
        """Return the seconds without progress after which a busy worker is suspect."""
        after = suspect_after(self._config.worker_timeout_s)
        return max(after, self._config.slow_step_factor * worker.step_s)

    def _hang_s(self, worker: Worker) -> float:
        """Return the seconds without progress after which a busy worker is declared dead."""
        timeout = self._config.worker_timeout_s
        return max(timeout, self._config.slow_step_factor * worker.step_s)
