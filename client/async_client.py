"""The client for asyncio: the connection runs inside the running event loop.

The loop watches ZeroMQ's descriptors with ``add_reader``, because zmq.asyncio costs several times
as much per message.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from ..proto.errors import BatonError, ConnectionLost, InputError
from ..proto.wire.messages import Describe, Described, Drained, Message, StatusReport
from ..runtime.keys.keyring import GivenKeys, client_keys
from ..runtime.net.loop import Loop
from .calls import Answer, Calls, Draft, answer_of_kind, at_prompt
from .connection import Connection
from .embedding import Embedding, embed_specs
from .events import Ended, NewTokens
from .model import (
    DESCRIBED_FILES,
    Description,
    ModelCache,
    Prepared,
    ServedModel,
    TokensOrText,
    described,
)
from .options import (
    RequestOptions,
    check_timeouts,
    drain_question,
    question_timeout,
    status_question,
)
from .output import Assembler, Output
from .routers import router_addresses
from .window import Sink, Window

_Preparing = Coroutine[Any, Any, Prepared]


class AsyncClient(Calls["AsyncGeneration"]):
    """Like :class:`baton.client.Client`, but for one asyncio event loop.

    The client connects on first use. Disconnect with :meth:`close` or ``async with``.

    ``generate`` and ``chat`` return at once, with an iterator for ``async for``. The iterator also
    raises the errors of encoding its prompt. Cancel a request with ``aclose`` on its iterator, or
    by deleting the iterator.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        keys: GivenKeys = None,
        connect_timeout: float = 5.0,
        reconnect_timeout: float = 30.0,
    ) -> None:
        connect, reconnect = check_timeouts(
            connect_timeout=connect_timeout, reconnect_timeout=reconnect_timeout
        )
        self._addresses = router_addresses(address)
        self._keys = client_keys(keys)
        self._timeout = connect
        self._reconnect_timeout = reconnect
        self._models = ModelCache()
        self._models_lock = asyncio.Lock()
        self._loop: Loop | None = None
        self._connection: Connection | None = None
        self._closed = False

    # ------------------------------------------------------------------ generation

    def _start_requests(
        self, drafts: Sequence[Draft], window: Window | None
    ) -> list[AsyncGeneration]:
        connection = self._connected()
        return [
            AsyncGeneration(self, connection, draft.request_id, self._prepare(draft), window)
            for draft in drafts
        ]

    async def _prepare(self, draft: Draft) -> Prepared:
        with at_prompt(draft.index):
            if draft.is_context:
                return draft.prepare_context()
            model = await self._model()
            if draft.is_text:
                return await asyncio.to_thread(draft.prepare, model)
            return draft.prepare(model)

    async def embed(
        self, texts: Sequence[TokensOrText], **options: Unpack[RequestOptions]
    ) -> npt.NDArray[np.float32]:
        """Like :meth:`baton.client.Client.embed`. Cancelling the task cancels the requests."""
        began, model = time.monotonic(), await self._model()
        specs = await asyncio.to_thread(embed_specs, texts, options, model)
        job = Embedding(specs, model.card.embedding_size, began)
        news: asyncio.Queue[NewTokens | Ended] = asyncio.Queue()
        connection, sink = self._connected(), news.put_nowait
        try:
            while not job.done:
                for spec in job.start(time.monotonic()):
                    connection.start(spec, sink)
                ended = await news.get()
                if isinstance(ended, Ended):
                    job.take(ended)
        except BaseException:
            for name in list(job.running):
                connection.stop(name, sink)
            raise
        return job.vectors

    # ------------------------------------------------------------------ questions

    async def model(self) -> ServedModel:
        """Return the served model with its tokenizer, confirmed after each reconnection."""
        return await self._model()

    async def describe(self) -> Description:
        """Fetch the served model's card and text files from the router."""
        answer = await self._ask(Describe(files=DESCRIBED_FILES), Described, self._timeout)
        return described(answer)

    async def status(self, *, handoffs: int = 16, timeout: float | None = None) -> dict[str, Any]:
        """Fetch the cluster's state: workers and the last ``handoffs`` handoffs."""
        report = await self._ask(status_question(handoffs), StatusReport, timeout)
        state: dict[str, Any] = json.loads(report.report)
        return state

    async def drain(self, worker: str, *, force: bool = False, timeout: float | None = None) -> str:
        """Drain a worker: it finishes its requests and accepts no new request.

        Returns the router's description of the drain. Raises InputError for the last ready worker
        of a role, unless ``force``.
        """
        return (await self._ask(drain_question(worker, force), Drained, timeout)).message

    # ------------------------------------------------------------------ end

    async def close(self) -> None:
        """Cancel all running requests and disconnect."""
        self._closed = True
        self._models.close()
        if self._connection is not None and self._loop is not None:
            self._connection.close()
            self._loop.close()
            self._connection = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------ inner

    def _connected(self) -> Connection:
        if self._closed:
            raise ConnectionLost("the client is closed")
        running = asyncio.get_running_loop()
        if self._connection is None:
            self._loop = Loop(running)
            self._connection = Connection(
                self._loop,
                self._addresses,
                keys=self._keys,
                connect_timeout=self._timeout,
                reconnect_timeout=self._reconnect_timeout,
            )
        elif self._loop is not None and self._loop.asyncio_loop is not running:
            raise InputError("an AsyncClient belongs to the event loop of its first use")
        return self._connection

    async def _model(self) -> ServedModel:
        """Return the served model. Confirm it with the router after each reconnection."""
        failures = self._models.failures
        async with self._models_lock:
            with self._models.attempt(failures):
                return await self._fetch_model()

    async def _fetch_model(self) -> ServedModel:
        connections = self._connected().connections
        model = self._models.fresh(connections)
        if model is None:
            card_only = await self._ask(Describe(), Described, self._timeout)
            model = self._models.confirm(card_only, connections)
        if model is None:
            model = self._models.store(await self.describe(), connections)
        return model

    async def _ask(self, question: Message, kind: type[Answer], timeout: float | None) -> Answer:
        future: asyncio.Future[Message | BatonError] = asyncio.get_running_loop().create_future()

        def settle(answer: Message | BatonError) -> None:
            if not future.done():  # the awaiting task may have been cancelled
                future.set_result(answer)

        seconds = question_timeout(timeout, self._timeout)
        self._connected().ask(question, seconds, settle)
        return answer_of_kind(kind, question, await future)


class _Mailbox:
    """Events of one request, for one reader.

    The connection holds the mailbox and not its reader, an :class:`AsyncGeneration`. So a reader
    without other references is deleted, which cancels the request.
    """

    def __init__(self) -> None:
        self._news: deque[NewTokens | Ended] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, news: NewTokens | Ended) -> None:
        """Add an event and wake the reader."""
        self._news.append(news)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> NewTokens | Ended:
        """Wait for the next event."""
        while not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._news.popleft()


async def _begin(
    connection: Connection, preparing: _Preparing, sink: Sink, window: Window | None
) -> Assembler:
    prepared = await preparing
    connection.start(prepared.spec, sink, window)
    return prepared.assembler


def _retrieve(task: asyncio.Task[Assembler]) -> None:
    """Mark the task's exception as retrieved, or asyncio logs it for a deleted generation."""
    if not task.cancelled():
        task.exception()


class AsyncGeneration:
    """Async iterator over the outputs of one request.

    :meth:`aclose`, or deleting the iterator, cancels the request.
    """

    def __init__(
        self,
        client: AsyncClient,
        connection: Connection,
        request_id: str,
        preparing: _Preparing,
        window: Window | None = None,
    ) -> None:
        self._client = client
        self._connection = connection
        self._mailbox = _Mailbox()
        self._sink: Sink = self._mailbox.put
        self._assembler: Assembler | None = None
        self._done = False
        self._event_loop = asyncio.get_running_loop()
        self._starting = self._event_loop.create_task(
            _begin(connection, preparing, self._sink, window)
        )
        self._starting.add_done_callback(_retrieve)
        self.request_id = request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._done:
            if self._assembler is None:
                self._assembler = await self._started()
            output = self._take(self._assembler, await self._mailbox.get())
            if output is not None:
                return output
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request if it still runs. The iterator then stops."""
        self._cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_done", True) or self._event_loop.is_closed():
            return
        self._done = True
        # The garbage collector may run on another thread. The callback must not use `self`.
        self._event_loop.call_soon_threadsafe(
            _end, self._starting, self._connection, self.request_id, self._sink
        )

    async def _started(self) -> Assembler:
        try:
            # Shielded: cancelling the wait for an output must not cancel the request.
            return await asyncio.shield(self._starting)
        except BatonError:
            self._done = True
            raise

    def _take(self, assembler: Assembler, news: NewTokens | Ended) -> Output | None:
        if isinstance(news, Ended):
            self._done = True
            return assembler.end(news)
        output = assembler.tokens(news)
        if output is not None and assembler.stopped:
            self._connection.stop(self.request_id, self._sink, report=True)
        return output

    def _cancel(self) -> None:
        if not self._done:
            self._done = True
            _end(self._starting, self._connection, self.request_id, self._sink)


def _end(
    starting: asyncio.Task[Assembler], connection: Connection, request_id: str, sink: Sink
) -> None:
    if not starting.done():
        starting.cancel()
    connection.stop(request_id, sink)
