"""Exceptions of the router's own code: who is harmed, and what is kept.

Invariant: an exception ends at most the request whose message or timer was handled. That request
gets one terminal, an :class:`.InternalError`; every other message, request and timer of the event
is still handled. After the event, all sums and indexes are made again from the requests' records
(:meth:`OwnErrors.mend`), so :meth:`.core.RouterCore.check_integrity` passes.

The actions that a handler returned before it raised are performed: the records already count them
as sent (an Abort is repeated until it is confirmed, tokens are in ``emitted``), and a peer ignores
a message of a request that has ended since. The error's text stays in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from baton.proto.errors import BatonError, InternalError
from baton.proto.wire.messages import Terminal, Tokens

from .admission import Admission
from .clients import Clients
from .events import Action, Fault, ToClient
from .integrity import check_request
from .metrics import Metrics
from .records import ENDED_KEEP_S, PLACED, Request, State, Worker, WorkerState
from .registry import Registry
from .request_table import RequestTable

TEXT = "the router failed to handle this request; the router's log has the cause"
"""Everything that a client learns about such an error."""
AGAIN_S = 1.0
"""Seconds until the terminal of a harmed request is sent again."""
INTERNAL = "router.internal_error"
"""Log event of such an error."""
METRIC = "internal_error"
"""The reason under which the router counts these errors."""


class Harmed(NamedTuple):
    """A request that an error may have left half changed; ``error`` ends it."""

    key: bytes
    error: Exception


class OwnErrors:
    """Collects the errors of one event and repairs the router's state after it.

    ``unowned``: errors since the start that have no request or client as owner.
    """

    def __init__(
        self, out: list[Action], table: RequestTable, registry: Registry, admission: Admission,
        clients: Clients, metrics: Metrics,
    ) -> None:  # fmt: skip
        self._out = out
        self._table = table
        self._registry = registry
        self._admission = admission
        self._clients = clients
        self._metrics = metrics
        self._harmed: list[Harmed] = []
        self.fresh = False
        """Whether an error was caught since the last :meth:`mend`."""
        self.unowned = 0

    # ------------------------------------------------------------------ caught

    def of_request(self, error: Exception, key: bytes) -> None:
        """Note an error in the handling of one request."""
        self._harmed.append(Harmed(key, error))
        request = self._table.requests.get(key)
        name = "" if request is None else request.request_id
        self._note(error, {"request": key.hex(), "request_id": name})

    def of_client(self, error: Exception, message: str) -> None:
        """Note an error in the handling of a client's message that names no request."""
        self._note(error, {"message": message})

    def of_nobody(self, error: Exception, where: str) -> None:
        """Note an error that has no request or client as owner."""
        self.unowned += 1
        self._note(error, {"where": where})

    def each(self, requests: Iterable[Request], handle: Callable[[Request], object]) -> None:
        """Call ``handle`` for every request; an error harms that request alone."""
        for request in requests:
            try:
                handle(request)
            except Exception as error:
                self.of_request(error, request.key)

    def apart(self, where: str, call: Callable[[], object]) -> None:
        """Call a part of a timer's work; the other parts run even if it raises."""
        try:
            call()
        except Exception as error:
            self.of_nobody(error, where)

    def _note(self, error: Exception, fields: dict[str, object]) -> None:
        self.fresh = True
        self._metrics.dropped[METRIC] += 1
        self._out.append(Fault(INTERNAL, error, fields))

    # ------------------------------------------------------------------ repaired

    def mend(
        self,
        end: Callable[[Request, BatonError, float], None],
        lost: Callable[[Request, str], None],
        now: float,
    ) -> None:
        """End the harmed requests and make all sums and indexes again from the records.

        ``end``: ends a request with an error. ``lost``: replays a request whose worker is gone.
        """
        self.fresh = False
        harmed, self._harmed = self._harmed, []
        keys = dict.fromkeys(one.key for one in harmed)
        self._recount(now)
        for request in list(self._table.requests.values()):
            if request.key in keys or _is_broken(request):
                self._end(request, end, now)
        self._recount(now)
        for request in list(self._table.requests.values()):
            if request.state in PLACED and not all(map(_may_run, _needed(request))):
                lost(request, "its worker was lost")
        self._send_rest()

    def _end(
        self, request: Request, end: Callable[[Request, BatonError, float], None], now: float
    ) -> None:
        """End a harmed request. If it had ended before and is due, drop its record."""
        if request.state is State.FORGOTTEN or (request.done and now >= request.limit):
            self._drop(request)
            return
        if request.terminal is not None:
            _release(request)
            request.deadline = request.limit = max(request.deadline, now + ENDED_KEEP_S)
            self._table.wake(request, now + AGAIN_S, now)  # sends the terminal again
            return
        if request.done:
            self._force_end(request, now)
            return
        try:
            end(request, InternalError(TEXT), now)
        except Exception as error:  # then without anything that may fail again
            self._note(error, {"request": request.key.hex(), "where": "ending it"})
            self.fresh = False
            self._force_end(request, now)

    def _force_end(self, request: Request, now: float) -> None:
        _release(request)
        request.state = State.ENDED
        request.queued_tokens = 0
        request.terminal = terminal = Terminal(
            request=request.key, attempt=request.attempt.number, position=request.next,
            code=InternalError.code, message=TEXT, request_id=request.request_id,
        )  # fmt: skip
        request.deadline = request.limit = max(request.deadline, now + ENDED_KEEP_S)
        if request.client is not None:
            self._out.append(ToClient(request.client.identity, terminal))
        self._table.wake(request, now + AGAIN_S, now)

    def _drop(self, request: Request) -> None:
        """Remove the record of an ended request."""
        request.state = State.FORGOTTEN
        _release(request)
        self._clients.detach(request)
        self._table.remove(request)

    def _recount(self, now: float) -> None:
        """Make every sum and index again."""
        table, requests = self._table, self._table.requests
        self._registry.recount()
        live = frozenset(worker.incarnation for worker in self._registry.live())
        for request in requests.values():
            request.doubts &= live
            if request.slot < 0:
                table.wake(request, now, now)
            if _is_broken(request):
                _release(request)
        table.queued = self._queued()
        self._admission.recount(requests.values())
        self._clients.recount(requests)
        for worker in self._registry.live():
            self._recount_worker(worker)

    def _queued(self) -> dict[bytes, Request]:
        """Return the queued requests, in the order in which they were queued."""
        table = self._table
        order = dict.fromkeys([*table.queued, *table.requests])
        found = ((key, table.requests.get(key)) for key in order)
        return {
            key: request
            for key, request in found
            if request is not None and request.state is State.QUEUED
        }

    def _recount_worker(self, worker: Worker) -> None:
        requests = self._table.requests
        there = {key: one for key, one in worker.requests.items() if requests.get(key) is one}
        for request in requests.values():
            if worker in _needed(request):
                there.setdefault(request.key, request)
        worker.requests = {
            key: one for key, one in there.items()
            if one.state in PLACED and one.attempt.runs_on(worker)
        }  # fmt: skip
        worker.outstanding = sum(one.attempt.cost_on(worker) for one in requests.values())
        counted = [
            one.attempt for one in requests.values()
            if one.attempt.uncached >= 0 and one.attempt.assignee is worker
        ]  # fmt: skip
        worker.uncached = sum(one.uncached for one in counted if not one.late)
        worker.late = sum(one.uncached for one in counted if one.late)
        worker.prompts = len(counted)

    def _send_rest(self) -> None:
        """Send the token runs of a Tokens message that an error has left unfinished."""
        for client in self._clients.all():
            if client.runs:
                self._out.append(ToClient(client.identity, Tokens(runs=client.runs)))
                client.runs = []


def _needed(request: Request) -> tuple[Worker, ...]:
    """Return the workers without which the current attempt cannot continue."""
    attempt = request.attempt
    if request.state not in PLACED:
        return ()
    prefill = None if request.state is State.DECODING else attempt.prefill
    return tuple(worker for worker in (prefill, attempt.decode) if worker is not None)


def _may_run(worker: Worker) -> bool:
    return worker.state is not WorkerState.DEAD


def _is_broken(request: Request) -> bool:
    """Whether an error has left the record half changed."""
    try:
        check_request(request)
    except InternalError:
        return True
    return False


def _release(request: Request) -> None:
    """Make a record consistent that ends next. The attempt leaves its workers' load."""
    request.next = request.base + len(request.emitted)
    attempt = request.attempt
    attempt.prefill_cost = attempt.decode_cost = 0
    attempt.uncached = -1
    attempt.server = attempt.search = None
