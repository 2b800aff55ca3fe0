"""The router's record of one worker, and the states of a worker.

A worker is *ready* (or draining), *suspect* or *dead*. A suspect worker has a closed connection, or
shows no heartbeat or no progress. It gets no new requests, and may return with the same
incarnation. A worker is dead after the worker timeout, or when a successor takes its name.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from ..proto.errors import InternalError
from ..proto.layout import ModelCard
from ..proto.wire.messages import Hello, RequestState, WorkerLoad
from .latency import Latency

if TYPE_CHECKING:
    from .requests import Request


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


def roles_for(task: str) -> tuple[str, ...]:
    """Return the roles that a task needs; embeddings need no decode worker."""
    return ("prefill",) if task == "embed" else ("prefill", "decode")


def last_worker(name: str, role: str) -> str:
    """Return the error message for operators: the worker is the last ready one of its role."""
    return (
        f"{role} must keep at least 1 ready worker, and {name} is the last: add another "
        f"(baton scale {role}=2), or drain it anyway (--force)"
    )
