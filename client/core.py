"""The client's decisions: ``handle(event, now) -> list[Action]``, without I/O or clock.

Invariants:

- Every started request gets exactly one Ended, unless the user stopped it without ``report``.
- A request's tokens are delivered once and in order.
- An unanswered message is repeated until the answer, the deadline, or a timeout of the router.

The core handles token ids only, no text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from ..proto.errors import (
    BatonError,
    ConnectionLost,
    DeadlineExceeded,
    DuplicateRequest,
    RequestFailed,
    RouterClosing,
    VersionMismatch,
    error_from_code,
)
from ..proto.ids import request_key
from ..proto.wire.messages import (
    Described,
    Drained,
    FinalAck,
    Message,
    Moved,
    Ping,
    Pong,
    Rejected,
    StatusReport,
    Submitted,
    Terminal,
    Tokens,
)
from .events import (
    Action,
    Ask,
    Connected,
    Disconnected,
    Ended,
    Event,
    Look,
    Malformed,
    Reached,
    Received,
    Reconnect,
    Refused,
    Send,
    Start,
    Stop,
    Tick,
)
from .questions import Questions
from .routers import Routers
from .stream import DEADLINE_GRACE_S, State, Stream

PING_S = 1.0
SILENCE_S = 3.0
"""Seconds without a message after which an open connection counts as dead."""
SUSPENDED_S = 2.0
"""Delay of a tick that means this process was suspended, so that the router was not silent."""
SOON_S = 0.5
"""Replaces ``PING_S`` and ``SUSPENDED_S`` if the client has several routers."""
SILENCE_THEN_S = 1.5
"""Replaces ``SILENCE_S`` if the client has several routers: then it moves to the next router."""
TICK_S = 0.05
IDLE_TICK_S = 1.0


class ClientCore:
    """State machine of one client.

    ``addresses``: the routers, used one at a time, first the first. ``connect_timeout``: seconds
    that a new request waits for routers that do not answer. ``reconnect_timeout``: the same for a
    running request. The longer of the two also limits the wait for a request's Submitted while
    the router answers other messages.
    """

    def __init__(
        self, *addresses: str, connect_timeout: float = 5.0, reconnect_timeout: float = 30.0
    ) -> None:
        self._routers = Routers(addresses)
        self._connect_timeout = connect_timeout
        self._reconnect_timeout = reconnect_timeout
        self._accept_timeout = max(connect_timeout, reconnect_timeout)
        self._streams: dict[str, Stream] = {}
        self._by_key: dict[bytes, Stream] = {}
        self._started = 0  # number of started requests, the serial of the latest
        self._questions = Questions(self._routers.shown)
        self._out: list[Action] = []
        self._identity = b""
        self._connected = False
        self._heard_at = float("-inf")  # last message of the router
        self._quiet_since = 0.0  # last message, connection or start of activity
        self._ping_at = 0.0
        self._pinged_at = 0.0
        self._pings = 0  # number of pings sent, the nonce of the latest
        self._ponged = 0  # nonce of the latest ping that was answered
        self._ticked = 0.0
        self._hint = ""  # why the last handshake failed

    @property
    def active(self) -> bool:
        """Whether any request or query is unfinished."""
        return bool(self._streams) or len(self._questions) > 0

    @property
    def tick_s(self) -> float | None:
        """Seconds between the Ticks that the core needs now; None: no Ticks."""
        if self.active:
            return TICK_S
        return IDLE_TICK_S if self._connected and self._routers.away else None

    @property
    def router(self) -> str:
        """The address of the router that the client is connected or connecting to."""
        return self._routers.current

    @property
    def unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event. Returns actions for the caller to perform in order."""
        self._handlers[type(event)](self, event, now)
        actions, self._out = self._out, []
        return actions

    # ------------------------------------------------------------------ the user

    def _start(self, event: Start, now: float) -> None:
        spec = event.spec
        if spec.request_id in self._streams:
            text = f"request id {spec.request_id!r} is in use"
            self._out.append(
                Ended(request_id=spec.request_id, position=0, error=DuplicateRequest(text))
            )
            return
        self._wake(now)
        self._started += 1
        stream = self._streams[spec.request_id] = Stream(spec, self._started, now)
        if self._connected:
            self._say(stream, stream.repeat(now))

    def _stop(self, event: Stop, now: float) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            return
        if stream.state is State.STOPPING or not self._connected:
            self._stopped(stream, report=event.report)
            return
        stream.stop(now, report=event.report)
        if now >= stream.retry_at:
            self._say(stream, stream.repeat(now))

    def _ask(self, event: Ask, now: float) -> None:
        self._wake(now)
        self._questions.add(event, now)
        self._send_questions(now)

    def _wake(self, now: float) -> None:
        """Reset the silence timers if the client was idle, because they did not run."""
        if not self.active:
            self._quiet_since = self._ticked = now
            self._ping_at = now + self._ping_s
            if not self._connected:
                self._routers.trying(now)

    # ------------------------------------------------------------------ the connection

    def _connect(self, event: Connected, now: float) -> None:
        self._identity = event.identity
        self._connected = True
        self._questions.hint = self._hint = ""
        self._routers.connected(now)
        self._quiet_since = now
        self._ping_at = now + self._ping_s
        self._ponged = self._pings  # pings on the previous connection are not answered any more
        for stream in list(self._streams.values()):
            if stream.state is State.STOPPING:
                self._stopped(stream, report=stream.report)
            else:
                self._say(stream, stream.reconnected(now))
        self._questions.reconnected()
        self._send_questions(now)

    def _disconnect(self, _event: Disconnected, now: float) -> None:
        self._move(now)

    def _move(self, now: float) -> None:
        """Connect to the next router, or again to the only router. Requests continue there."""
        self._connected = False
        self._out.append(Reconnect(self._routers.move(now)))

    def _reached(self, event: Reached, now: float) -> None:
        if event.address == self._routers.home and self._routers.away:
            self._routers.home_is_back = True
            self._maybe_go_home(now)

    def _maybe_go_home(self, now: float) -> None:
        """Return to the home router if nothing runs. Moving a running request gains nothing."""
        if self._routers.home_is_back and not self.active:
            self._connected = False
            self._out.append(Reconnect(self._routers.go_home(now)))

    def _malformed(self, event: Malformed, now: float) -> None:
        if isinstance(event.error, VersionMismatch):
            self._mismatch(event.error, now)

    def _mismatch(self, error: VersionMismatch, now: float) -> None:
        """Try another router: during a rolling update, versions differ. Else fail all requests."""
        if not self._connected:
            return
        if self._routers.refuse():
            self._fail_all(error)
        else:
            self._move(now)

    def _refused(self, event: Refused, now: float) -> None:
        """Try another router, which may allow the client's key. Else fail all requests."""
        self._questions.hint = self._hint = f" ({event.error})"
        if not event.final or self._connected:
            return
        if self._routers.refuse():
            self._fail_all(event.error)
        else:
            self._move(now)

    # ------------------------------------------------------------------ the router

    def _receive(self, event: Received, now: float) -> None:
        self._heard_at = self._quiet_since = now
        self._messages[type(event.message)](self, event.message, now)

    def _submitted(self, message: Submitted, now: float) -> None:
        stream = self._named(message.request_id, message.request)
        if stream is not None:
            self._by_key.pop(stream.key, None)
            self._by_key[message.request] = stream
            stream.opened(message.request, message.secret, message.attempt)
            self._end_if_complete(stream)

    def _tokens(self, message: Tokens, now: float) -> None:
        for run in message.runs:
            stream = self._by_key.get(run.request)
            if stream is None or stream.state is State.STOPPING:
                continue
            fresh = stream.take(run, now)
            if fresh is not None:
                self._out.append(fresh)
                self._end_if_complete(stream)
            elif stream.misses(run):
                self._say(stream, stream.resume(now))

    def _terminal(self, message: Terminal, now: float) -> None:
        stream = self._by_key.get(message.request)
        stream = stream or self._named(message.request_id, message.request)
        if stream is None:
            # The client's FinalAck was lost. Without another, the router repeats the Terminal.
            self._acknowledge(message)
            return
        if self._closes(stream, message):
            if self._connected:  # else another Terminal of the same envelope caused the move
                self._move(now)
            return
        stream.terminal = message
        if stream.state is State.STOPPING:
            self._stopped(stream, report=stream.report)
        elif not self._end_if_complete(stream):
            self._say(stream, stream.resume(now))

    def _closes(self, stream: Stream, message: Terminal) -> bool:
        """Whether the router rejects a request only because the router is shutting down.

        False after each router has done so once: the request then fails.
        """
        if message.code != RouterClosing.code or stream.state is State.STOPPING:
            return False
        stream.turned_away += 1
        return stream.turned_away < self._routers.count

    def _moved(self, message: Moved, now: float) -> None:
        """Resume the request here: another router took it over because of a delayed message."""
        stream = self._by_key.get(message.request)
        if stream is not None:
            self._say(stream, stream.resume(now))

    def _rejected(self, message: Rejected, now: float) -> None:
        error = error_from_code(message.code, message.message)
        stream = self._streams.get(message.request_id)
        if stream is not None:
            self._end(stream, error=error)
        elif isinstance(error, VersionMismatch):
            self._mismatch(error, now)
        elif not message.request_id:
            self._rejected_unnamed(error)

    def _rejected_unnamed(self, error: BatonError) -> None:
        """Fail the messages that the router may have been unable to decode.

        Repeating such a message would not help. The rejection names no request, so it may concern
        any unanswered request. If all requests are answered, it concerns the oldest query.
        """
        waiting = [stream for stream in self._streams.values() if stream.unanswered]
        for stream in waiting:
            self._end(stream, error=error)
        failed = None if waiting else self._questions.fail_oldest(error)
        if failed is not None:
            self._out.append(failed)

    def _answer(self, message: Message, now: float) -> None:
        answered = self._questions.take(message, now)
        if answered is not None:
            self._out.append(answered)

    def _ping(self, message: Ping, _now: float) -> None:
        self._out.append(Send(Pong(nonce=message.nonce)))

    def _pong(self, message: Pong, now: float) -> None:
        """Repeat unanswered messages that were sent before the last ping, because they are lost.

        The router answers in order, so a ping without an answer was lost, or its answer was. Then
        tokens may be lost as well, and all requests are resumed.
        """
        if not self._ponged < message.nonce <= self._pings:
            return
        lost = message.nonce > self._ponged + 1
        self._ponged = message.nonce
        for stream in list(self._streams.values()):
            if message.nonce == self._pings:
                self._say(stream, stream.unheard(self._pinged_at, now))
            if lost and stream.state is State.OPEN:
                self._say(stream, stream.resume(now))

    def _named(self, request_id: str, key: bytes) -> Stream | None:
        """Find a request by its id, unless ``key`` belongs to an earlier request with that id.

        A router without support for serials derives the key without a serial.
        """
        stream = self._streams.get(request_id)
        if stream is None or key in (b"", stream.key, request_key(self._identity, request_id)):
            return stream
        return None

    # ------------------------------------------------------------------ ends

    def _end_if_complete(self, stream: Stream) -> bool:
        """End the request if its Terminal and all its tokens arrived, or if it failed."""
        terminal = stream.terminal
        if terminal is None:
            return False
        if terminal.status is None:
            code = terminal.code or RequestFailed.code
            error = error_from_code(code, terminal.message, terminal.retry_after)
            self._end(stream, error=error)
            return True
        if terminal.position > stream.next:
            return False
        self._end(stream, status=terminal.status)
        return True

    def _stopped(self, stream: Stream, *, report: bool) -> None:
        """Finish a cancelled request, after the router confirmed or when it cannot be reached."""
        if report:
            self._end(stream, status="cancelled")
        else:
            self._forget(stream)

    def _end(
        self, stream: Stream, *, status: str | None = None, error: BatonError | None = None
    ) -> None:
        terminal = stream.terminal or Terminal(request=stream.key)
        self._forget(stream)
        self._out.append(
            Ended(
                request_id=stream.spec.request_id,
                position=stream.next,
                status=status,
                error=error,
                prefill=terminal.prefill,
                decode=terminal.decode,
                cached_tokens=terminal.cached_tokens,
                embedding=terminal.embedding,
            )
        )

    def _forget(self, stream: Stream) -> None:
        if stream.terminal is not None:
            self._acknowledge(stream.terminal)
        self._streams.pop(stream.spec.request_id, None)
        self._by_key.pop(stream.key, None)

    def _acknowledge(self, terminal: Terminal) -> None:
        if terminal.request:
            self._out.append(Send(FinalAck(requests=[terminal.request])))

    def _fail_all(self, error: BatonError) -> None:
        for stream in list(self._streams.values()):
            self._end(stream, error=error)
        self._out += self._questions.fail_all(error)

    # ------------------------------------------------------------------ time

    def _tick(self, _event: Tick, now: float) -> None:
        late = SOON_S if self._routers.several else SUSPENDED_S
        if now - self._ticked > late and self.active:
            self._heard_at = self._quiet_since = now
        self._ticked = now
        for stream in list(self._streams.values()):
            self._look_at(stream, now)
        self._out += self._questions.expired(now)
        if self._connected and self.active:
            self._send_questions(now)
            self._keep_alive(now)
        elif not self._connected and self.active and self._routers.overdue(now):
            self._move(now)
        if self._connected:
            self._maybe_go_home(now)
            if self._routers.wants_look(now):
                self._out.append(Look(self._routers.home))

    def _look_at(self, stream: Stream, now: float) -> None:
        if stream.state is State.STOPPING and now >= stream.stop_until:
            self._stopped(stream, report=stream.report)
        elif now >= stream.ends_by + DEADLINE_GRACE_S:
            self._out.append(Send(stream.cancel()))
            limit = stream.ends_by - stream.started
            self._end(stream, error=DeadlineExceeded(f"no end within {limit:g} s (deadline)"))
        elif self._silent_too_long(stream, now):
            self._end(stream, error=self._unreachable(stream))
        elif self._unanswered_too_long(stream, now):
            self._out.append(Send(stream.cancel()))
            self._end(stream, error=self._unanswered())
        elif self._connected and now >= stream.retry_at:
            self._say(stream, stream.repeat(now))

    def _silent_too_long(self, stream: Stream, now: float) -> bool:
        limit = self._reconnect_timeout if stream.secret else self._connect_timeout
        return now - max(self._heard_at, stream.started) > limit

    def _unanswered_too_long(self, stream: Stream, now: float) -> bool:
        """Whether the router, which answers other messages, leaves this request unanswered."""
        return stream.unanswered and now - stream.asked_at > self._accept_timeout

    def _unreachable(self, stream: Stream) -> ConnectionLost:
        if stream.secret:
            return ConnectionLost(
                f"no message from the router at {self._routers.shown} for"
                f" {self._reconnect_timeout:g} s (reconnect_timeout){self._hint}"
            )
        return ConnectionLost(
            f"no answer from {self._routers.shown} within {self._connect_timeout:g} s"
            f" (connect_timeout); is a cluster running there? start one with: baton serve"
            f"{self._hint}"
        )

    def _unanswered(self) -> ConnectionLost:
        return ConnectionLost(
            f"the router at {self._routers.shown} answers, but has neither accepted nor refused"
            f" the request within {self._accept_timeout:g} s (reconnect_timeout)"
        )

    @property
    def _ping_s(self) -> float:
        return SOON_S if self._routers.several else PING_S

    def _keep_alive(self, now: float) -> None:
        patience = SILENCE_THEN_S if self._routers.several else SILENCE_S
        if now - self._quiet_since > patience:
            self._move(now)
        elif now >= self._ping_at:
            self._ping_at, self._pinged_at = now + self._ping_s, now
            self._pings += 1
            self._out.append(Send(Ping(nonce=self._pings)))

    def _send_questions(self, now: float) -> None:
        if self._connected:
            self._out += [Send(message) for message in self._questions.due(now)]

    def _say(self, stream: Stream, message: Message | None) -> None:
        if message is None:
            return
        if not stream.secret:
            # The router derives the same key, so tokens can be matched even before Submitted.
            self._by_key.pop(stream.key, None)
            stream.key = request_key(self._identity, stream.spec.request_id, stream.serial)
            self._by_key[stream.key] = stream
        self._out.append(Send(message))

    _handlers: ClassVar[dict[type, Callable[..., None]]] = {
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
    _messages: ClassVar[dict[type, Callable[..., None]]] = {
        Submitted: _submitted,
        Tokens: _tokens,
        Terminal: _terminal,
        Moved: _moved,
        Rejected: _rejected,
        Described: _answer,
        StatusReport: _answer,
        Drained: _answer,
        Ping: _ping,
        Pong: _pong,
    }
