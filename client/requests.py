"""All requests of a client: which answer belongs to which, and how each one ends. Pure.

Invariant: every started request gets exactly one Ended, unless the user stopped it without
``report``. :mod:`.request` has the record of one request.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from baton.proto.errors import (
    BatonError,
    CapacityError,
    ConnectionLost,
    DeadlineExceeded,
    InternalError,
    RequestFailed,
    RouterClosing,
    error_from_code,
)
from baton.proto.ids import request_key
from baton.proto.wire.messages import (
    FinalAck,
    Message,
    Moved,
    Submitted,
    Terminal,
    Tokens,
)
from baton.runtime.tables import KeyedHeap

from .events import Action, Ended, Raised, RequestSpec, Send
from .link import Link
from .request import DEADLINE_GRACE_S, Request, State

_STOPPING = State.STOPPING  # before Python 3.12, Enum member access is slow
TEXT = "the client failed to handle this request; its cause is an exception of the client itself"
"""The message of such an error, whose ``__cause__`` is the exception."""


class Requests:
    """All requests of a client that have not ended.

    ``connect_timeout``, ``reconnect_timeout``: see :class:`.core.ClientCore`.
    """

    def __init__(self, link: Link, *, connect_timeout: float, reconnect_timeout: float) -> None:
        self._link = link
        self._connect_timeout = connect_timeout
        self._reconnect_timeout = reconnect_timeout
        self._accept_timeout = max(connect_timeout, reconnect_timeout)
        self._by_id: dict[str, Request] = {}
        self._by_key: dict[bytes, Request] = {}
        self._waiting: KeyedHeap[str] = KeyedHeap()  # refused for lack of room, oldest first
        self._started = 0  # number of started requests, the serial of the latest

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    # ------------------------------------------------------------------ the user

    def start(self, spec: RequestSpec, now: float) -> list[Action]:
        """Start a request. Its id must not be in use."""
        self._started += 1
        request = self._by_id[spec.request_id] = Request(spec, self._started, now)
        return self._send(request, request.repeat(now)) if self._link.connected else []

    def stop(self, request_id: str, now: float, *, report: bool) -> list[Action]:
        """Cancel a request, if it has not ended. ``report``: return an Ended for it later."""
        request = self._by_id.get(request_id)
        if request is None:
            return []
        if request.state is State.STOPPING or request.waits or not self._link.connected:
            return self._stopped(request, report=report)
        request.stop(now, report=report)
        return self._send(request, request.repeat(now)) if now >= request.retry_at else []

    # ------------------------------------------------------------------ the connection

    def reconnected(self, now: float) -> list[Action]:
        """Continue all requests on a new connection."""
        actions: list[Action] = []
        for request in list(self._by_id.values()):
            try:
                if request.state is State.STOPPING:
                    actions += self._stopped(request, report=request.report)
                else:
                    actions += self._send(request, request.reconnected(now))
            except Exception as error:
                actions += self._harm(request, error)
        return actions

    def on_pong(self, since: float | None, now: float, *, lost: bool) -> list[Action]:
        """Repeat unanswered messages sent before ``since``: the router answers in order.

        ``since``: time of the ping that was answered; None if a later ping is unanswered.
        ``lost``: an earlier ping was lost, or its answer. Then tokens may be lost as well, and
        all open requests are resumed.
        """
        actions: list[Action] = []
        for request in list(self._by_id.values()):
            try:
                if since is not None:
                    actions += self._send(request, request.unheard(since, now))
                if lost and request.state is State.OPEN:
                    actions += self._send(request, request.resume(now))
            except Exception as error:
                actions += self._harm(request, error)
        return actions

    # ------------------------------------------------------------------ the router

    def on_submitted(self, message: Submitted) -> list[Action]:
        """Handle the router's confirmation that it accepted a request."""
        request = self._named(message.request_id, message.request)
        if request is None:
            return []
        self._by_key.pop(request.key, None)
        self._by_key[message.request] = request
        request.opened(message.request, message.secret, message.attempt)
        return self._end_if_complete(request)

    def on_tokens(self, message: Tokens, now: float) -> list[Action]:
        """Return the new tokens, and resume requests whose tokens have a gap."""
        actions: list[Action] = []
        find = self._by_key.get
        begun = {one.request: one for one in message.begun} if message.begun else None
        for run in message.runs:
            request = find(run.request)
            if request is None or request.state is _STOPPING:
                continue
            try:
                fresh = request.take(run, now)
                if fresh is not None:
                    if begun is not None:
                        fresh = replace(fresh, begun=begun.get(run.request))
                    actions.append(fresh)
                    if request.terminal is not None:
                        actions += self._end_if_complete(request)
                elif request.misses(run):
                    actions += self._send(request, request.resume(now))
            except Exception as error:
                actions += self._harm(request, error)
        return actions

    def on_terminal(self, message: Terminal, now: float) -> list[Action]:
        """End a request, or resume it if its last tokens are missing."""
        request = self._by_key.get(message.request)
        request = request or self._named(message.request_id, message.request)
        if request is None:
            # The client's FinalAck was lost. Without another, the router repeats the Terminal.
            return _acknowledge(message)
        if self._router_closes(request, message):
            # Not connected: another Terminal of the same envelope caused the move.
            return [self._link.move(now)] if self._link.connected else []
        if self._may_wait(request, message):
            self._started += 1
            self._by_key.pop(request.key, None)
            self._waiting.put(request.spec.request_id, request.started)
            request.wait_for_room(message.retry_after or 0.0, self._started, now)
            return _acknowledge(message)
        request.terminal = message
        if request.state is State.STOPPING:
            return self._stopped(request, report=request.report)
        return self._end_if_complete(request) or self._send(request, request.resume(now))

    def _router_closes(self, request: Request, message: Terminal) -> bool:
        """Whether the router rejects a request only because the router is shutting down.

        False after each router has done so once: the request then fails.
        """
        if message.code != RouterClosing.code or request.state is State.STOPPING:
            return False
        request.turned_away += 1
        return request.turned_away < self._link.routers.count

    def _may_wait(self, request: Request, message: Terminal) -> bool:
        """Whether the router refuses the request for lack of room, and it may be retried."""
        return (
            message.code in (CapacityError.code, RouterClosing.code)
            and request.state is not State.STOPPING
            and request.next == len(request.spec.context.tokens)
            and request.refusals < request.spec.max_retries
        )

    def on_moved(self, message: Moved, now: float) -> list[Action]:
        """Resume the request here: another router took it over because of a delayed message."""
        request = self._by_key.get(message.request)
        return [] if request is None else self._send(request, request.resume(now))

    def _named(self, request_id: str, key: bytes) -> Request | None:
        """Find a request by its id, unless ``key`` belongs to an earlier request with that id.

        A router without support for serials derives the key without a serial.
        """
        request = self._by_id.get(request_id)
        if request is None:
            return None
        if key in (b"", request.key) or key == request_key(self._link.identity, request_id):
            return request
        return None

    # ------------------------------------------------------------------ failures

    def fail(self, request_id: str, error: BatonError) -> list[Action]:
        """Fail one request."""
        return self._end(self._by_id[request_id], error=error)

    def fail_unanswered(self, error: BatonError) -> list[Action]:
        """Fail the requests that the router has neither accepted nor rejected."""
        return self._fail([one for one in self._by_id.values() if one.unanswered], error)

    def fail_all(self, error: BatonError) -> list[Action]:
        """Fail all requests, because no router can accept them."""
        return self._fail(list(self._by_id.values()), error)

    def _fail(self, requests: list[Request], error: BatonError) -> list[Action]:
        return [action for request in requests for action in self._end(request, error=error)]

    # ------------------------------------------------------------------ ends

    def _end_if_complete(self, request: Request) -> list[Action]:
        """End the request if its Terminal and all its tokens arrived, or if it failed."""
        terminal = request.terminal
        if terminal is None:
            return []
        if terminal.status is None:
            code = terminal.code or RequestFailed.code
            error = error_from_code(code, terminal.message, terminal.retry_after)
            return self._end(request, error=error)
        return [] if terminal.position > request.next else self._end(request, terminal.status)

    def _stopped(self, request: Request, *, report: bool) -> list[Action]:
        """Finish a cancelled request, after the router confirmed or when it cannot be reached."""
        return self._end(request, "cancelled") if report else self._remove(request)

    def _end(
        self, request: Request, status: str | None = None, *, error: BatonError | None = None
    ) -> list[Action]:
        terminal = request.terminal or Terminal(request=request.key)
        ended = Ended(
            request_id=request.spec.request_id,
            position=request.next,
            status=status,
            error=error,
            prefill=terminal.prefill,
            decode=terminal.decode,
            cached_tokens=terminal.cached_tokens,
            embedding=terminal.embedding,
            media=terminal.media,
            tokens_s=terminal.tokens_s,
            served=terminal.served,
        )
        return [*self._remove(request), ended]

    def _remove(self, request: Request) -> list[Action]:
        self._by_id.pop(request.spec.request_id, None)
        self._by_key.pop(request.key, None)
        self._waiting.drop(request.spec.request_id)
        while (oldest := self._waiting.pop(math.inf)) is not None:
            waiting = self._by_id[oldest]
            if waiting.waits:
                waiting.retry_at = 0.0  # the end of this request makes room for one
                break
        return [] if request.terminal is None else _acknowledge(request.terminal)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> list[Action]:
        """Repeat unanswered messages, and end requests whose time is over."""
        actions: list[Action] = []
        for request in list(self._by_id.values()):
            try:
                actions += self._check(request, now)
            except Exception as error:
                actions += self._harm(request, error)
        return actions

    # ------------------------------------------------------------------ our own errors

    def harm_named(self, request_id: str, key: bytes, error: Exception) -> list[Action]:
        """End the request whose event raised an exception of our own code, if there is one."""
        request = self._by_key.get(key) or self._by_id.get(request_id)
        return [] if request is None else self._harm(request, error)

    def _harm(self, request: Request, error: Exception) -> list[Action]:
        """End one request, whatever its state is."""
        own = InternalError(TEXT)
        own.__cause__ = error
        name = request.spec.request_id
        self._by_id.pop(name, None)
        self._by_key.pop(request.key, None)
        self._waiting.drop(name)
        ended = Ended(request_id=name, position=request.next, error=own)
        return [Raised(error), Send(request.cancel()), ended]

    def _check(self, request: Request, now: float) -> list[Action]:
        if request.state is State.STOPPING and now >= request.stop_until:
            return self._stopped(request, report=request.report)
        if now >= request.ends_by + DEADLINE_GRACE_S:
            limit = request.ends_by - request.started
            error = DeadlineExceeded(f"no end within {limit:g} s (deadline)")
            return [Send(request.cancel()), *self._end(request, error=error)]
        if self._silent_too_long(request, now):
            return self._end(request, error=self._unreachable(request))
        if request.unanswered and now - request.asked_at > self._accept_timeout:
            return [Send(request.cancel()), *self._end(request, error=self._unanswered())]
        if self._link.connected and now >= request.retry_at:
            return self._send(request, request.repeat(now))
        return []

    def _silent_too_long(self, request: Request, now: float) -> bool:
        limit = self._reconnect_timeout if request.secret else self._connect_timeout
        return now - max(self._link.alive_at, request.started) > limit

    def _unreachable(self, request: Request) -> ConnectionLost:
        routers, hint = self._link.routers.shown, self._link.hint
        if request.secret:
            return ConnectionLost(
                f"no connection to the router at {routers} for"
                f" {self._reconnect_timeout:g} s (reconnect_timeout){hint}"
            )
        if self._link.met:
            return ConnectionLost(
                f"the router at {routers} has accepted connections, but has sent nothing for"
                f" {self._connect_timeout:g} s (connect_timeout){hint}"
            )
        return ConnectionLost(
            f"no answer from {routers} within {self._connect_timeout:g} s"
            f" (connect_timeout); is a cluster running there? start one with: baton serve{hint}"
        )

    def _unanswered(self) -> ConnectionLost:
        """Return the error of a request that a router leaves unanswered but answers others."""
        longer = self._connect_timeout > self._reconnect_timeout
        setting = "connect_timeout" if longer else "reconnect_timeout"
        return ConnectionLost(
            f"the router at {self._link.routers.shown} answers, but has neither accepted nor"
            f" refused the request within {self._accept_timeout:g} s ({setting})"
        )

    def _send(self, request: Request, message: Message | None) -> list[Action]:
        if message is None:
            return []
        if not request.secret:
            # The router derives the same key, so tokens can be matched even before Submitted.
            self._by_key.pop(request.key, None)
            request.key = request_key(self._link.identity, request.spec.request_id, request.serial)
            self._by_key[request.key] = request
        return [Send(message)]


def _acknowledge(terminal: Terminal) -> list[Action]:
    return [Send(FinalAck(requests=[terminal.request]))] if terminal.request else []
