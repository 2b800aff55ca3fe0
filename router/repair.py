"""Repair of the router's state after an exception of its own code.

Invariant: after :meth:`Repair.mend` the records, the sums and the indexes agree, so
:func:`check_state` passes, and every harmed request has one terminal (:mod:`.own_errors`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from baton.proto.errors import BatonError, InternalError
from baton.proto.wire.messages import Terminal, Tokens

from .events import ToClient
from .integrity import check_request
from .own_errors import TEXT
from .records import ENDED_KEEP_S, Request, Worker
from .state import RouterState
from .states import PLACED, State, WorkerState

AGAIN_S = 1.0
"""Seconds until the terminal of a harmed request is sent again."""


class Repair:
    """Ends the harmed requests and makes all sums and indexes again from the records."""

    def __init__(self, state: RouterState) -> None:
        self._out = state.out
        self._table = state.table
        self._registry = state.registry
        self._admission = state.admission
        self._clients = state.clients
        self._errors = state.errors

    def mend(
        self,
        end: Callable[[Request, BatonError, float], None],
        lost: Callable[[Request, str], None],
        now: float,
    ) -> None:
        """End the harmed requests and make all sums and indexes again from the records.

        ``end``: ends a request with an error. ``lost``: replays a request whose worker is gone.
        """
        errors = self._errors
        errors.fresh = False
        harmed, errors.harmed = errors.harmed, []
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
            self._errors.note(error, {"request": request.key.hex(), "where": "ending it"})
            self._errors.fresh = False
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


def check_state(state: RouterState) -> None:
    """Raise InternalError if records, counters and the workers' loads do not agree."""
    requests, admission = state.table.requests.values(), state.admission
    unfinished = [request for request in requests if not request.done]
    sums = (
        len(unfinished),
        sum(request.bytes for request in requests),
        sum(request.queued_tokens for request in unfinished),
    )
    if sums != (admission.requests, admission.context_bytes, admission.queued_tokens):
        raise InternalError(f"admission counts do not match the records' sums {sums}")
    for request in requests:
        check_request(request)
        if (request.key in state.table.queued) != (request.state is State.QUEUED):
            raise InternalError(f"{request.request_id} is queued, or should be")
    charged: defaultdict[Worker | None, int] = defaultdict(int)
    prompts: defaultdict[Worker | None, int] = defaultdict(int)
    for request in requests:
        attempt = request.attempt
        charged[attempt.prefill] += attempt.prefill_cost
        charged[attempt.decode] += attempt.decode_cost
        prompts[attempt.assignee] += max(0, attempt.uncached)
    for worker in state.registry.live():
        if worker.outstanding != charged[worker]:
            counted = f"{worker.outstanding} tokens outstanding"
            text = f"{counted}, the requests have {charged[worker]}"
            raise InternalError(f"{worker.id}: {text}")
        uncached = worker.uncached + worker.late
        if uncached != prompts[worker]:
            text = f"{uncached} uncached tokens, the requests have {prompts[worker]}"
            raise InternalError(f"{worker.id}: {text}")
        for key, request in worker.requests.items():
            if state.table.requests.get(key) is not request or not request.attempt.runs_on(worker):
                raise InternalError(f"{worker.id} keeps {request.request_id}, which it lost")
