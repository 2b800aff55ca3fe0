"""The answer to one HTTP request, written to its connection without coroutines.

ASGI sends each part of an answer through a chain of coroutines, which costs more than making an
event of a stream. Routes with much traffic write by an :class:`Exchange` instead, and the others by
ASGI's ``send``. A request has one answer, by either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from starlette.responses import Response
from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from baton.proto.errors import InternalError

from .connections import Place
from .metrics import GatewayMetrics

_KEY: Final = "baton.exchange"
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b"
_EVENTS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\nx-accel-buffering: no\r\n%b%b\r\n"
)
_CHUNKED = b"transfer-encoding: chunked\r\n"
_EVENT_CHUNK = b"%x\r\n%b%b%b\r\n"
_CHUNK = b"%x\r\n%b\r\n"
_LAST_CHUNK = b"0\r\n\r\n"

Callback = Callable[[], object]
MOST_MESSAGES = 8
"""Maximum messages of the router whose events are held: each may take a millisecond."""


class WriteBatch:
    """Streams whose events are written together, after the router's messages are handled.

    A write takes as long as all other work on a token. If several messages have arrived at once,
    each stream has one write, and the kernel and the interpreter displace each other less from the
    caches. ``metrics``: gets the time at which a message arrived.
    """

    def __init__(self, metrics: GatewayMetrics | None = None) -> None:
        self._metrics = metrics or GatewayMetrics()
        self.is_open = False
        self.held: list[Exchange] = []
        self._messages = 0

    def begin(self) -> None:
        """Hold the events of a further message."""
        self._messages += 1
        if self._messages > MOST_MESSAGES:
            self.end()
        self.is_open = True
        self._metrics.time = time.perf_counter()

    def end(self) -> None:
        """Write all held events."""
        self.is_open = False
        self._messages = 0
        self._metrics.time = 0.0
        held, self.held = self.held, []
        for exchange in held:  # a failure ends one connection alone: others are waiting
            try:
                exchange.flush()
            except Exception as error:
                self._metrics.own_error(error, exchange.path)
                exchange.abort()


_UNBATCHED = WriteBatch()  # never opened


class Exchange:
    """One request and its answer. ``cycle``: uvicorn's state of them.

    ``place``: of the connection. ``fields``: the request's headers by name, once they are known.
    ``headers``: header lines that the answer has besides its own.
    ``status``: 0 before the answer. ``batch``: may hold the events of a stream; a closed
    one writes each at once. ``flow``: its ``write_paused`` is true while the client reads too
    slowly, so that no event should be written.

    HTTP/1.0 has no chunks: the end of the connection ends an answer of unknown length.
    """

    __slots__ = (
        "_chunks", "_cycle", "_held", "_on_gone", "_on_room", "_parts", "_place",
        "_transport", "batch", "fields", "flow", "headers", "status",
    )  # fmt: skip

    def __init__(self, cycle: RequestResponseCycle, place: Place) -> None:
        self._cycle = cycle
        self._place = place
        self._transport = cycle.transport
        self._chunks = cycle.scope["http_version"] != "1.0"
        self.flow = cycle.flow
        self._on_gone: Callback | None = None
        self._on_room: Callback | None = None
        self._held = b""  # events that the batch holds
        self._parts = False  # ASGI's answer has no length
        self.fields: dict[bytes, bytes] = {}
        self.headers = b""
        self.status = 0
        self.batch = _UNBATCHED

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """Return the exchange of a request. Raises InternalError under another server."""
        exchange = cls.find(scope)
        if exchange is None:
            raise InternalError("this route needs the gateway's own HTTP server")
        return exchange

    @staticmethod
    def find(scope: Scope) -> Exchange | None:
        """Return the exchange of a request, or None under another server."""
        exchange: Exchange | None = scope.get(_KEY)
        return exchange

    @classmethod
    def begin(cls, cycle: RequestResponseCycle, place: Place) -> Exchange:
        """Return a new exchange, which the request's scope then has."""
        scope: Scope = cycle.scope  # type: ignore[assignment]  # a TypedDict without this key
        exchange = scope[_KEY] = cls(cycle, place)
        return exchange

    @staticmethod
    def end(scope: Scope) -> None:
        """Take the exchange out of its request's scope: else the two keep each other in memory."""
        scope.pop(_KEY, None)

    @property
    def path(self) -> str:
        """The path of the request."""
        return self._cycle.scope["path"]

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer was written."""
        return self._cycle.response_complete

    # ------------------------------------------------------------------ the connection

    def admitted(self) -> None:
        """Keep the connection while its request runs: it may run."""
        self._place.works()

    def watch(self, on_gone: Callback, on_room: Callback) -> None:
        """Call ``on_gone`` if the client closes its connection, also if it has done so already.

        Call ``on_room`` when events can be written again, after the client read too slowly.
        """
        self._on_gone, self._on_room = on_gone, on_room
        if self._cycle.disconnected:
            self.gone()
        else:
            self.flow.resume_reading()  # paused by a large body: no end would be noticed

    def unwatch(self) -> None:
        """Call none of the watchers any more."""
        self._on_gone = self._on_room = None

    def gone(self) -> None:
        """The client has closed its connection."""
        self._cycle.disconnected = True
        if self._on_gone is not None:
            self._on_gone()

    def has_room(self) -> None:
        """Events can be written again."""
        if self._on_room is not None:
            self._on_room()

    def take_body(self) -> bytes | None:
        """Return the body if all of it has arrived and none of it was read, else None."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()  # the next message of ASGI is the end of the connection
        self.flow.resume_reading()
        return body

    # ------------------------------------------------------------------ the answer

    def respond(self, body: bytes) -> None:
        """Answer with JSON and status 200."""
        self._begin()
        self._write(_JSON % (len(body), self._lines(), body))
        self._complete()

    def refuse(self, response: Response) -> None:
        """Answer a request, whose method is POST, with a whole response."""
        self._begin()
        lines = [b"%b: %b\r\n" % pair for pair in response.raw_headers]
        status = self.status = response.status_code
        head = b"HTTP/1.1 %d %b\r\n" % (status, HTTPStatus(status).phrase.encode())
        self._write(b"".join([head, *lines, self._lines(), b"\r\n", response.body]))
        self._complete()

    def event(self, content: bytes) -> None:
        """Write events of a stream; the first ones begin the answer."""
        chunk = _CHUNK % (len(content), content) if self._chunks else content
        self._add(chunk if self.status else self._opening() + chunk)

    def next_event(self, before: bytes, text: bytes, after: bytes) -> None:
        """Write an event, not the first one, in three parts; takes less time than :meth:`event`."""
        if self._chunks:
            chunk = _EVENT_CHUNK % (len(before) + len(text) + len(after), before, text, after)
        else:
            chunk = before + text + after
        batch = self.batch
        if self._held or not batch.is_open:
            self._add(chunk)
        else:
            self._held = chunk
            batch.held.append(self)

    def last_event(self, content: bytes) -> None:
        """Write the last events of a stream."""
        chunk = _CHUNK % (len(content), content) + _LAST_CHUNK if self._chunks else content
        self._write(chunk if self.status else self._opening() + chunk)
        self._complete()

    def failed(self, error: bytes) -> None:
        """End an answer that has begun with an event of this error.

        If that raises, the connection ends too.
        """
        if self.is_complete:
            return
        try:
            self.last_event(b"data: " + error + b"\n\n")
        except Exception:
            self.abort()
            raise

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    def frame(self, message: Message) -> None:
        """Keep uvicorn from sending chunks in an answer by ASGI to HTTP/1.0; before each message.

        uvicorn counts what is left of the answer's length; here each part is all that is left.
        """
        if self._chunks:
            return
        cycle = self._cycle
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            cycle.chunked_encoding = None if b"content-length" in names else False
            self._parts = b"content-length" not in names
        elif self._parts:
            cycle.expected_content_length = len(message.get("body", b""))

    def _opening(self) -> bytes:
        self._begin()
        return _EVENTS % (_CHUNKED if self._chunks else b"", self._lines())

    def _lines(self) -> bytes:
        return self.headers if self._cycle.keep_alive else self.headers + b"connection: close\r\n"

    def _begin(self) -> None:
        self.status = 200
        self._cycle.response_started = True
        self._cycle.waiting_for_100_continue = False

    def _add(self, data: bytes) -> None:
        """Write a part of the answer that is not the last one, or let the batch hold it."""
        if not self.batch.is_open:
            self._write(data)
        elif self._held:
            self._held += data
        else:
            self._held = data
            self.batch.held.append(self)

    def flush(self) -> None:
        """Write the held events."""
        data, self._held = self._held, b""
        if data and not self._cycle.disconnected and not self._transport.is_closing():
            self._transport.write(data)

    def _write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        if not self._cycle.disconnected and not self._transport.is_closing():
            self._transport.write(data)

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()
