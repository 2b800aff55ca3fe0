"""The workers: which are registered, which take new requests, which are dead.

A worker is *ready* (or draining), *suspect* or *dead*. Suspect: its connection closed, or it
shows no heartbeat or no progress; it gets no new requests and returns by itself, with the
same incarnation. Dead: the worker timeout passed, or a successor registered under its name.

Invariants: a name belongs to one live worker, and a healthy one keeps it whoever else asks for
it. An incarnation that was declared dead never returns; the exception is one that another router
served all the while: then this router was cut off, and its replays have higher attempts. All
live workers serve one model.

Pure: fed with messages and the time, it decides states. :mod:`.recovery` decides what follows
for the requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

from ..proto.endpoints import check_endpoint
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
from ..proto.messages import Heartbeat, Hello, RequestState, WorkerLoad
from ..proto.versions import check_version
from ..runtime.liveness import closed_by_peer, suspect_after
from .latency import Latency

if TYPE_CHECKING:
    from .config import RouterConfig
    from .request import Request

NO_HEARTBEAT = "no heartbeat"
CONNECTION_CLOSED = "its connection closed"
SILENCES = (NO_HEARTBEAT, CONNECTION_CLOSED)
"""Reasons to declare a worker dead that may as well lie with this router."""
ALL_SILENT_FACTOR = 6
"""With every worker silent at once this router itself is probably cut off, and no other worker
could take their requests: then the worker timeout is this many times as long."""
REUNION_S = 2.0
"""After such a silence the others are waited for so long, once the first worker is back: they all
try to connect anew, and do not succeed at the same moment."""
KEEP_GONE = 64
"""Dead and refused workers still listed."""
KEEP_DEAD_INCARNATIONS = 4096
STALL_S = 0.25
"""A longer gap between two looks was this process's own pause; peers gave it up meanwhile."""
AFTER_STALL_S = 1.0
"""Time for connections and heartbeats to come back after such a pause."""


class WorkerState(Enum):
    """Where a worker stands."""

    JOINING = "joining"  # said Hello, not checked yet
    READY = "ready"
    DRAINING = "draining"  # finishes what it has
    SUSPECT = "suspect"  # silent, stuck or disconnected; returns, or is declared dead
    REFUSED = "refused"  # does not fit the cluster
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

    ``outstanding``: tokens assigned and not yet done; ``others`` and ``others_requests``: what
    other routers have there, as of its last heartbeat. ``recent``: tokens assigned lately, as
    of the policy's placement number ``recent_at``. ``requests``: what depends on this worker.
    ``reported``: what its last Hello said it holds. ``aborts``: attempts to be freed there, by
    key: ``(attempt, repeat at, give up at)``. ``connected``: its connection stands. ``draining``:
    it takes no new requests, now or once it is no longer suspect. ``doubted``: requests that were
    moved when its connection closed; if it turns out to be dead, it died with them. ``latency``:
    of first tokens at a prefill worker, between tokens at a decode worker; ``dropped``: messages
    it could not use, by reason.
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
        self.finished = False  # it was drained and has nothing left
        self.connected = True
        self.hung_up = False  # its process closed the connection, so it has probably ended
        self.draining = hello.draining
        self.doubted: list[Request] = []

    def enter(self, state: WorkerState, reason: str = "") -> None:
        """Change state; what the table does not allow is our own bug and raises."""
        if state not in WORKER_TRANSITIONS[self.state]:
            raise InternalError(f"worker cannot go from {self.state.value} to {state.value}")
        self.state = state
        self.reason = reason

    def report(self, load: WorkerLoad, router: str) -> None:
        """Take its figures, as ``router`` sees them."""
        self.load = load
        others = [share for name, share in load.shares.items() if name != router]
        self.others = sum(share.tokens for share in others)
        self.others_requests = sum(share.requests for share in others)

    @property
    def burden(self) -> int:
        """Tokens it has to do for all routers."""
        return self.outstanding + self.others

    @property
    def live(self) -> bool:
        """Whether it is registered: it holds requests, and messages to it make sense."""
        return self.state in _LIVE


class Registry:
    """All workers, live and lately dead."""

    def __init__(self, config: RouterConfig, now: float) -> None:
        self._config = config
        self._looked_at = now
        self._excused_until = now
        self._alone_until = now  # this router hears nobody, or did until a moment ago
        self._by_identity: dict[bytes, Worker] = {}
        self._others: int | None = None  # counted anew after each heartbeat
        self._live: dict[str, Worker] = {}  # by endpoint
        self._gone: OrderedDict[str, Worker] = OrderedDict()  # dead or refused, by worker id
        self._dead_incarnations: OrderedDict[int, bool] = OrderedDict()  # only by their silence
        self._ready: dict[tuple[str, str | None], list[Worker]] = {}
        self.card: ModelCard | None = None
        """The model served, with the shortest context of all live workers."""
        self.ever_ready = False
        self.slots = 0
        """Batch slots of all decode workers that take requests, or will again if they return."""
        self.prefills = 0
        """How many prefill workers do so."""
        self.reporting: list[Worker] = []
        """Live workers whose last Hello said that they hold something."""

    # ------------------------------------------------------------------ look up

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the workers the served model needs."""
        return roles_for("generate" if self.card is None else self.card.task)

    def by_identity(self, identity: bytes) -> Worker | None:
        """The worker behind a connection, or None before its Hello."""
        return self._by_identity.get(identity)

    def named(self, name: str) -> Worker:
        """A live worker by its id or endpoint, for an operator; raises why there is none."""
        worker = self.find(name)
        if worker is not None:
            return worker
        for gone in self._gone.values():
            if name in (gone.id, gone.endpoint):
                raise EndpointDead(f"worker {gone.id} is {gone.state.value}: {gone.reason}")
        known = ", ".join(sorted(worker.id for worker in self._live.values())[:8])
        raise EndpointUnknown(f"no worker {name[:80]!r}; known are {known or 'none'}")

    def find(self, name: str) -> Worker | None:
        """A live worker by its id or endpoint."""
        worker = self._live.get(name)
        if worker is not None:
            return worker
        return next((w for w in self._live.values() if w.id == name), None)

    def live(self) -> list[Worker]:
        """All workers messages can be sent to."""
        return list(self._live.values())

    def listed(self) -> list[Worker]:
        """All workers for the operator: live ones, then dead and refused ones not replaced."""
        return [*self._live.values(), *self._gone.values()]

    def ready(self, role: str, pool: str | None = None) -> list[Worker]:
        """Workers of ``role`` (and pool) that take new work."""
        found = self._ready.get((role, pool))
        if found is None:
            found = [
                worker
                for worker in self._live.values()
                if worker.state is WorkerState.READY
                and worker.role == role
                and pool in (None, worker.pool)
            ]
            if found or pool is None:  # clients invent names of pools
                self._ready[role, pool] = found
        return found

    @property
    def others(self) -> int:
        """Requests of other routers on decode workers, or on those that embed."""
        if self._others is None:
            ready = self.ready(self.roles[-1])
            self._others = sum(worker.others_requests for worker in ready)
        return self._others

    def check_pool(self, pool: str | None) -> None:
        """Raise InputError for a pool no worker is or was in, when there are others to ask."""
        if pool is None or not all(self.ready(role) for role in self.roles):
            return
        pools = {worker.pool for worker in self.listed()}
        if pool not in pools:
            known = ", ".join(sorted(pools)[:8])
            raise InputError(f"no worker is in pool {pool!r}; known are {known}")

    def resolve(self, endpoint: str) -> Worker:
        """The worker a target_endpoint names, if it takes new work.

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
        """Check a Hello of an unknown incarnation before anything is changed for it.

        Returns the workers it replaces. ``idle``: no request is here, so the model may change
        once no worker is connected. Raises the reason why it cannot take part: EndpointDead,
        NameTaken (ask again later), ModelMismatch, VersionMismatch, ProtocolError, InputError.
        """
        self._check(hello)
        replaced = self._replaced_by(hello)
        for holder in replaced:
            silent = now - holder.seen_at
            heard = silent <= suspect_after(self._config.worker_timeout_s) or self._excused(now)
            if holder.connected and heard and not holder.finished:
                raise NameTaken(
                    f"{holder.id} at {holder.endpoint} (process {holder.pid}) is connected and"
                    f" sent a message {silent:.1f} s ago; stop it before another takes its place"
                )
        mismatch = self.card.mismatch(hello.model) if self.card else None
        if mismatch and idle and not any(worker.connected for worker in self._live.values()):
            return list(self._live.values())  # none of the old model can return
        if mismatch:
            field, ours, theirs = mismatch
            reason = f"{field} is {theirs}, the cluster has {ours}"
            refused = Worker(b"", hello, now)
            refused.enter(WorkerState.REFUSED, reason)
            self._list_gone(refused)
            raise ModelMismatch(reason)
        return replaced

    def join(self, identity: bytes, hello: Hello, now: float) -> Worker:
        """Register a worker that :meth:`check_join` let pass; whom it replaces is dead by now."""
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
        """The same incarnation said Hello again, perhaps over another connection."""
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
        """The live worker of this incarnation."""
        return next((w for w in self._live.values() if w.incarnation == incarnation), None)

    def is_dead(self, incarnation: int) -> bool:
        """Whether this incarnation was declared dead here."""
        return incarnation in self._dead_incarnations

    def _may_return(self, hello: Hello) -> bool:
        """Whether this router was cut off from a worker, which another one has all the while."""
        return hello.elsewhere and self._dead_incarnations[hello.incarnation]

    def _replaced_by(self, hello: Hello) -> list[Worker]:
        """Live workers whose name or endpoint a new incarnation takes over."""
        return [
            worker
            for worker in self._live.values()
            if hello.incarnation != worker.incarnation
            and (worker.id == hello.worker or worker.endpoint == hello.endpoint)
        ]

    def drain(self, worker: Worker) -> None:
        """Give the worker no new work."""
        worker.draining = True
        if worker.state is WorkerState.READY:
            worker.enter(WorkerState.DRAINING)
            self._changed()

    def disconnected(self, worker: Worker, now: float) -> bool:
        """Its connection is gone; whether its process probably is as well.

        The end of a process closes its connections while it is still heard; a connection that
        timed out, or was lost while this process paused, says nothing about the worker.
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
        """Give it no new requests until it returns."""
        if worker.state is not WorkerState.SUSPECT:
            worker.enter(WorkerState.SUSPECT, reason)
            self._changed()
        worker.reason = reason

    def clear(self, worker: Worker) -> bool:
        """It is no longer suspect; false when it was not."""
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
        """Note a heartbeat; whether the worker was suspect and is not any more."""
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
        """To be called many times a second: so this process notices its own pauses."""
        if now - self._looked_at > STALL_S:
            self._excuse(now)
        self._looked_at = now

    def _excused(self, now: float) -> bool:
        """Whether a connection may be lost because this process paused, not the worker."""
        return now < self._excused_until or now - self._looked_at > STALL_S

    def _excuse(self, now: float) -> None:
        """Give every worker a moment to be heard."""
        self._excused_until = now + AFTER_STALL_S
        for worker in self._live.values():
            seen = now + AFTER_STALL_S - self._config.worker_timeout_s
            worker.seen_at = max(worker.seen_at, seen)
            progress = now + AFTER_STALL_S - self._hang_s(worker)
            worker.progress_at = max(worker.progress_at, progress)

    def doubtful(self, now: float) -> list[tuple[Worker, str]]:
        """Workers not suspect yet that show no heartbeat or no progress, with the reason."""
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
        """Live workers whose worker timeout has passed, with the reason."""
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
        """Seconds in which a worker that is heard has got nothing done, though it has work."""
        return now - worker.progress_at if worker.busy else 0.0

    def _suspect_s(self, worker: Worker) -> float:
        """Longest time its step may take before that is suspect."""
        after = suspect_after(self._config.worker_timeout_s)
        return max(after, self._config.slow_step_factor * worker.step_s)

    def _hang_s(self, worker: Worker) -> float:
        """Longest time its step may take at all."""
        timeout = self._config.worker_timeout_s
        return max(timeout, self._config.slow_step_factor * worker.step_s)

    # ------------------------------------------------------------------ inner

    def _check(self, hello: Hello) -> None:
        check_version(hello.version, f"worker {hello.worker}")
        check_endpoint(hello.endpoint)
        if hello.role not in ("prefill", "decode"):
            raise ProtocolError(f"role is {hello.role!r}; known are prefill and decode")
        if self.is_dead(hello.incarnation) and not self._may_return(hello):
            raise EndpointDead(
                f"{hello.worker} was declared dead here and its requests were moved;"
                " it must register again with a new incarnation"
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
    """Roles of the workers a task needs: vectors need no decode worker."""
    return ("prefill",) if task == "embed" else ("prefill", "decode")


def shortest(cards: Iterable[ModelCard], default: ModelCard | None = None) -> ModelCard | None:
    """Of cards of one model the one with the shortest context, which fits every worker."""
    return min(cards, key=lambda card: card.max_length, default=default)
