"""The registered workers.

Invariants: of the workers with one key, a name belongs to one live worker, and a healthy worker
keeps its name. Workers with different keys may state the same name or endpoint; neither displaces
the other. An incarnation
that was declared dead returns only if another router served it all the time. Then this router was
cut off, and its replays have higher attempt numbers. All live workers serve one model.

Pure: derives the states from messages and the time. :mod:`.recovery` acts on the requests.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from baton.proto.errors import (
    EndpointDead,
    EndpointDraining,
    EndpointUnknown,
    InputError,
    ModelContested,
    ModelMismatch,
    NameTaken,
    ProtocolError,
)
from baton.proto.layout import ModelCard
from baton.proto.wire.endpoints import check_endpoint
from baton.proto.wire.messages import Heartbeat, Hello, WorkerLoad
from baton.proto.wire.versions import check_version
from baton.runtime.liveness import closed_by_peer, suspect_after
from baton.runtime.metrics.families import STEP_SECONDS

from .config import RouterConfig
from .majority import Claims, joint_card, keys_of, votes
from .records import NO_KEY, Worker, WorkerCaller, roles_for
from .states import CONNECTION_CLOSED, SILENCES, WorkerState
from .worker_totals import WorkerTotals

KEEP_GONE = 64
"""Maximum number of dead and refused workers in the list."""
KEEP_DEAD_INCARNATIONS = 4096
"""The same of dead incarnations of one key."""
NEW = 0.25
"""Weight of the latest report in ``Worker.added_s``."""
Owner = tuple[bytes, str]
"""The key and the id of a worker."""


class Health(Protocol):
    """What :class:`.health.WorkerHealth` judges: whether silence is a worker's fault."""

    def excused(self, now: float) -> bool:
        """True if this process paused, so that a lost connection is not the worker's fault."""
        ...

    def progresses(self, worker: Worker, now: float) -> bool:
        """True if the worker is idle, or has made progress recently."""
        ...


class Registry:
    """All live and recently dead workers."""

    def __init__(self, config: RouterConfig, health: Health) -> None:
        self._config = config
        self._health = health
        self._by_identity: dict[bytes, Worker] = {}
        self._others: int | None = None  # cache, cleared by each heartbeat
        self._live: dict[int, Worker] = {}  # by incarnation
        self._named: dict[str, dict[int, Worker]] = {}  # the live ones by id, and by endpoint
        self._gone: OrderedDict[Owner, Worker] = OrderedDict()  # dead or refused
        self._dead_incarnations: dict[bytes, OrderedDict[int, bool]] = {}  # True: for SILENCES
        self._ready: dict[str, dict[str | None, list[Worker]]] = {}  # by role and pool
        self.totals = WorkerTotals()
        self.card: ModelCard | None = None
        """Card of the served model, as the keys of the live workers vote (:mod:`.majority`).

        It has the features that any of them has: a request that needs one is placed there.
        """
        self._claims = Claims()
        self.uneven = False
        """Whether a live worker has a shorter context length than the card."""
        self.ever_ready = False
        self.slots = 0
        """Batch slots of all live decode workers that are not draining."""
        self.prefills = 0
        """Number of live workers that compute prompts and are not draining."""
        self.reporting: list[Worker] = []
        """Live workers whose last Hello lists requests."""

    # ------------------------------------------------------------------ look up

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the workers that the served model needs."""
        return roles_for("generate" if self.card is None else self.card.task)

    @property
    def kv_types(self) -> list[str]:
        """Types of keys and values of the live workers, or of the card while there are none."""
        cards = [worker.card for worker in self._live.values()]
        if not cards and self.card is not None:
            cards = [self.card]
        return sorted({card.layout.dtype for card in cards})

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
        return _preferred(self._named.get(name))

    def live(self) -> list[Worker]:
        """Return all live workers."""
        return list(self._live.values())

    def listed(self) -> list[Worker]:
        """Return the live workers, then dead and refused workers that were not replaced."""
        return [*self._live.values(), *self._gone.values()]

    def ready(self, role: str, pool: str | None = None) -> list[Worker]:
        """Return the workers of ``role`` (and pool) that take new requests."""
        pools = self._ready.get(role)
        if pools is None:
            pools = self._ready[role] = {}
        found = pools.get(pool)
        if found is None:
            found = [
                worker
                for worker in self._live.values()
                if worker.state is WorkerState.READY
                and worker.role == role
                and pool in (None, worker.pool)
            ]
            if found or pool is None:  # unbounded otherwise: clients choose pool names
                pools[pool] = found
        return found

    def prompt_workers(self, pool: str | None = None) -> list[Worker]:
        """Return the workers that compute the next prompts: decode workers if they must."""
        found = self.ready("prefill", pool)
        if found or not self._config.serves_locally:
            return found
        return [worker for worker in self.ready("decode", pool) if worker.computes_prompts]

    def missing(self, roles: Sequence[str], pool: str | None = None) -> list[str]:
        """Return the roles that lack a ready worker, so that requests must wait."""
        lacking = [role for role in roles if not self.ready(role, pool)]
        if lacking == ["prefill"] and "decode" in roles and self.prompt_workers(pool):
            return []
        if self._config.mode == "colocated" and "decode" in lacking:
            return ["decode"]
        return lacking

    @property
    def others(self) -> int:
        """Requests of other routers on ready decode workers (for embeddings: prefill workers)."""
        if self._others is None:
            ready = self.ready(self.roles[-1])
            self._others = sum(worker.others_requests for worker in ready)
        return self._others

    def check_pool(self, pool: str) -> None:
        """Raise InputError for an unknown pool while the cluster can serve requests."""
        if self.missing(self.roles):
            return
        pools = {worker.pool for worker in self.listed()}
        if pool not in pools:
            known = ", ".join(sorted(pools)[:8])
            raise InputError(f"no worker is in pool {pool!r}; pools: {known}")

    def resolve(self, endpoint: str) -> Worker:
        """Return the worker of a ``target_endpoint``.

        Raises EndpointUnknown, EndpointDead or EndpointDraining.
        """
        stated = self._named.get(endpoint, {}).items()
        worker = _preferred({key: one for key, one in stated if one.endpoint == endpoint})
        if worker is not None:
            if worker.hung_up:
                raise EndpointDead(f"worker {worker.id} at {endpoint}: {worker.reason}")
            if worker.draining:
                raise EndpointDraining(f"worker {worker.id} at {endpoint} is draining")
            return worker
        for gone in self._gone.values():
            if gone.endpoint == endpoint and gone.state is WorkerState.DEAD:
                raise EndpointDead(f"worker {gone.id} at {endpoint} is dead: {gone.reason}")
        raise EndpointUnknown(
            f"target_endpoint {endpoint!r} names no worker; baton status shows the endpoints"
        )

    # ------------------------------------------------------------------ change

    def check_join(
        self, hello: Hello, now: float, *, idle: bool, caller: WorkerCaller = NO_KEY
    ) -> list[Worker]:
        """Check the Hello of an unknown incarnation, without changing any live worker.

        Returns the workers that it replaces. ``idle``: the router has no unfinished request, so
        the model may change once no worker is connected. ``caller``: what its connection proves.
        Raises EndpointDead, NameTaken or ModelContested (the worker retries), ModelMismatch,
        VersionMismatch, ProtocolError or InputError.
        """
        key = caller.key
        self._check(hello, key)
        replaced = self._replaced_by(hello, key)
        for holder in replaced:
            silent = now - holder.seen_at
            heard = silent <= suspect_after(self._config.worker_timeout_s) or self._health.excused(
                now
            )
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
            if field == "fingerprint":
                reason += ": the files are not those of the model that the cluster serves"
            return self._outvote(hello, now, caller, reason)
        return replaced

    def _outvote(self, hello: Hello, now: float, caller: WorkerCaller, reason: str) -> list[Worker]:
        """Return the live workers, of another model, if more keys want the model of ``hello``.

        Raises ModelContested if as many want it, ModelMismatch if fewer do or the key of ``hello``
        serves the present model too.
        """
        self._claims.add(hello.model, caller.key, now, vouched=caller.vouched)
        holders = keys_of(self._live.values())
        ours, theirs = votes(holders), votes(self._claims.voters(hello.model))
        if theirs > ours:
            return list(self._live.values())
        refused = Worker(b"", hello, now, caller)
        refused.enter(WorkerState.REFUSED, reason)
        self._list_gone(refused)
        if theirs == ours and caller.key not in holders:
            raise ModelContested(f"{reason}; no more keys state one than the other")
        raise ModelMismatch(reason)

    def join(
        self, identity: bytes, hello: Hello, now: float, caller: WorkerCaller = NO_KEY
    ) -> Worker:
        """Register a worker after :meth:`check_join`; the workers it replaces must be dead."""
        if self.card is not None and self.card.mismatch(hello.model):
            self.card = None
        worker = Worker(identity, hello, now, caller)
        store_load(worker, hello.load, self._config.name)
        worker.enter(WorkerState.DRAINING if hello.draining else WorkerState.READY)
        self._dead_of(worker.key).pop(worker.incarnation, None)
        self.totals.joined(worker)
        self._by_identity[identity] = worker
        self._live[worker.incarnation] = worker
        for name in (worker.id, worker.endpoint):
            self._named.setdefault(name, {})[worker.incarnation] = worker
        self._gone.pop((worker.key, worker.id), None)
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
        store_load(worker, hello.load, self._config.name)
        worker.seen_at = worker.progress_at = now
        worker.draining = worker.draining or hello.draining
        self.clear(worker)
        if hello.draining:
            self.drain(worker)
        self._changed()

    def known(self, incarnation: int) -> Worker | None:
        """Return the live worker with this incarnation, or None."""
        return self._live.get(incarnation)

    def sealed(self, seal: bytes) -> list[Worker]:
        """Return the live workers of the process with this seal."""
        return [worker for worker in self._live.values() if worker.seal == seal]

    def is_dead(self, incarnation: int, key: bytes) -> bool:
        """True if this router declared the incarnation of this key dead."""
        return incarnation in self._dead_of(key)

    def _dead_of(self, key: bytes) -> OrderedDict[int, bool]:
        """Return the dead incarnations of a key: no key can push out those of another."""
        return self._dead_incarnations.setdefault(key, OrderedDict())

    def _may_return(self, hello: Hello, key: bytes) -> bool:
        """True if only this router was cut off, while another router served the worker."""
        return hello.elsewhere and self._dead_of(key)[hello.incarnation]

    def _replaced_by(self, hello: Hello, key: bytes) -> list[Worker]:
        """Return the live workers whose name or endpoint a new incarnation takes over.

        Only workers with the same key: a name or an endpoint says nothing about another key.
        """
        return [
            worker
            for worker in self._live.values()
            if hello.incarnation != worker.incarnation
            and worker.key == key
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
        worker.hung_up = not self._health.excused(now) and closed_by_peer(
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
        self.totals.died(worker)
        worker.connected = False
        self._by_identity.pop(worker.identity, None)
        self._live.pop(worker.incarnation, None)
        for name in {worker.id, worker.endpoint} & self._named.keys():
            self._named[name].pop(worker.incarnation, None)
            if not self._named[name]:
                del self._named[name]
        dead = self._dead_of(worker.key)
        dead[worker.incarnation] = reason.startswith(SILENCES)
        while len(dead) > KEEP_DEAD_INCARNATIONS:
            dead.popitem(last=False)
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
        store_load(worker, beat.load, self._config.name)
        if not beat.load.tokens_waiting:
            worker.stream_step_s = beat.step_s
        self._others = None
        worker.dropped = beat.dropped
        worker.extensions = beat.extensions
        if beat.draining:
            self.drain(worker)
        return self._health.progresses(worker, now) and self.clear(worker)

    # ------------------------------------------------------------------ inner

    def _check(self, hello: Hello, key: bytes) -> None:
        check_version(hello.version, f"worker {hello.worker}")
        check_endpoint(hello.endpoint)
        if hello.role not in ("prefill", "decode"):
            raise ProtocolError(f"role must be prefill or decode, not {hello.role!r}")
        if self.is_dead(hello.incarnation, key) and not self._may_return(hello, key):
            raise EndpointDead(
                f"{hello.worker} was declared dead here and its requests were moved;"
                " register again with a new incarnation"
            )

    def _list_gone(self, worker: Worker) -> None:
        owner = (worker.key, worker.id)
        self._gone.pop(owner, None)
        if not any((live.key, live.id) == owner for live in self._live.values()):
            self._gone[owner] = worker
        while len(self._gone) > KEEP_GONE:
            (most, _), *_ = Counter(key for key, _ in self._gone).most_common(1)
            del self._gone[next(owner for owner in self._gone if owner[0] == most)]

    def recount(self) -> None:
        """Make the lists by state again, after an error has left a change unfinished."""
        for endpoint, worker in list(self._live.items()):
            if not worker.live:
                del self._live[endpoint]
                self._list_gone(worker)
        self._changed()

    def _changed(self) -> None:
        self._ready.clear()
        self._others = None
        self.card = joint_card(tuple(self._live.values()), self.card)
        longest = 0 if self.card is None else self.card.max_length
        self.uneven = any(worker.card.max_length < longest for worker in self._live.values())
        staffed = [worker for worker in self._live.values() if not worker.draining]
        self.slots = sum(worker.max_batch for worker in staffed if worker.role == "decode")
        self.prefills = sum(worker.role == "prefill" for worker in staffed) or sum(
            worker.computes_prompts for worker in staffed if self._config.serves_locally
        )
        self.reporting = [worker for worker in self._live.values() if worker.reported]
        if not self.ever_ready:
            self.ever_ready = not self.missing(self.roles)


def _preferred(workers: Mapping[int, Worker] | None) -> Worker | None:
    """Return one of the workers that state the same name or endpoint, or None.

    There are several only with different keys. A healthy worker comes first, then a worker that
    the key list names literally, then the worker that registered first.
    """
    if not workers:
        return None
    return max(
        workers.values(),
        key=lambda worker: (worker.state is not WorkerState.SUSPECT, worker.vouched),
    )


def store_load(worker: Worker, load: WorkerLoad, router: str) -> None:
    """Store the load that a worker reports; ``router``: name of this router."""
    if worker.role == "decode" and load.prompt_tokens > worker.load.prompt_tokens:
        _learn_added(worker, worker.load, load)
    worker.load = load
    others = [share for name, share in load.shares.items() if name != router]
    worker.others = sum(share.tokens for share in others)
    worker.others_requests = sum(share.requests for share in others)


def _learn_added(worker: Worker, before: WorkerLoad, load: WorkerLoad) -> None:
    """Learn by how much the prompt tokens of the last steps made them longer."""
    steps = _steps(load) - _steps(before)
    streamed = load.generated_tokens - before.generated_tokens
    if not worker.stream_step_s or steps <= 0 or streamed < steps:
        return  # nothing to compare with, or steps without a stream
    seconds = load.compute_seconds - before.compute_seconds
    seconds -= load.encode_seconds - before.encode_seconds
    tokens = load.prompt_tokens - before.prompt_tokens
    added = max(0.0, seconds - steps * worker.stream_step_s) / tokens
    known = worker.added_s
    worker.added_s = added if known < 0 else known + NEW * (added - known)
    if before.tokens_waiting and load.tokens_waiting:  # each of the steps had a chunk
        each, known = seconds / tokens, worker.local_s
        worker.local_s = each if not known else known + NEW * (each - known)


def _steps(load: WorkerLoad) -> int:
    """Return the number of steps since the worker's start."""
    found = load.histograms.get(STEP_SECONDS)
    return sum(found.counts) if found is not None else 0


def keep_one(name: str, role: str) -> str:
    """Return the error message for operators: the worker is the last ready one of its role."""
    return (
        f"{role} must keep at least 1 ready worker, and {name} is the last: add another "
        f"(baton scale {role}=2)"
    )


def last_worker(name: str, role: str) -> str:
    """Return the same for a drain, which an operator can force."""
    return f"{keep_one(name, role)}, or drain it anyway (--force)"
