"""A target over HTTP: any server with OpenAI's routes for completions, chats or embeddings.

Completions and chats are streamed.

Connections are kept and reused. Cancelling a request closes its connection, as a user's client
does. The parser keeps a limited number of bytes, so a faulty server cannot fill the memory.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from baton.proto.errors import BatonError, CapacityError, ConfigError, ConnectionLost, RequestFailed

from .plan import Job
from .statistics import Record

CONNECT_S = 10.0
_READ_BYTES = 1 << 16
MAX_EVENT_BYTES = 4 << 20
MAX_EMBEDDINGS_BYTES = 128 << 20
_BUSY = (429, 503)
EMBEDDINGS = "embeddings"
ENDPOINTS = ("completions", "chat", EMBEDDINGS)
_WORDS = ("one", "two", "red", "sun", "sea", "day", "man", "cat", "box", "map", "old", "far")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Embeddings(msgspec.Struct):
    data: list[msgspec.Raw]
    usage: _Usage | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_events = msgspec.json.Decoder(_Event)


@dataclass(slots=True, frozen=True)
class Server:
    """Where a server listens. ``path``: of the API's root, such as ``/v1``."""

    host: str
    port: int
    path: str
    tls: bool
    key: str = ""

    @classmethod
    def parse(cls, url: str, key: str = "") -> Server:
        """Read ``http://HOST:PORT/v1``; without a path, ``/v1``. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as problem:
            raise ConfigError(f"{url} is not a URL: {problem}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url} is not a URL such as http://127.0.0.1:8000/v1")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/") or "/v1"
        return cls(parts.hostname, port or (443 if tls else 80), path, tls, key)

    def head(self, method: str, route: str, length: int) -> bytes:
        """Return the head of a request."""
        lines = [
            f"{method} {self.path}{route} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            f"Content-Length: {length}",
            "Content-Type: application/json",
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
        ]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


class _Response:
    """One response, from the parser's callbacks. ``most``: bytes of the body to keep."""

    def __init__(self, most: int = MAX_EVENT_BYTES) -> None:
        self.most = most
        self.parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.done = False
        self.keeps = False  # the connection can be used again

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.done = True
        self.keeps = bool(self.parser.should_keep_alive())

    def events(self) -> list[bytes]:
        """Take the data of the whole server-sent events so far."""
        *whole, rest = bytes(self.body).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise RequestFailed("an event of the stream is too long")
        self.body[:] = rest
        return [event[5:].strip() for event in whole if event.startswith(b"data:")]


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def ended(self) -> bool:
        """Whether the server has closed the connection."""
        return self._reader.at_eof()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def read(self, response: _Response) -> None:
        """Read more of a response. Raises ConnectionLost, RequestFailed."""
        data = await self._reader.read(_READ_BYTES)
        if not data:
            raise ConnectionLost("the server closed the connection")
        try:
            response.parser.feed_data(data)
        except httptools.HttpParserError as problem:
            raise RequestFailed(f"the answer is not HTTP: {problem}") from None
        if len(response.body) > response.most + _READ_BYTES:  # events() takes out whole events
            raise RequestFailed("the answer is too long")

    def close(self) -> None:
        self._writer.close()


class HttpTarget:
    """A server.

    ``endpoint``: "completions" or "embeddings" with token ids as prompts, or "chat" with words.
    """

    def __init__(
        self,
        server: Server,
        *,
        endpoint: str = "completions",
        model: str = "",
        ignore_eos: bool = True,
        temperature: float = 0.0,
    ) -> None:
        self._server = server
        self._endpoint = endpoint
        self.model = model
        self.longest = 0
        self._embeds = endpoint == EMBEDDINGS
        self._fields = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {})}
        self._idle: list[_Connection] = []

    async def find_model(self) -> None:
        """Ask for the served models; take the first unless one is named. Raises BatonError."""
        status, body = await self._get("/models")
        if status != 200:
            raise RequestFailed(f"/models answers {status}: {body[:200].decode(errors='replace')}")
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except msgspec.DecodeError as problem:
            raise RequestFailed(f"/models answers no list of models: {problem}") from None
        found = [one for one in models if not self.model or one.id == self.model]
        if not found:
            raise ConfigError(f"the server has no model {self.model!r}")
        self.model, self.longest = found[0].id, found[0].max_model_len or 0

    async def send(self, job: Job, record: Record) -> None:
        """Send a job and record when its events arrive; usage counts its tokens."""
        route, body = self._request(job)
        response = _Response(MAX_EMBEDDINGS_BYTES if self._embeds else MAX_EVENT_BYTES)
        whole, status = False, 0
        connection = await self._connection()
        try:
            connection.send(self._server.head("POST", route, len(body)) + body)
            while not response.done:
                await connection.read(response)
                status = response.parser.get_status_code()
                if status == 200 and not self._embeds:
                    self._take(response.events(), record)
            if status != 200:
                raise _refusal(status, bytes(response.body))
            if self._embeds:
                _take_embeddings(bytes(response.body), job, record)
            whole = response.keeps
        finally:
            if whole:
                self._idle.append(connection)
            else:
                connection.close()
        if not record.stamps:
            raise RequestFailed("the stream had no token")

    def _take(self, events: list[bytes], record: Record) -> None:
        now = time.perf_counter()
        for data in events:
            if data == b"[DONE]":
                continue
            try:
                event = _events.decode(data)
            except msgspec.DecodeError as problem:
                raise RequestFailed(f"an event is no JSON of a chunk: {problem}") from None
            if event.error is not None:
                raise RequestFailed(msgspec.json.encode(event.error)[:200].decode())
            if any(_has_text(choice) for choice in event.choices):
                record.stamp(now, 1)
            if event.usage is not None:
                _count(event.usage, record)

    def _request(self, job: Job) -> tuple[str, bytes]:
        if self._embeds:
            texts = job.prompt.reshape(job.texts, -1).tolist()
            # A list of lists also for one text: base64 costs a server and its clients least.
            asked = {"model": self.model, "input": texts, "encoding_format": "base64"}
            return "/embeddings", msgspec.json.encode(asked)
        content: dict[str, object] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        if self._endpoint == "chat":
            text = " ".join(_WORDS[one % len(_WORDS)] for one in job.prompt.tolist())
            content["messages"] = [{"role": "user", "content": text}]
            content["max_completion_tokens"] = job.output
            return "/chat/completions", msgspec.json.encode(content)
        content["prompt"] = job.prompt.tolist()
        content["max_tokens"] = job.output
        return "/completions", msgspec.json.encode(content)

    async def _get(self, route: str) -> tuple[int, bytes]:
        response, connection = _Response(), await self._connection()
        try:
            connection.send(self._server.head("GET", route, 0))
            async with asyncio.timeout(CONNECT_S):
                while not response.done:
                    await connection.read(response)
        except TimeoutError:
            raise ConnectionLost(f"no answer of the server within {CONNECT_S:g} s") from None
        finally:
            connection.close()
        return response.parser.get_status_code(), bytes(response.body)

    async def _connection(self) -> _Connection:
        while self._idle:
            kept = self._idle.pop()
            if not kept.ended:
                return kept
            kept.close()
        server = self._server
        context = ssl.create_default_context() if server.tls else None
        try:
            async with asyncio.timeout(CONNECT_S):
                pair = await asyncio.open_connection(server.host, server.port, ssl=context)
        except OSError as problem:
            where = f"{server.host}:{server.port}"
            raise ConnectionLost(f"cannot connect to {where}: {problem}") from None
        return _Connection(*pair)

    async def close(self) -> None:
        """Disconnect."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _take_embeddings(body: bytes, job: Job, record: Record) -> None:
    """Record the whole answer. Raises RequestFailed if it has not one embedding per text."""
    now = time.perf_counter()
    try:
        found = msgspec.json.decode(body, type=_Embeddings)
    except msgspec.DecodeError as problem:
        raise RequestFailed(f"the answer is no JSON of embeddings: {problem}") from None
    if len(found.data) != job.texts:
        raise RequestFailed(f"the answer has {len(found.data)} embeddings of {job.texts} texts")
    record.stamp(now, 0)
    if found.usage is not None:
        _count(found.usage, record)


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or (delta and (delta.content or delta.reasoning_content)))


def _count(usage: _Usage, record: Record) -> None:
    if usage.completion_tokens is not None:
        record.tokens = usage.completion_tokens
    record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
    details = usage.prompt_tokens_details
    record.cached_tokens = details.cached_tokens or 0 if details is not None else 0


def _refusal(status: int, body: bytes) -> BatonError:
    text = f"status {status}: {body[:200].decode(errors='replace')}"
    return CapacityError(text) if status in _BUSY else RequestFailed(text)
