"""The router's record of one worker, the states of a worker, and when it is suspect or dead.

A worker is *ready* (or draining), *suspect* or *dead*. A suspect worker has a closed connection, or
shows no heartbeat or no progress. It gets no new requests, and may return with the same
incarnation. A worker is dead after the worker timeout, or when a successor takes its name.

Invariant of :class:`WorkerHealth`: a pause of this process is never a worker's fault, and a router
without messages from any worker first suspects its own network. Pure: the caller passes the workers
and the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from baton.proto.errors import InternalError
from baton.proto.layout import ModelCard
from baton.proto.requests import computes_prompts
from baton.proto.wire.messages import ExtensionCounts, Hello, RequestState, WorkerLoad
from baton.proto.wire.proofs import Holder
from baton.runtime.liveness import suspect_after
from baton.runtime.metrics.families import STEP_SECONDS

from .config import RouterConfig
from .latency import Latency

if TYPE_CHECKING:
    from .requests import Request

NO_HEARTBEAT = "no heartbeat"
CONNECTION_CLOSED = "its connection closed"
SILENCES = (NO_HEARTBEAT, CONNECTION_CLOSED)
"""Reasons for a worker's death that this router's own network could explain."""
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


NEW = 0.25
"""Weight of the latest report in :attr:`Worker.added_s`."""


class WorkerState(Enum):
    """State of a worker; :data:`WORKER_TRANSITIONS` has the legal changes."""

    JOINING = "joining"  # sent Hello, not checked yet
    READY = "ready"
    DRAINING = "draining"  # finishes its requests, gets no new ones
    SUSPECT = "suspect"  # silent, stuck or disconnected; returns, or is declared dead
    REFUSED = "refused"  # rejected, since it serves another model
    DEAD = "dead"

    __hash__ = object.__hash__


WORKER_TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.JOINING: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.REFUSED}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.SUSPECT}),
    WorkerState.DRAINING: frozenset({WorkerState.SUSPECT}),
    WorkerState.SUSPECT: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.DEAD}),
    WorkerState.REFUSED: frozenset(),
    WorkerState.DEAD: frozenset(),
}


_LIVE = frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.SUSPECT})


@dataclass(slots=True, frozen=True)
class WorkerCaller:
    """What a worker's connection proves: its key, and whether the key list spells out its name."""

    key: bytes = b""
    vouched: bool = False


NO_KEY = WorkerCaller()
"""A worker at a socket without keys."""


class Worker:
    """One incarnation of a worker.

    ``outstanding``: unfinished tokens assigned by this router. ``uncached``, ``late``, ``prompts``:
    uncached tokens of the prompts that it has still to compute, those of late prompts, and their
    number, of this router in mode adaptive; ``turned``: when the last of them left. ``others``,
    ``others_requests``: tokens and requests of other routers, from the last heartbeat.
    ``stream_step_s``: its last reported step without prompt tokens; ``added_s``: by how much a
    prompt token makes the steps of its streams longer, -1: not measured; ``local_s``: seconds per
    prompt token of steps with streams. ``recent``: recently assigned tokens, as of the policy's
    placement number ``recent_at``. ``requests``: requests whose current attempt needs this worker.
    ``reported``: requests listed in its last Hello. ``aborts``: unconfirmed Aborts by request:
    ``(attempt, time to repeat, time to give up)``. ``connected``: its connection is open.
    ``draining``: it takes no new requests, also after it was suspect. ``doubted``: requests that
    moved when its connection closed; if it is declared dead, they count this death. ``latency``:
    TTFT of a prefill worker, ITL of a decode worker. ``dropped``: counts of messages dropped by the
    worker, by reason. ``extensions``: calls of users' classes in it. ``holder``: its incarnation
    and key. ``vouched``: the key list names this worker literally, so no other key may use its
    name. ``computes_prompts``: it is a decode worker that serves requests without a prefill worker.
    """

    __slots__ = (
        "aborts",
        "added_s",
        "busy",
        "card",
        "computes_prompts",
        "connected",
        "device",
        "doubted",
        "drain_at",
        "draining",
        "dropped",
        "endpoint",
        "extensions",
        "finished",
        "holder",
        "hung_up",
        "id",
        "identity",
        "incarnation",
        "kv_events",
        "labels",
        "late",
        "latency",
        "load",
        "local_s",
        "max_batch",
        "others",
        "others_requests",
        "outstanding",
        "pid",
        "pool",
        "progress",
        "progress_at",
        "prompts",
        "reason",
        "recent",
        "recent_at",
        "reported",
        "requests",
        "role",
        "seal",
        "seen_at",
        "shared_weights",
        "state",
        "step_s",
        "stream_step_s",
        "turned",
        "uncached",
        "vouched",
    )  # fmt: skip

    def __init__(
        self, identity: bytes, hello: Hello, now: float, caller: WorkerCaller = NO_KEY
    ) -> None:
        self.identity = identity
        self.holder = Holder(hello.incarnation, caller.key)
        self.vouched = caller.vouched
        self.id = hello.worker
        self.role = hello.role
        self.incarnation = hello.incarnation
        self.pid = hello.pid
        self.endpoint = hello.endpoint
        self.pool = hello.pool
        self.card: ModelCard = hello.model
        self.computes_prompts = self.role == "decode" and computes_prompts(self.card)
        self.max_batch = hello.max_batch
        self.device = hello.device
        self.seal = hello.seal
        self.shared_weights = hello.shared_weights
        self.labels = hello.labels
        self.kv_events = hello.kv_events
        self.load: WorkerLoad = hello.load
        self.dropped: dict[str, int] = {}
        self.extensions: list[ExtensionCounts] = []
        self.latency = Latency()
        self.state = WorkerState.JOINING
        self.reason = ""
        self.seen_at = self.progress_at = now
        self.progress = -1
        self.busy = False
        self.step_s = self.stream_step_s = 0.0
        self.added_s = -1.0
        self.local_s = 0.0
        self.outstanding = self.uncached = self.late = self.prompts = 0
        self.turned = now
        self.others = self.others_requests = 0
        self.recent = 0.0
        self.recent_at = 0
        self.requests: dict[bytes, Request] = {}
        self.reported: dict[bytes, RequestState] = {r.request: r for r in hello.requests}
        self.aborts: dict[bytes, tuple[int, float, float]] = {}
        self.drain_at = float("inf")  # when to repeat an operator's Drain
        self.finished = False  # it was drained and has no requests left
        self.connected = True
        self.hung_up = False  # the process closed the connection, so it has probably ended
        self.draining = hello.draining
        self.doubted: list[Request] = []

    def has(self, features: Sequence[str]) -> bool:
        """Return whether the worker reads these parameters of requests."""
        return all(feature in self.card.features for feature in features)

    def enter(self, state: WorkerState, reason: str = "") -> None:
        """Change state; raises InternalError for a change that is not in the table."""
        if state not in WORKER_TRANSITIONS[self.state]:
            raise InternalError(f"worker cannot go from {self.state.value} to {state.value}")
        self.state = state
        self.reason = reason

    def report(self, load: WorkerLoad, router: str) -> None:
        """Store the worker's load; ``router``: name of this router."""
        if self.role == "decode" and load.prompt_tokens > self.load.prompt_tokens:
            self._learn_added(self.load, load)
        self.load = load
        others = [share for name, share in load.shares.items() if name != router]
        self.others = sum(share.tokens for share in others)
        self.others_requests = sum(share.requests for share in others)

    def _learn_added(self, before: WorkerLoad, load: WorkerLoad) -> None:
        """Learn by how much the prompt tokens of the last steps made them longer."""
        steps = _steps(load) - _steps(before)
        streamed = load.generated_tokens - before.generated_tokens
        if not self.stream_step_s or steps <= 0 or streamed < steps:
            return  # nothing to compare with, or steps without a stream
        seconds = load.compute_seconds - before.compute_seconds
        seconds -= load.encode_seconds - before.encode_seconds
        tokens = load.prompt_tokens - before.prompt_tokens
        added = max(0.0, seconds - steps * self.stream_step_s) / tokens
        known = self.added_s
        self.added_s = added if known < 0 else known + NEW * (added - known)
        if before.tokens_waiting and load.tokens_waiting:  # each of the steps had a chunk
            each, known = seconds / tokens, self.local_s
            self.local_s = each if not known else known + NEW * (each - known)

    @property
    def key(self) -> bytes:
        """CURVE key (z85) with which the worker registered; empty without keys."""
        return self.holder.key

    @property
    def burden(self) -> int:
        """Outstanding tokens of all routers."""
        return self.outstanding + self.others

    @property
    def live(self) -> bool:
        """True if the worker is registered: it may hold requests and receive messages."""
        return self.state in _LIVE


def _steps(load: WorkerLoad) -> int:
    """Return the number of steps since the worker's start."""
    found = load.histograms.get(STEP_SECONDS)
    return sum(found.counts) if found is not None else 0


def roles_for(task: str) -> tuple[str, ...]:
    """Return the roles that a task needs; embeddings need no decode worker."""
    return ("prefill",) if task == "embed" else ("prefill", "decode")


def last_worker(name: str, role: str) -> str:
    """Return the error message for operators: the worker is the last ready one of its role."""
    return (
        f"{role} must keep at least 1 ready worker, and {name} is the last: add another "
        f"(baton scale {role}=2), or drain it anyway (--force)"
    )


# --------------------------------------------------------------------------- health


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
