"""The client's decisions: ``handle(event, now) -> list[Action]``, without I/O or clock.

The connection to a router is in :mod:`.link`, the requests are in :mod:`.requests`, and the queries
in :class:`Queries`. The core passes each event to these three, and chooses the order of their
actions. It handles token ids only, no text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from baton.proto.errors import (
    BatonError,
    CapacityError,
    ConnectionLost,
    DuplicateRequest,
    InternalError,
    VersionMismatch,
    error_from_code,
)
from baton.proto.wire.messages import (
    Describe,
    Described,
    Drain,
    Drained,
    Message,
    Moved,
    Ping,
    Pong,
    Rejected,
    Status,
    StatusReport,
    Submitted,
    Terminal,
    Tokens,
)

from .events import (
    Action,
    Answered,
    Ask,
    Connected,
    Disconnected,
    Ended,
    Event,
    Malformed,
    Raised,
    Reached,
    Received,
    Refused,
    Send,
    Start,
    Stop,
    Tick,
)
from .link import Link
from .requests import Requests

TICK_S = 0.05
IDLE_TICK_S = 1.0


class ClientCore:
    """State machine of one client.

    ``addresses``: the routers, used one at a time, first the first. ``connect_timeout``: seconds
    that a new request waits for routers that neither answer nor accept a connection.
    ``reconnect_timeout``: the same for a running request. The longer of the two also limits the
    wait for a request's Submitted, and for the model, while the router runs.
    """

    def __init__(
        self, *addresses: str, connect_timeout: float = 5.0, reconnect_timeout: float = 30.0
    ) -> None:
        self._link = Link(addresses)
        self._requests = Requests(
            self._link, connect_timeout=connect_timeout, reconnect_timeout=reconnect_timeout
        )
        longest = max(connect_timeout, reconnect_timeout)
        self._queries = Queries(self._link, longest)

    @property
    def active(self) -> bool:
        """Whether any request or query is unfinished."""
        return len(self._requests) > 0 or len(self._queries) > 0

    @property
    def tick_s(self) -> float | None:
        """Seconds between the Ticks that the core needs now; None: no Ticks."""
        if self.active:
            return TICK_S
        return IDLE_TICK_S if self._link.connected and self._link.routers.away else None

    @property
    def router(self) -> str:
        """The address of the router that the client is connected or connecting to."""
        return self._link.routers.current

    @property
    def unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event. Returns actions for the caller to perform in order.

        Never raises. An exception of our own code ends the request alone that the event is about.
        """
        try:
            return self._handlers[type(event)](self, event, now)
        except Exception as error:
            return self._harm(event, error)

    def _harm(self, event: Event, error: Exception) -> list[Action]:
        match event:
            case Start(spec=spec):
                harmed = self._requests.harm_named(spec.request_id, b"", error)
            case Stop(request_id=name):
                harmed = self._requests.harm_named(name, b"", error)
            case Received(message=Submitted() | Terminal() | Moved() | Rejected() as said):
                key = getattr(said, "request", b"")
                harmed = self._requests.harm_named(getattr(said, "request_id", ""), key, error)
            case _:
                harmed = []
        return harmed or [Raised(error)]

    # ------------------------------------------------------------------ the user

    def _start(self, event: Start, now: float) -> list[Action]:
        name = event.spec.request_id
        if name in self._requests:
            error = DuplicateRequest(f"request id {name!r} is in use")
            return [Ended(request_id=name, position=0, error=error)]
        self._wake(now)
        return self._requests.start(event.spec, now)

    def _stop(self, event: Stop, now: float) -> list[Action]:
        return self._requests.stop(event.request_id, now, report=event.report)

    def _ask(self, event: Ask, now: float) -> list[Action]:
        self._wake(now)
        self._queries.add(event, now)
        return self._send_queries(now)

    def _wake(self, now: float) -> None:
        if not self.active:
            self._link.wake(now)

    # ------------------------------------------------------------------ the connection

    def _connect(self, event: Connected, now: float) -> list[Action]:
        self._link.opened(event.identity, now)
        actions = self._requests.reconnected(now)
        self._queries.reconnected()
        return actions + self._send_queries(now)

    def _disconnect(self, _event: Disconnected, now: float) -> list[Action]:
        return [self._link.move(now)]

    def _reached(self, event: Reached, now: float) -> list[Action]:
        return self._link.home_is_back(event.address, now, active=self.active)

    def _malformed(self, event: Malformed, now: float) -> list[Action]:
        if isinstance(event.error, VersionMismatch):
            return self._mismatch(event.error, now)
        return []

    def _mismatch(self, error: VersionMismatch, now: float) -> list[Action]:
        """Try another router: during a rolling update, versions differ."""
        return self._try_next(error, now) if self._link.connected else []

    def _refused(self, event: Refused, now: float) -> list[Action]:
        """Try another router, which may allow the client's key."""
        self._link.hint = f" ({event.error})"
        if not event.final or self._link.connected:
            return []
        return self._try_next(event.error, now)

    def _try_next(self, error: BatonError, now: float) -> list[Action]:
        """Leave a router that refused the client. After all have refused it, fail all requests."""
        reconnect = self._link.refuse(now)
        if reconnect is not None:
            return [reconnect]
        return self._requests.fail_all(error) + self._queries.fail_all(error)

    # ------------------------------------------------------------------ the router

    def _receive(self, event: Received, now: float) -> list[Action]:
        self._link.heard(now)
        message, requests = event.message, self._requests
        match message:
            case Tokens():
                return requests.on_tokens(message, now)
            case Submitted():
                return requests.on_submitted(message)
            case Terminal():
                return requests.on_terminal(message, now)
            case Moved():
                return requests.on_moved(message, now)
            case Rejected():
                return self._rejected(message, now)
            case Described() | StatusReport() | Drained():
                answered = self._queries.take(message, now)
                return [] if answered is None else [answered]
            case Ping():
                return [Send(Pong(nonce=message.nonce))]
            case Pong():
                return self._ponged(message, now)
        raise InternalError(f"a router does not send {type(message).__name__}")

    def _rejected(self, message: Rejected, now: float) -> list[Action]:
        error = error_from_code(message.code, message.message)
        if message.request_id in self._requests:
            return self._requests.fail(message.request_id, error)
        if isinstance(error, VersionMismatch):
            return self._mismatch(error, now)
        return [] if message.request_id else self._rejected_unnamed(error)

    def _rejected_unnamed(self, error: BatonError) -> list[Action]:
        """Fail the messages that the router may have been unable to decode.

        Repeating such a message would not help. The rejection names no request, so it may concern
        any unanswered request. If all requests are answered, it concerns the oldest query.
        """
        return self._requests.fail_unanswered(error) or self._queries.fail_oldest(error)

    def _ponged(self, message: Pong, now: float) -> list[Action]:
        answered = self._link.ponged(message)
        if answered is None:
            return []
        pinged_at, lost = answered
        return self._requests.on_pong(pinged_at, now, lost=lost)

    # ------------------------------------------------------------------ time

    def _tick(self, _event: Tick, now: float) -> list[Action]:
        link = self._link
        link.tick(now, active=self.active)
        actions = self._requests.tick(now) + self._queries.expired(now)
        if self.active and link.connected:
            actions += self._send_queries(now)
            actions += link.keep_alive(now)
        elif self.active and link.overdue(now):
            actions.append(link.move(now))
        if link.connected:
            actions += link.go_home(now, active=self.active)
            actions += link.look_home(now)
        return actions

    def _send_queries(self, now: float) -> list[Action]:
        if not self._link.connected:
            return []
        return [Send(message) for message in self._queries.due(now)]

    _handlers: ClassVar[dict[type, Callable[..., list[Action]]]] = {
        Start: _start,
        Stop: _stop,
        Ask: _ask,
        Connected: _connect,
        Disconnected: _disconnect,
        Reached: _reached,
        Received: _receive,
        Malformed: _malformed,
        Refused: _refused,
        Tick: _tick,
    }


REPEAT_S = 1.0
NO_MODEL_REPEAT_S = 0.1
"""Seconds until the query for the model is repeated, if the router has no worker yet."""
_ABOUT: dict[type, tuple[str, str]] = {
    Describe: ("the model", "connect_timeout"),
    Status: ("the status", "timeout"),
    Drain: ("a drain", "timeout"),
}
"""Subject of each query, and the setting that limits the wait, for error messages."""


@dataclass(slots=True, eq=False)
class _Open:
    """A query without an answer."""

    ask: Ask
    asked_at: float
    expires: float
    repeat_at: float
    modelless: bool = False  # answered, but no worker had registered yet


class Queries:
    """All open queries of a client.

    A query is repeated until its answer arrives, so there may be several answers. A StatusReport
    belongs to the Status with its nonce, or to the oldest if an old router sends none. Any other
    answer belongs to the oldest query of its kind. Surplus answers are ignored.
    """

    def __init__(self, link: Link, patience: float) -> None:
        self._link = link
        self._patience = patience
        self._open: list[_Open] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, ask: Ask, now: float) -> None:
        """Add a query. The next :meth:`due` returns it."""
        if isinstance(ask.message, Status):
            ask = Ask(ask.ticket, replace(ask.message, nonce=ask.ticket), ask.timeout)
        self._open.append(_Open(ask, now, now + ask.timeout, now))

    def due(self, now: float) -> list[Message]:
        """Return the queries to send or repeat now."""
        due = [query for query in self._open if now >= query.repeat_at]
        for query in due:
            query.repeat_at = now + REPEAT_S
        return [query.ask.message for query in due]

    def reconnected(self) -> None:
        """Make all open queries due, because the new connection has received none of them."""
        for query in self._open:
            query.repeat_at = 0.0

    def take(self, answer: Message, now: float) -> Answered | None:
        """Match ``answer`` to a query. None if no query is settled."""
        for query in self._open:
            if not _answers(query.ask.message, answer):
                continue
            if isinstance(answer, Described) and answer.model is None:
                query.modelless = True
                query.repeat_at = now + NO_MODEL_REPEAT_S
                return None
            self._open.remove(query)
            return Answered(query.ask.ticket, _checked(answer))
        return None

    def fail_oldest(self, error: BatonError) -> list[Action]:
        """Fail the oldest query, which a rejection without a request id must concern."""
        return [Answered(self._open.pop(0).ask.ticket, error)] if self._open else []

    def fail_all(self, error: BatonError) -> list[Action]:
        """Fail all queries, because no router can answer them."""
        failed: list[Action] = [Answered(query.ask.ticket, error) for query in self._open]
        self._open.clear()
        return failed

    def expired(self, now: float) -> list[Action]:
        """Remove and fail the queries whose timeout has passed."""
        over = [query for query in self._open if now >= self._expires(query)]
        for query in over:
            self._open.remove(query)
        return [Answered(query.ask.ticket, self._why(query, now)) for query in over]

    def _expires(self, query: _Open) -> float:
        """Return the time at which a query fails.

        The user limits the wait for a status or a drain. The query for the model precedes a
        request, so it waits for a router that runs, as the request would.
        """
        if query.modelless or not isinstance(query.ask.message, Describe):
            return query.expires
        longest = query.asked_at + max(query.ask.timeout, self._patience)
        return min(max(query.expires, self._link.alive_at + query.ask.timeout), longest)

    def _why(self, query: _Open, now: float) -> BatonError:
        address = self._link.routers.shown
        if query.modelless:
            return CapacityError(f"the router at {address} has no worker yet", retry_after=1.0)
        about, setting = _ABOUT[type(query.ask.message)]
        limit = query.ask.timeout
        if self._link.met:
            if now >= query.asked_at + self._patience > query.expires:
                limit, setting = self._patience, "reconnect_timeout"
            return ConnectionLost(
                f"the router at {address} runs, but has not answered the query for {about}"
                f" within {round(limit, 2):g} s ({setting})"
            )
        return ConnectionLost(
            f"no answer from {address} to the query for {about} within "
            f"{round(limit, 2):g} s ({setting}); is a cluster running there? "
            f"start one with: baton serve{self._link.hint}"
        )


def _answers(query: Message, answer: Message) -> bool:
    match query, answer:
        case Describe(), Described():
            return set(answer.files) == set(query.files) & set(answer.available)
        case Status(), StatusReport():
            return answer.nonce in (0, query.nonce)
        case Drain(), Drained():
            return query.worker == answer.worker
    return False


def _checked(answer: Message) -> Message | BatonError:
    if isinstance(answer, Drained) and answer.code is not None:
        return error_from_code(answer.code, answer.message)
    return answer
