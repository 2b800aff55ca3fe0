"""Queries of clients, and of operators over the client socket: model, status, drains, pings.

A query has a few bytes and its answer megabytes: one envelope must not cause many answers, and a
client that reads too slowly gets none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import ClassVar

from baton.proto.errors import BatonError, InputError
from baton.proto.wire.messages import (
    Describe,
    Described,
    Drain,
    Drained,
    Message,
    Ping,
    Pong,
    Rejected,
    Status,
    StatusReport,
)

from .events import ClientInputRejected, ToClient, ToWorker
from .records import Caller
from .registry import last_worker
from .state import RouterState

_QUERIES = frozenset((Describe, Status))


class Queries:
    """Answers the messages of ClientToRouter that concern no request.

    ``report``: makes the status report (:mod:`.status`). ``files``: text files of the model folder
    by name, returned by Describe.
    """

    def __init__(
        self,
        state: RouterState,
        report: Callable[[Status, float, Caller], bytes],
        files: dict[str, bytes],
    ) -> None:
        self._config = state.config
        self._out = state.out
        self._registry = state.registry
        self._clients = state.clients
        self._metrics = state.metrics
        self._report = report
        self._files = files
        self._caller_of = state.authentication.client
        self._drains: dict[str, list[bytes]] = {}  # clients that wait for Drained, by worker id

    def handle(self, identity: bytes, message: Message, now: float) -> None:
        """Answer a query."""
        self._handlers[type(message)](self, identity, message, now)

    def _describe(self, identity: bytes, message: Describe, _now: float) -> None:
        wanted = {name: self._files[name] for name in message.files if name in self._files}
        folder = self._config.model_folder
        if not self._caller_of(identity).operator:
            folder = PurePath(folder).name
        answer = Described(
            model=self._registry.card,
            folder=folder,
            files=wanted,
            available=list(self._files),
        )
        self.answer(identity, answer)

    def _status(self, identity: bytes, message: Status, now: float) -> None:
        report = self._report(message, now, self._caller_of(identity))
        self.answer(identity, StatusReport(report=report, nonce=message.nonce))

    def _ping(self, identity: bytes, message: Ping, _now: float) -> None:
        self.answer(identity, Pong(nonce=message.nonce))

    def _drain(self, identity: bytes, message: Drain, now: float) -> None:
        """Forward an operator's Drain, which the timers repeat until the worker confirms."""
        try:
            worker = self._registry.named(message.worker)
            ready = self._registry.ready(worker.role)
            last = not worker.draining and all(other is worker for other in ready)
            if last and not message.force:
                raise InputError(last_worker(worker.id, worker.role))
        except BatonError as error:
            answer = Drained(worker=message.worker, code=error.code, message=str(error))
            self.answer(identity, answer)
            return
        self._registry.drain(worker)
        worker.drain_at = now + self._config.retry_ceiling_s
        self._out.append(ToWorker(worker.identity, Drain()))
        waiting = self._drains.setdefault(worker.id, [])
        if identity not in waiting:
            waiting.append(identity)
        # Answer with the name from the query, which may be an endpoint.
        self.answer(identity, Drained(worker=message.worker, message="draining"))

    def drained(self, worker_id: str) -> None:
        """Notify the clients that asked for the drain of a worker: it has no requests left."""
        for identity in self._drains.pop(worker_id, ()):
            self.answer(identity, Drained(worker=worker_id, message="drained"))

    def gone(self, identity: bytes) -> None:
        """Remove a lost connection from the clients that wait for a Drained."""
        for worker_id, waiting in list(self._drains.items()):
            if identity in waiting:
                waiting.remove(identity)
                if not waiting:
                    del self._drains[worker_id]

    def answer(self, identity: bytes, message: Message) -> None:
        """Send an answer, unless the client reads too slowly."""
        client = self._clients.get(identity)
        if client is None or not client.behind:
            self._out.append(ToClient(identity, message))

    def _pong(self, identity: bytes, message: Pong, now: float) -> None:
        """Ignore: a Pong needs no answer."""

    _handlers: ClassVar[dict[type, Callable[..., None]]] = {
        Describe: _describe,
        Status: _status,
        Drain: _drain,
        Ping: _ping,
        Pong: _pong,
    }

    def reject(self, event: ClientInputRejected, _now: float) -> None:
        """Send Rejected for bytes that could not be decoded."""
        error = event.error
        self._metrics.dropped[f"client_{error.code}"] += 1
        rejected = Rejected(code=error.code, message=str(error), request_id=event.request_id)
        self.answer(event.identity, rejected)


def merge_queries(messages: Sequence[Message]) -> Sequence[Message]:
    """Merge the Describe and the Status messages of an envelope into one of each kind.

    A query has a few bytes and its answer megabytes: one envelope must not cause many answers. The
    answer has the nonce of one Status, and the client asks the others again.
    """
    if sum([type(message) in _QUERIES for message in messages]) < 2:
        return messages
    describes = [message for message in messages if type(message) is Describe]
    statuses = [message for message in messages if type(message) is Status]
    rest = [message for message in messages if type(message) not in _QUERIES]
    if describes:
        names = dict.fromkeys(name for message in describes for name in message.files)
        rest.append(Describe(files=list(names)))
    if statuses:
        # Only one can name a request, so the answer belongs to it.
        asked = next((message for message in statuses if message.request), statuses[0])
        rest.append(
            Status(
                handoffs=max(message.handoffs for message in statuses),
                requests=max(message.requests for message in statuses),
                request=asked.request,
                failed=max(message.failed for message in statuses),
                history=max(message.history for message in statuses),
                metrics=any(message.metrics for message in statuses),
                nonce=asked.nonce,
            )
        )
    return rest
