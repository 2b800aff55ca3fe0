"""One connection of HTTP/1.1 with limits in size and time, which uvicorn's protocol lacks.

Its first bytes, each request's head, and the rest of a request that was answered early must arrive
within a time, and heads and trailers have a maximum size.
"""

from __future__ import annotations

import asyncio
import select
import urllib.parse
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import httptools
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl

from .connections import Phase, Place, nothing
from .exchange import Exchange

MAX_HEAD_BYTES = 16 << 10
_WHITE = b" \t"
_LONG_HEAD = "the request's head is too long"
_CODING = "the only transfer coding that this server knows is chunked"
_LINGER_S = 1.0
"""Seconds for which a refused client may go on sending."""
_SHORT_LINGER_S = 0.25
"""The same, while other clients wait to be refused."""
_UNREAD_S = 60.0
"""Seconds after which a connection ends whose client does not read its answer."""
_SOON_S = 0.1
"""Seconds in which bytes that have arrived are read."""
FIRST_REQUEST_S = 1.0
"""Seconds that a new connection has for its first request when the server stops."""
_NO_PIPELINE: deque[Any] = deque()
"""Of all connections without a request that waits for the answer to another one; stays empty."""


class LimitedHttp(HttpToolsProtocol):
    """HTTP/1.1 whose request heads are limited in size and time, and whose trailers in size.

    A request that continues after its answer is limited in time: the routes limit a body only while
    they read it.
    """

    head_timeout_s = 10.0

    # Besides the attributes of uvicorn these would be too many for a dict that shares its keys
    # with the other connections: 1.6 KB each.
    __slots__ = (
        "_blocked", "_closed", "_codings", "_exchange", "_head_bytes", "_hosts", "_idle_bytes",
        "_idle_since", "_idle_timer", "_in_head", "_leaves", "_lingers", "_place", "_refusal",
        "_timer",
    )  # fmt: skip

    def __init__(self, *settings: Any, **more: Any) -> None:
        super().__init__(*settings, **more)
        self.pipeline = _NO_PIPELINE
        self._head_bytes = 0
        self._idle_bytes = 0  # since the head or the last body part: trailers and chunk headers
        self._codings = b""  # of the request's transfer
        self._hosts = 0  # Host headers of the request
        self._in_head = True
        self._timer: asyncio.TimerHandle | None = None
        self._exchange: Exchange | None = None  # the last exchange that began
        self._blocked: asyncio.TimerHandle | None = None  # runs while the client does not read
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0  # the end of the last answer
        self._leaves = False  # the server stops: the first request here is the last
        self._lingers = False  # was refused: what still arrives is dropped
        self._refusal: _Refusal | None = None  # why the parser's callback has raised ValueError
        self._place = Place("", Phase.FRESH, 0.0)
        self._closed: Callable[[Place], object] | None = None

    def take(self, place: Place, closed: Callable[[Place], object]) -> None:
        """Take a place among the gateway's connections; call ``closed`` when it is free."""
        self._place, self._closed = place, closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request's head."""
        self.connections.add(self)
        self.transport = made = cast(asyncio.Transport, transport)
        self.flow = _Flow(made)
        self.server, self.client = get_local_addr(made), get_remote_addr(made)
        self.scheme = "https" if is_ssl(made) else "http"
        self.parser = _Parser(self)
        if self._closed is None:
            self._place = Place("", Phase.FRESH, self.loop.time())
        self._place.end = self._crowded_out
        is_refused = self._place.phase is Phase.REFUSED
        limit = FIRST_REQUEST_S if is_refused else self.head_timeout_s
        self._timer = self.loop.call_later(limit, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_timer()
        for timer in (self._blocked, self._idle_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        if self._exchange is not None:
            self._exchange.gone()
        self._place.end = nothing  # else the two keep each other in memory
        if self._closed is not None:
            self._closed(self._place)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of the head and of trailers; too many end the connection."""
        if self._lingers:
            return
        if self._in_head:
            self._head_bytes += len(data)
        else:
            # The parser keeps an unfinished trailer: dropping finished ones does not bound memory.
            self._idle_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("")
            return
        if self.transport.is_closing() or self._lingers:
            return
        size = self._head_bytes if self._in_head else self._idle_bytes
        if size > MAX_HEAD_BYTES:
            text = _LONG_HEAD if self._in_head else "the request's end is too long"
            self._refuse(_Refusal("431 Request Header Fields Too Large", text))
        elif self._in_head and self._head_bytes and self._timer is None:
            # A part of a further head on a kept connection. Most heads arrive as a whole.
            self._timer = self.loop.call_later(self.head_timeout_s, self._late)

    def on_url(self, url: bytes) -> None:
        """Limit the path like the rest of the head."""
        super().on_url(url)
        if len(self.url) > MAX_HEAD_BYTES:
            raise ValueError(_LONG_HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; ignore a trailer. Raises ValueError for a coding that is not read."""
        if not self._in_head:
            return
        name, value = name.lower(), value.rstrip(_WHITE)  # the parser removes what is in front
        if name == b"transfer-encoding":
            # The parser accepts any list that ends with chunked, and removes this coding alone.
            self._codings += value.lower()
            if self._codings != b"chunked":
                raise ValueError(_CODING)
        elif name == b"host":
            self._hosts += 1
        elif name == b"content-encoding" and value.lower() != b"identity":
            self._refusal = _ENCODED
            raise ValueError(_ENCODED.message)
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, which the routes limit."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Begin the request. Raises ValueError if its head is refused as a whole."""
        if self._head_bytes > MAX_HEAD_BYTES:  # or a part of the body has arrived with the head
            head = sum(len(name) + len(value) + 4 for name, value in self.headers)
            if len(self.url) + head > MAX_HEAD_BYTES:
                raise ValueError(_LONG_HEAD)
        if self._place.phase is Phase.REFUSED:
            self._refusal = _FULL
            raise ValueError(_FULL.message)
        if self._hosts != 1 and (self._hosts or self.parser.get_http_version() != "1.0"):
            self._refusal = _HOSTS
            raise ValueError(_HOSTS.message)
        self._in_head = False
        self._head_bytes = self._idle_bytes = self._hosts = 0
        self._codings = b""
        self._stop_timer()
        self._begin()

    def _begin(self) -> None:
        """Begin a request, or let it wait for the answer to the one before."""
        parser, scope = self.parser, self.scope
        version = parser.get_http_version()
        if version != "1.1":
            scope["http_version"] = version
        scope["method"] = parser.get_method().decode("ascii")
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["raw_path"] = url.path
        scope["query_string"] = url.query or b""
        before = self.cycle
        self.cycle = cycle = RequestResponseCycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=cast(asyncio.Event, _Signal()),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if before is None or before.response_complete:
            self._answer(cycle, getattr(self.app, "refuses", None))
        else:
            self.flow.pause_reading()
            if not self.pipeline:
                self.pipeline = deque()
            self.pipeline.appendleft((cycle, cast(Any, self.app)))

    def on_message_complete(self) -> None:
        """Expect the next head."""
        if self.parser.should_upgrade():
            return  # the body follows
        self._in_head = True
        self._stop_timer()
        super().on_message_complete()

    def _answer(
        self, cycle: RequestResponseCycle, refuses: Callable[[Scope], bool] | None = None
    ) -> None:
        """Answer a request. A pipelined one comes here after the answer before it.

        ``refuses``: of the application; it may answer a request at once. Under overload, a task for
        each refused request would take more time and memory than the requests that are served.
        """
        if self._leaves:
            cycle.keep_alive = False
        self._exchange = Exchange.begin(cycle, self._place)
        if refuses is not None and refuses(cast(Scope, cycle.scope)):
            return
        self.tasks.add(self.loop.create_task(self._run(cycle)))

    async def _run(self, cycle: RequestResponseCycle) -> None:
        """Run the application for one request, as uvicorn's ``run_asgi``.

        In a further coroutine, and with a callback at the task's end, it takes 2 % of a request.
        """
        try:
            await cast(ASGIApp, self.app)(
                cast(Scope, cycle.scope), cast(Receive, cycle.receive), cast(Send, cycle.send)
            )
        except BaseException:
            self.logger.exception("Exception in ASGI application")
            await self._fail(cycle)
        else:
            if not cycle.response_complete and not cycle.disconnected:
                self.logger.error("the application has not answered completely")
                await self._fail(cycle)
        finally:
            cycle.on_response = nothing
            self.tasks.discard(cast(Any, asyncio.current_task()))

    async def _fail(self, cycle: RequestResponseCycle) -> None:
        if cycle.response_started:
            self.transport.close()
        else:
            await cycle.send_500_response()

    def pause_writing(self) -> None:
        """Limit the time in which the client does not read its answer."""
        super().pause_writing()
        if self._blocked is None:
            self._blocked = self.loop.call_later(_UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue a stream whose client has read again."""
        if self._blocked is not None:
            self._blocked.cancel()
            self._blocked = None
        super().resume_writing()
        if self._exchange is not None:
            self._exchange.has_room()

    def on_response_complete(self) -> None:
        """Start the next request, or limit the time until it arrives.

        Also limit the time of what still arrives of an answered request.
        """
        self.server_state.total_requests += 1
        self._idle_since = now = self.loop.time()
        self._place.rests(now)
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._answer(self.pipeline.pop()[0])
        else:
            if self._idle_timer is None:
                self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._idle)
        cycle = self.cycle  # of the request that arrives now; a pipelined one has no answer yet
        unfinished = not self._in_head and cycle is not None and cycle.response_complete
        if unfinished and self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.head_timeout_s, self._late)

    def _idle(self) -> None:
        """Close a connection that is idle since its last answer; wait on if it is not.

        One timer runs on from request to request: uvicorn's, which each answer sets and each
        request cancels, takes several microseconds of a request.
        """
        self._idle_timer = None
        if self.transport.is_closing() or not self.cycle.response_complete:
            return  # the end of the running request sets the timer
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if self._head_bytes or not self._in_head:  # limited by the other timer
            left = self.timeout_keep_alive
        elif left <= 0 and self._has_unread():
            left = _SOON_S
        if left > 0:
            self._idle_timer = self.loop.call_later(left, self._idle)
        else:
            self.transport.close()

    def _has_unread(self) -> bool:
        """Whether a request may have arrived: a busy event loop runs timers before it reads."""
        connection = self.transport.get_extra_info("socket")
        if connection is None or connection.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def shutdown(self) -> None:
        """End the connection after its running request, or after the first one if it is new.

        The client of a new connection has sent its request, or is about to, and would be reset.
        """
        if not self._leaves and (self.cycle is None or self._has_unread()):
            self._leaves = True
            self._stop_timer()
            self._timer = self.loop.call_later(FIRST_REQUEST_S, self.transport.close)
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser does not accept. It does not pass on why the head was refused."""
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_Refusal("431 Request Header Fields Too Large", _LONG_HEAD))
        elif self._codings not in (b"", b"chunked"):
            self._refuse(_Refusal("501 Not Implemented", _CODING))
        else:
            self._refuse(_Refusal("400 Bad Request", "the request is not valid HTTP/1.1"))

    def _late(self) -> None:
        self._timer = None
        if not self._in_head:  # the request was answered long ago
            self.transport.close()
            return
        if self._in_head and self._head_bytes and not self.transport.is_closing():
            text = "the request's head did not arrive in time"
            self._refuse(_Refusal("408 Request Timeout", text))
        elif not self._head_bytes and self.cycle is None:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _crowded_out(self) -> None:
        """Make room for another connection at once."""
        is_plain = self.transport.can_write_eof()  # TLS would wait for the peer
        if not is_plain or self.transport.get_write_buffer_size():
            self.transport.abort()
            return
        if self._in_head and self._head_bytes:
            self.transport.write(_FULL.content())
        self.transport.close()

    def _refuse(self, refusal: _Refusal) -> None:
        """Answer, unless an answer has begun, and end the connection.

        A connection that is closed with unread bytes is reset, and the client may lose the answer.
        So what arrives is dropped until the client closes its half, for a limited time.
        """
        cycle = self.cycle
        runs = cycle is not None and not cycle.response_complete
        if runs and cycle.response_started:
            self.transport.close()
            return
        self.transport.write(refusal.content())
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        if runs:
            cycle.message_event.set()
            if self._exchange is not None:
                self._exchange.gone()
        self.transport.write_eof()
        self._lingers = True
        self.flow.resume_reading()
        self._stop_timer()
        limit = _SHORT_LINGER_S if self._place.phase is Phase.REFUSED else _LINGER_S
        self._timer = self.loop.call_later(limit, self.transport.close)


class _Signal:
    """An ``asyncio.Event`` that has waiting tasks seldom: until then it needs 1.2 KB less."""

    __slots__ = ("_event", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._event: asyncio.Event | None = None

    def set(self) -> None:
        """Wake the waiting tasks."""
        self._is_set = True
        if self._event is not None:
            self._event.set()

    def clear(self) -> None:
        """Let further tasks wait."""
        self._is_set = False
        if self._event is not None:
            self._event.clear()

    async def wait(self) -> None:
        """Wait until it is set."""
        if self._is_set:
            return
        if self._event is None:
            self._event = asyncio.Event()
        await self._event.wait()


class _Flow(FlowControl):
    """uvicorn's flow control of one connection, with a smaller event."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = self.write_paused = False
        signal = _Signal()
        signal.set()
        self._is_writable_event = cast(asyncio.Event, signal)


class _Parser(httptools.HttpRequestParser):
    """A parser of requests that ignores every Upgrade, as RFC 9110 (7.8) allows.

    Java's client asks for ``h2c`` with its first request. httptools takes what follows such a head
    for another protocol. A new parser, whose head nobody sees, goes on with the body.
    """

    __slots__ = ("_protocol",)

    def __init__(self, protocol: LimitedHttp, callbacks: _Rest | None = None) -> None:
        super().__init__(callbacks or protocol)
        self._protocol = protocol
        # As uvicorn: what follows the last request of a connection is no error.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Any) -> None:
        """Parse received bytes. Raises HttpParserError."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            protocol = self._protocol
            frames = (b"content-length", b"transfer-encoding")
            lines = [b"%b: %b\r\n" % one for one in protocol.headers if one[0] in frames]
            protocol.parser = rest = _Parser(protocol, _Rest(protocol))
            rest.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines))
            rest.feed_data(data[upgrade.args[0] :])


class _Rest:
    """The callbacks of a protocol, without those of the first head."""

    def __init__(self, protocol: LimitedHttp) -> None:
        self._protocol = protocol
        self._skips = True
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        """Begin a further request."""
        if not self._skips:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of its target."""
        if not self._skips:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        if not self._skips:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request; the first one runs already."""
        if not self._skips:
            self._protocol.on_headers_complete()
        self._skips = False


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The answer to a request that no route gets. ``header``: one more line."""

    status: str
    message: str
    code: str = "head"
    kind: str = "invalid_request_error"
    header: str = ""

    def content(self) -> bytes:
        """Return the answer's head and body."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        body = msgspec.json.encode({"error": error})
        head = (
            f"HTTP/1.1 {self.status}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{self.header}connection: close\r\n\r\n"
        )
        return head.encode() + body


_ENCODED = _Refusal(
    "415 Unsupported Media Type",
    "bodies of requests are read without a Content-Encoding",
    header="accept-encoding: identity\r\n",
)
_HOSTS = _Refusal(
    "400 Bad Request",
    "a request of HTTP/1.1 has one Host header, and one of HTTP/1.0 at most one",
)
_FULL = _Refusal(
    "503 Service Unavailable",
    "all connections of this gateway are in use; try again later",
    "gateway_full",
    "server_error",
    "retry-after: 1\r\n",
)
