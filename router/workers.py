"""The registered workers and their states.

A worker is *ready* (or draining), *suspect* or *dead*. A suspect worker has a closed connection, or
shows no heartbeat or no progress. It gets no new requests, and may return with the same
incarnation. A worker is dead after the worker timeout, or when a successor takes its name.

Invariants: a name belongs to one live worker, and a healthy worker keeps its name. An incarnation
that was declared dead returns only if another router served it all the time. Then this router was
cut off, and its replays have higher attempt numbers. All live workers serve one model.

Pure: derives the states from messages and the time. :mod:`.recovery` acts on the requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

from ..proto.errors import (
    EndpointDead,
    EndpointDraining,
    EndpointUnknown,
    InputError,
    InternalError,
    ModelMismatch,
    NameTaken,
    ProtocolError,
)
from ..proto.layout import ModelCard
from ..proto.wire.endpoints import check_endpoint
from ..proto.wire.messages import Heartbeat, Hello, RequestState, WorkerLoad
from ..proto.wire.versions import check_version
from ..runtime.liveness import closed_by_peer, suspect_after
from .latency import Latency

if TYPE_CHECKING:
    from .config import RouterConfig
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
KEEP_GONE = 64
"""Maximum number of dead and refused workers in the list."""
KEEP_DEAD_INCARNATIONS = 4096
STALL_S = 0.25
"""A longer gap between two :meth:`Registry.look` calls is a pause of this process.

Workers may have closed their connections during the pause."""
AFTER_STALL_S = 1.0
"""Seconds after such a pause in which no worker becomes suspect."""


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


class Worker:
    """One incarnation of a worker.

    ``outstanding``: unfinished tokens assigned by this router. ``others``, ``others_requests``:
    tokens and requests of other routers, from the last heartbeat. ``recent``: recently assigned
    tokens, as of the policy's placement number ``recent_at``. ``requests``: requests whose current
    attempt needs this worker. ``reported``: requests listed in its last Hello. ``aborts``:
    unconfirmed Aborts by request: ``(attempt, time to repeat, time to give up)``. ``connected``:
    its connection is open. ``draining``: it takes no new requests, also after it was suspect.
    ``doubted``: requests that moved when its connection closed; if it is declared dead, they count
    this death. ``latency``: TTFT of a prefill worker, ITL of a decode worker. ``dropped``: counts
    of messages dropped by the worker, by reason.
    """

    __slots__ = (
        "aborts", "busy", "card", "connected", "doubted", "drain_at", "draining", "dropped",
        "endpoint", "finished", "hung_up", "id",
        "identity", "incarnation", "latency", "load", "max_batch", "others", "others_requests",
        "outstanding", "pid", "pool",
        "progress", "progress_at", "reason", "recent", "recent_at", "reported", "requests",
        "role", "seen_at", "state", "step_s",
    )  # fmt: skip

    def __init__(self, identity: bytes, hello: Hello, now: float) -> None:
        self.identity = identity
        self.id = hello.worker
        self.role = hello.role
        self.incarnation = hello.incarnation
        self.pid = hello.pid
        self.endpoint = hello.endpoint
        self.pool = hello.pool
        self.card: ModelCard = hello.model
        self.max_batch = hello.max_batch
        self.load: WorkerLoad = hello.load
        self.dropped: dict[str, int] = {}
        self.latency = Latency()
        self.state = WorkerState.JOINING
        self.reason = ""
        self.seen_at = self.progress_at = now
        self.progress = -1
        self.busy = False
        self.step_s = 0.0
        self.outstanding = 0
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

    def enter(self, state: WorkerState, reason: str = "") -> None:
        """Change state; raises InternalError for a change that is not in the table."""
        if state not in WORKER_TRANSITIONS[self.state]:
            raise InternalError(f"worker cannot go from {self.state.value} to {state.value}")
        self.state = state
        self.reason = reason

    def report(self, load: WorkerLoad, router: str) -> None:
        """Store the worker's load; ``router``: name of this router."""
        self.load = load
        others = [share for name, share in load.shares.items() if name != router]
        self.others = sum(share.tokens for share in others)
        self.others_requests = sum(share.requests for share in others)

    @property
    def burden(self) -> int:
        """Outstanding tokens of all routers."""
        return self.outstanding + self.others

    @property
    def live(self) -> bool:
        """True if the worker is registered: it may hold requests and receive messages."""
        return self.state in _LIVE


class Registry:
    """All live and recently dead workers."""

    def __init__(self, config: RouterConfig, now: float) -> None:
        self._config = config
        self._looked_at = now
        self._excused_until = now
        self._alone_until = now  # all workers are silent, or were until recently
        self._by_identity: dict[bytes, Worker] = {}
        self._others: int | None = None  # cache, cleared by each heartbeat
        self._live: dict[str, Worker] = {}  # by endpoint
        self._gone: OrderedDict[str, Worker] = OrderedDict()  # dead or refused, by worker id
        self._dead_incarnations: OrderedDict[int, bool] = OrderedDict()  # True: for SILENCES
        self._ready: dict[tuple[str, str | None], list[Worker]] = {}
        self.card: ModelCard | None = None
        """Card of the served model, with the shortest context length of all live workers."""
        self.ever_ready = False
        self.slots = 0
        """Batch slots of all live decode workers that are not draining."""
        self.prefills = 0
        """Number of live prefill workers that are not draining."""
        self.reporting: list[Worker] = []
        """Live workers whose last Hello lists requests."""

    # ------------------------------------------------------------------ look up

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the workers that the served model needs."""
        return roles_for("generate" if self.card is None else self.card.task)

    def by_identity(self, identity: bytes) -> Worker | None:
        """Return the worker of a connection, or None before its Hello."""
        return self._by_identity.get(identity)

    def named(self, name: str) -> Worker:
        """Return a live worker by id or endpoint; raises EndpointDead or EndpointUnknown."""
        worker = self.find(name)
        if worker is not None:
            return worker
        for gone in self._gone.values():
            if name in (gone.id, gone.endpoint):
                raise EndpointDead(f"worker {gone.id} is {gone.state.value}: {gone.reason}")
        known = ", ".join(sorted(worker.id for worker in self._live.values())[:8])
        raise EndpointUnknown(f"no worker {name[:80]!r}; workers: {known or 'none'}")

    def find(self, name: str) -> Worker | None:
        """Return a live worker by id or endpoint, or None."""
        worker = self._live.get(name)
        if worker is not None:
            return worker
        return next((w for w in self._live.values() if w.id == name), None)

    def live(self) -> list[Worker]:
        """Return all live workers."""
        return list(self._live.values())

    def listed(self) -> list[Worker]:
        """Return the live workers, then dead and refused workers that were not replaced."""
        return [*self._live.values(), *self._gone.values()]

    def ready(self, role: str, pool: str | None = None) -> list[Worker]:
        """Return the workers of ``role`` (and pool) that take new requests."""
        found = self._ready.get((role, pool))
        if found is None:
            found = [
                worker
                for worker in self._live.values()
                if worker.state is WorkerState.READY
                and worker.role == role
                and pool in (None, worker.pool)
            ]
            if found or pool is None:  # unbounded otherwise: clients choose pool names
                self._ready[role, pool] = found
        return found

    @property
    def others(self) -> int:
        """Requests of other routers on ready decode workers (for embeddings: prefill workers)."""
        if self._others is None:
            ready = self.ready(self.roles[-1])
            self._others = sum(worker.others_requests for worker in ready)
        return self._others

    def check_pool(self, pool: str | None) -> None:
        """Raise InputError for an unknown pool while the cluster can serve requests."""
        if pool is None or not all(self.ready(role) for role in self.roles):
            return
        pools = {worker.pool for worker in self.listed()}
        if pool not in pools:
            known = ", ".join(sorted(pools)[:8])
            raise InputError(f"no worker is in pool {pool!r}; pools: {known}")

    def resolve(self, endpoint: str) -> Worker:
        """Return the worker of a ``target_endpoint``.

        Raises EndpointUnknown, EndpointDead or EndpointDraining.
        """
        worker = self._live.get(endpoint)
        if worker is not None:
            if worker.hung_up:
                raise EndpointDead(f"worker {worker.id} at {endpoint}: {worker.reason}")
            if worker.draining:
                raise EndpointDraining(f"worker {worker.id} at {endpoint} is draining")
            return worker
        for gone in self._gone.values():
            if gone.endpoint == endpoint and gone.state is WorkerState.DEAD:
                raise EndpointDead(f"worker {gone.id} at {endpoint} is dead: {gone.reason}")
        raise EndpointUnknown(f"target_endpoint {endpoint!r} names no worker")

    # ------------------------------------------------------------------ change

    def check_join(self, hello: Hello, now: float, *, idle: bool) -> list[Worker]:
        """Check the Hello of an unknown incarnation, without changing any live worker.

        Returns the workers that it replaces. ``idle``: the router has no unfinished request, so
        the model may change once no worker is connected. Raises EndpointDead, NameTaken (the
        worker retries), ModelMismatch, VersionMismatch, ProtocolError or InputError.
        """
        self._check(hello)
        replaced = self._replaced_by(hello)
        for holder in replaced:
            silent = now - holder.seen_at
            heard = silent <= suspect_after(self._config.worker_timeout_s) or self._excused(now)
            if holder.connected and heard and not holder.finished:
                raise NameTaken(
                    f"{holder.id} at {holder.endpoint} (process {holder.pid}) is connected and"
                    f" sent a message {silent:.1f} s ago; stop it before you replace it"
                )
        mismatch = self.card.mismatch(hello.model) if self.card else None
        if mismatch and idle and not any(worker.connected for worker in self._live.values()):
            return list(self._live.values())  # no worker of the old model can return
        if mismatch:
            field, ours, theirs = mismatch
            reason = f"{field} is {theirs}, the cluster has {ours}"
            refused = Worker(b"", hello, now)
            refused.enter(WorkerState.REFUSED, reason)
            self._list_gone(refused)
            raise ModelMismatch(reason)
        return replaced

    def join(self, identity: bytes, hello: Hello, now: float) -> Worker:
        """Register a worker after :meth:`check_join`; the workers it replaces must be dead."""
        if self.card is not None and self.card.mismatch(hello.model):
            self.card = None
        worker = Worker(identity, hello, now)
        worker.report(hello.load, self._config.name)
        worker.enter(WorkerState.DRAINING if hello.draining else WorkerState.READY)
        self._dead_incarnations.pop(worker.incarnation, None)
        self._by_identity[identity] = worker
        self._live[worker.endpoint] = worker
        self._gone.pop(worker.id, None)
        self._changed()
        return worker

    def rejoin(self, worker: Worker, identity: bytes, hello: Hello, now: float) -> None:
        """Handle another Hello of a live worker, perhaps over a new connection."""
        if worker.identity != identity:
            self._by_identity.pop(worker.identity, None)
            worker.identity = identity
        self._by_identity[identity] = worker
        worker.connected, worker.hung_up = True, False
        worker.reported = {r.request: r for r in hello.requests}
        worker.report(hello.load, self._config.name)
        worker.seen_at = worker.progress_at = now
        worker.draining = worker.draining or hello.draining
        self.clear(worker)
        if hello.draining:
            self.drain(worker)
        self._changed()

    def known(self, incarnation: int) -> Worker | None:
        """Return the live worker with this incarnation, or None."""
        return next((w for w in self._live.values() if w.incarnation == incarnation), None)

    def is_dead(self, incarnation: int) -> bool:
        """True if this router declared the incarnation dead."""
        return incarnation in self._dead_incarnations

    def _may_return(self, hello: Hello) -> bool:
        """True if only this router was cut off, while another router served the worker."""
        return hello.elsewhere and self._dead_incarnations[hello.incarnation]

    def _replaced_by(self, hello: Hello) -> list[Worker]:
        """Return the live workers whose name or endpoint a new incarnation takes over."""
        return [
            worker
            for worker in self._live.values()
            if hello.incarnation != worker.incarnation
            and (worker.id == hello.worker or worker.endpoint == hello.endpoint)
        ]

    def drain(self, worker: Worker) -> None:
        """Assign no new requests to the worker."""
        worker.draining = True
        if worker.state is WorkerState.READY:
            worker.enter(WorkerState.DRAINING)
            self._changed()

    def disconnected(self, worker: Worker, now: float) -> bool:
        """Handle a closed connection; return True if the worker's process has probably ended.

        A process that ends closes its connections shortly after its last message. A connection
        that timed out, or was lost during a pause of this process, proves nothing.
        """
        silent = now - worker.seen_at
        self._by_identity.pop(worker.identity, None)
        worker.connected = False
        worker.hung_up = not self._excused(now) and closed_by_peer(
            silent, self._config.worker_timeout_s
        )
        self.suspect(worker, CONNECTION_CLOSED)
        return worker.hung_up

    def suspect(self, worker: Worker, reason: str) -> None:
        """Mark the worker as suspect."""
        if worker.state is not WorkerState.SUSPECT:
            worker.enter(WorkerState.SUSPECT, reason)
            self._changed()
        worker.reason = reason

    def clear(self, worker: Worker) -> bool:
        """Clear the suspicion; return False if the worker was not suspect."""
        if worker.state is not WorkerState.SUSPECT:
            return False
        worker.enter(WorkerState.DRAINING if worker.draining else WorkerState.READY)
        self._changed()
        return True

    def declare_dead(self, worker: Worker, reason: str) -> None:
        """Declare this incarnation dead."""
        self.suspect(worker, reason)
        worker.enter(WorkerState.DEAD, reason)
        worker.connected = False
        self._by_identity.pop(worker.identity, None)
        if self._live.get(worker.endpoint) is worker:
            del self._live[worker.endpoint]
        self._dead_incarnations[worker.incarnation] = reason.startswith(SILENCES)
        while len(self._dead_incarnations) > KEEP_DEAD_INCARNATIONS:
            self._dead_incarnations.popitem(last=False)
        self._list_gone(worker)
        self._changed()

    # ------------------------------------------------------------------ health

    def beat(self, worker: Worker, beat: Heartbeat, now: float) -> bool:
        """Handle a heartbeat; return True if it clears the worker's suspicion."""
        worker.seen_at = now
        if beat.progress != worker.progress or not beat.busy:
            worker.progress_at = now
        worker.progress = beat.progress
        worker.busy = beat.busy
        worker.step_s = beat.step_s
        worker.report(beat.load, self._config.name)
        self._others = None
        worker.dropped = beat.dropped
        if beat.draining:
            self.drain(worker)
        return self._stuck(worker, now) < self._suspect_s(worker) and self.clear(worker)

    def look(self, now: float) -> None:
        """Detect pauses of this process; call many times per second."""
        if now - self._looked_at > STALL_S:
            self._excuse(now)
        self._looked_at = now

    def _excused(self, now: float) -> bool:
        """True if this process paused, so that a lost connection is not the worker's fault."""
        return now < self._excused_until or now - self._looked_at > STALL_S

    def _excuse(self, now: float) -> None:
        """Give every worker :data:`AFTER_STALL_S` to send a heartbeat."""
        self._excused_until = now + AFTER_STALL_S
        for worker in self._live.values():
            seen = now + AFTER_STALL_S - self._config.worker_timeout_s
            worker.seen_at = max(worker.seen_at, seen)
            progress = now + AFTER_STALL_S - self._hang_s(worker)
            worker.progress_at = max(worker.progress_at, progress)

    def doubtful(self, now: float) -> list[tuple[Worker, str]]:
        """Return the workers that become suspect now, each with the reason."""
        if now < self._excused_until:
            return []
        found = []
        after = suspect_after(self._config.worker_timeout_s)
        for worker in self._live.values():
            if worker.state is WorkerState.SUSPECT:
                continue
            stuck = self._stuck(worker, now)
            if now - worker.seen_at > after:
                found.append((worker, f"{NO_HEARTBEAT} for {now - worker.seen_at:.1f} s"))
            elif stuck > self._suspect_s(worker):
                found.append((worker, f"no progress for {stuck:.1f} s"))
        return found

    def failing(self, now: float) -> list[tuple[Worker, str]]:
        """Return the live workers whose worker timeout has passed, each with the reason."""
        found = []
        timeout = self._config.worker_timeout_s
        after = suspect_after(timeout)
        silences = [now - worker.seen_at for worker in self._live.values()]
        if min(silences, default=0.0) > after:
            self._alone_until = now + REUNION_S
        alone = now < self._alone_until
        for worker in self._live.values():
            silent, stuck = now - worker.seen_at, self._stuck(worker, now)
            factor = ALL_SILENT_FACTOR if alone and not worker.hung_up else 1
            if silent > timeout * factor:
                reason = NO_HEARTBEAT if worker.connected else CONNECTION_CLOSED
                found.append((worker, f"{reason}, silent for {silent:.1f} s"))
            elif stuck > self._hang_s(worker) and silent <= after:
                found.append((worker, f"no progress for {stuck:.1f} s"))
        return found

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

    # ------------------------------------------------------------------ inner

    def _check(self, hello: Hello) -> None:
        check_version(hello.version, f"worker {hello.worker}")
        check_endpoint(hello.endpoint)
        if hello.role not in ("prefill", "decode"):
            raise ProtocolError(f"role must be prefill or decode, not {hello.role!r}")
        if self.is_dead(hello.incarnation) and not self._may_return(hello):
            raise EndpointDead(
                f"{hello.worker} was declared dead here and its requests were moved;"
                " register again with a new incarnation"
            )

    def _list_gone(self, worker: Worker) -> None:
        self._gone.pop(worker.id, None)
        if self.find(worker.id) is None:
            self._gone[worker.id] = worker
        while len(self._gone) > KEEP_GONE:
            self._gone.popitem(last=False)

    def _changed(self) -> None:
        self._ready.clear()
        self._others = None
        self.card = shortest((worker.card for worker in self._live.values()), self.card)
        staffed = [worker for worker in self._live.values() if not worker.draining]
        self.slots = sum(worker.max_batch for worker in staffed if worker.role == "decode")
        self.prefills = sum(worker.role == "prefill" for worker in staffed)
        self.reporting = [worker for worker in self._live.values() if worker.reported]
        if not self.ever_ready:
            self.ever_ready = all(self.ready(role) for role in self.roles)


def roles_for(task: str) -> tuple[str, ...]:
    """Return the roles that a task needs; embeddings need no decode worker."""
    return ("prefill",) if task == "embed" else ("prefill", "decode")


def shortest(cards: Iterable[ModelCard], default: ModelCard | None = None) -> ModelCard | None:
    """Return the card with the shortest context length, which every worker can serve."""
    return min(cards, key=lambda card: card.max_length, default=default)
