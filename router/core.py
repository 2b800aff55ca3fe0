"""The router's core: all decisions, without I/O or clock.

``from_client`` and ``from_worker`` take the messages of one envelope, ``handle`` takes all other
events. Each of them returns the actions to perform.

Invariants: every admitted request ends with exactly one terminal. Its tokens reach the client in
order and once, on any sequence of workers. All records together stay below the limits of
:mod:`.admission`.

The core does not track KV blocks: only the decode worker's grant decides about its memory.
Modules: :mod:`.client_messages` and :mod:`.worker_messages` handle messages, :mod:`.lifecycle`
places and ends requests, :mod:`.recovery` replays them, :mod:`.timers` handles timeouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

from ..proto.errors import BatonError, InternalError, LimitExceeded
from ..proto.wire.messages import Assign, Message, Rejected
from .authorization import ANYBODY, Caller
from .client_messages import ClientSide, merge_queries
from .config import RouterConfig
from .events import (
    Action,
    ClientFull,
    ClientGone,
    ClientWritable,
    Event,
    Tick,
    ToWorker,
    WorkerGone,
)
from .lifecycle import Lifecycle
from .recovery import Recovery
from .requests import State
from .status import Handoffs, Reporter
from .timers import Timers
from .worker_messages import WorkerSide


class RouterCore:
    """State machine of one router.

    ``incarnation``: random number of this process. ``files``: text files of the model folder by
    name. ``now``: monotonic seconds, as in all calls. ``caller_of``: maps a client's routing id
    to its key and rights.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        incarnation: int,
        files: dict[str, bytes] | None = None,
        now: float = 0.0,
        caller_of: Callable[[bytes], Caller] = lambda _identity: ANYBODY,
    ) -> None:
        self.life = Lifecycle(config, now)
        self.handoffs = Handoffs()
        recovery = Recovery(self.life, now)
        self.reporter = Reporter(self.life, self.handoffs, now)
        self._clients = ClientSide(self.life, recovery, self.reporter, files or {}, caller_of)
        self._workers = WorkerSide(
            self.life, recovery, self.handoffs, self._clients.drained, incarnation
        )
        recovery.on_lost = self._clients.drained
        self._timers = Timers(self.life, recovery, now)

    # ------------------------------------------------------------------ entry

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event and return the actions, to be performed in order."""
        self._handlers[type(event)](self, event, now)
        return self._take()

    def from_client(self, identity: bytes, messages: Sequence[Message], now: float) -> list[Action]:
        """Handle all messages of one envelope from a client."""
        folded = messages if len(messages) == 1 else merge_queries(messages)
        self._clients.handle(identity, folded, now)
        return self._take()

    def from_worker(self, identity: bytes, messages: Sequence[Message], now: float) -> list[Action]:
        """Handle all messages of one envelope from a worker."""
        self._workers.handle(identity, messages, now)
        return self._take()

    def reject_client(
        self, identity: bytes, error: BatonError, request_id: str = ""
    ) -> list[Action]:
        """Handle undecodable bytes from a client, about ``request_id`` if it is known."""
        self.dropped[f"client_{error.code}"] += 1
        self._clients.reject(identity, error, request_id)
        return self._take()

    def reject_worker(self, identity: bytes, error: BatonError) -> list[Action]:
        """Handle undecodable bytes from a worker."""
        self.dropped[f"worker_{error.code}"] += 1
        rejected = Rejected(code=error.code, message=str(error))
        self.life.out.append(ToWorker(identity, rejected))
        return self._take()

    def not_sent(self, message: Message, reason: str, now: float) -> list[Action]:
        """Handle a message that is too large for any envelope: an Assign fails its request."""
        if isinstance(message, Assign):
            request = self.life.requests.get(message.request)
            if request is None or request.done or request.attempt.number != message.attempt:
                return []
            self.life.fail(request, LimitExceeded(reason), now)
        return self._take()

    def next_timer(self) -> float:
        """Return the time at which the next :class:`.Tick` is due."""
        return self._timers.next_time()

    @property
    def dropped(self) -> Counter[str]:
        """Counts of dropped messages by reason, including those that the shell drops."""
        return self.life.counters.dropped

    # ------------------------------------------------------------------ end of the process

    def close(self) -> None:
        """Reject new requests; running requests continue."""
        self._clients.closing = True

    @property
    def unfinished(self) -> int:
        """Number of requests without a terminal."""
        return self.life.admission.requests

    @property
    def kept(self) -> int:
        """Number of records, including ended requests with an unacknowledged terminal."""
        return len(self.life.requests)

    # ------------------------------------------------------------------ inner

    def check_integrity(self) -> None:
        """Raise InternalError if records, counters and the workers' loads do not agree."""
        life = self.life
        requests, admission = life.requests.values(), life.admission
        unfinished = [request for request in requests if not request.done]
        sums = (
            len(unfinished),
            sum(request.bytes for request in requests),
            sum(request.queued_tokens for request in unfinished),
        )
        if sums != (admission.requests, admission.context_bytes, admission.queued_tokens):
            raise InternalError(f"admission counts do not match the records' sums {sums}")
        for request in requests:
            request.check_integrity()
            if (request.key in life.queued) != (request.state is State.QUEUED):
                raise InternalError(f"{request.request_id} is queued, or should be")
        for worker in life.registry.live():
            charged = sum(request.attempt.cost_on(worker) for request in requests)
            if worker.outstanding != charged:
                text = f"{worker.outstanding} tokens outstanding, the requests have {charged}"
                raise InternalError(f"{worker.id}: {text}")
            for key, request in worker.requests.items():
                if life.requests.get(key) is not request or not request.attempt.runs_on(worker):
                    raise InternalError(f"{worker.id} keeps {request.request_id}, which it lost")

    def _take(self) -> list[Action]:
        actions = self.life.out
        self.life.out = []
        return actions

    def _client_gone(self, event: ClientGone, now: float) -> None:
        self._clients.gone(event.identity, now)

    def _worker_gone(self, event: WorkerGone, now: float) -> None:
        self._workers.gone(event.identity, now)

    def _client_full(self, event: ClientFull, _now: float) -> None:
        self.life.clients.full(event.identity)

    def _client_writable(self, event: ClientWritable, _now: float) -> None:
        self._clients.writable(event.identity)

    def _tick(self, _event: Tick, now: float) -> None:
        self._timers.tick(now)

    _handlers: ClassVar[dict[type, Callable[..., None]]] = {
        ClientGone: _client_gone,
        WorkerGone: _worker_gone,
        ClientFull: _client_full,
        ClientWritable: _client_writable,
        Tick: _tick,
    }
