"""Registration of workers, their heartbeats, drains and lost connections.

Invariant: all checks of a Hello precede all changes, so a rejected Hello has no effect on other
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.proto.errors import AccessDenied, BatonError, EndpointDead
from baton.proto.wire.messages import (
    CertificateReceived,
    DeathCertificate,
    Drained,
    Heartbeat,
    Hello,
    Rejected,
    Welcome,
)
from baton.proto.wire.proofs import seal_of, worker_key
from baton.runtime.tables import RecentMap

from .events import Log, ToWorker, WorkerInputRejected, WorkersGone
from .records import NEVER, Worker, WorkerCaller
from .recovery import WorkerLosses
from .state import RouterState
from .states import WorkerState
from .takeover import Takeover

REMEMBER_REFUSED = 256


class WorkerRegistration:
    """Registers workers and follows their states.

    ``on_drained``: called with the id of every worker that has
    finished its drain.
    """

    def __init__(
        self,
        state: RouterState,
        takeover: Takeover,
        losses: WorkerLosses,
        on_drained: Callable[[str], None],
    ) -> None:
        self._config = state.config
        self._out = state.out
        self._registry = state.registry
        self._admission = state.admission
        self._takeover = takeover
        self._losses = losses
        self._metrics = state.metrics
        self._incarnation = state.incarnation
        self._on_drained = on_drained
        self._refused: RecentMap[bytes, str] = RecentMap(REMEMBER_REFUSED)  # logged codes

    def hello(self, identity: bytes, hello: Hello, now: float, caller: WorkerCaller) -> None:
        """Register a new worker, a known one again, or a successor.

        All checks precede all changes: a rejected Hello has no effect on other workers.
        """
        registry = self._registry
        known = registry.known(hello.incarnation)
        try:
            self._check_connection(identity, hello)
            if known is not None:
                self._check_known(known, hello, caller)
                self._rejoin(known, identity, hello, now)
                return
            idle = not self._admission.requests
            replaced = registry.check_join(hello, now, idle=idle, caller=caller)
        except BatonError as error:
            if self._refused.get(identity) != error.code:  # it retries
                self._refused.put(identity, error.code)
                self._out.append(
                    Log("worker.refused", {"worker": hello.worker, "reason": str(error)})
                )
            self._metrics.dropped["refused_worker"] += 1
            self._out.append(ToWorker(identity, Rejected(code=error.code, message=str(error))))
            return
        reason = f"replaced by process {hello.pid}"
        self._losses.lose_all([(old, reason) for old in replaced], now, taken_over=True)
        returned = registry.is_dead(hello.incarnation, caller.key)
        worker = registry.join(identity, hello, now, caller)
        self._losses.registered(worker)
        self._out.append(
            Log("worker.joined", {"worker": worker.id, "role": worker.role, "pid": worker.pid})
        )
        self._welcome(identity)
        self._takeover.registered(worker, now, joined=not returned)
        self._losses.ready(now)

    def _check_connection(self, identity: bytes, hello: Hello) -> None:
        """Raise AccessDenied if the connection is that of another worker.

        A worker's next incarnation opens new connections. One connection that could register many
        workers would be assigned the requests of many.
        """
        there = self._registry.by_identity(identity)
        if there is not None and there.incarnation != hello.incarnation:
            raise AccessDenied(f"this connection is that of {there.id}, another incarnation")

    @staticmethod
    def _check_known(known: Worker, hello: Hello, caller: WorkerCaller) -> None:
        """Raise EndpointDead or AccessDenied if a different worker uses a known incarnation.

        It would receive the messages for the worker with that incarnation. Two keys with the same
        64 bits are an accident, or 2^64 digests of work.
        """
        if known.key != caller.key:
            raise EndpointDead("another key has this incarnation; register again with a new one")
        if (known.id, known.role, known.endpoint) != (hello.worker, hello.role, hello.endpoint):
            raise AccessDenied(f"this incarnation is {known.role} {known.id!r} at {known.endpoint}")

    def _rejoin(self, worker: Worker, identity: bytes, hello: Hello, now: float) -> None:
        returned = worker.state is WorkerState.SUSPECT
        self._registry.rejoin(worker, identity, hello, now)
        self._losses.registered(worker)
        self._welcome(identity)
        self._takeover.registered_again(worker, now)
        if returned:
            self._losses.returned(worker, now)

    def _welcome(self, identity: bytes) -> None:
        name = self._config.name
        worker = self._registry.by_identity(identity)
        key = worker_key(self._config.key, worker.holder, self._incarnation) if worker else b""
        welcome = Welcome(router=name, incarnation=self._incarnation, key=key)
        self._out.append(ToWorker(identity, welcome))

    def heartbeat(self, worker: Worker, beat: Heartbeat, now: float) -> None:
        """Note a heartbeat, which may clear the worker's suspicion."""
        if beat.incarnation == worker.incarnation and self._registry.beat(worker, beat, now):
            self._losses.returned(worker, now)

    def drained(self, worker: Worker, message: Drained, _now: float) -> None:
        """Note that a worker has finished its requests, and notify the clients that wait for it."""
        self._registry.drain(worker)
        worker.drain_at = NEVER
        worker.finished = True
        self._on_drained(worker.id)

    def certified(
        self, identity: bytes, certificates: Sequence[DeathCertificate], now: float
    ) -> None:
        """Declare workers dead whose supervisor certifies the end of their process.

        The secret proves that the certificate is the supervisor's, whoever sends it. It is valid
        for every incarnation of that process, also for one that the supervisor never heard of.
        """
        lost = []
        for certificate in certificates:
            secret = certificate.secret
            self._out.append(ToWorker(identity, CertificateReceived(secret=secret)))
            found = self._registry.sealed(seal_of(secret))
            if not found:  # repeated, or its worker was replaced or never registered here
                self._metrics.dropped["unknown_certificate"] += 1
            lost += [(worker, _end_of(worker, certificate.status)) for worker in found]
        self._losses.lose_all(lost, now)

    def reject(self, event: WorkerInputRejected, _now: float) -> None:
        """Send Rejected for bytes that could not be decoded, or for a Hello without the right."""
        error = event.error
        self._metrics.dropped[f"worker_{error.code}"] += 1
        rejected = Rejected(code=error.code, message=str(error))
        self._out.append(ToWorker(event.identity, rejected))

    def gone(self, event: WorkersGone, now: float) -> None:
        """Handle closed connections of workers."""
        found = [self._registry.by_identity(identity) for identity in event.identities]
        workers = [worker for worker in found if worker is not None]
        drained = [worker for worker in workers if worker.finished]
        self._losses.disconnected([worker for worker in workers if not worker.finished], now)
        self._losses.lose_all([(worker, "drained") for worker in drained], now)


def _end_of(worker: Worker, status: int) -> str:
    """Return the reason of a certified death."""
    if worker.finished or (worker.draining and status == 0):
        return "drained"
    if status < 0:
        return f"its process was killed by signal {-status}"
    return f"its process ended with exit code {status}"
