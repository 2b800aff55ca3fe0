"""One request of the asyncio client: an iterator over its outputs, or a source of callbacks.

An iterator wakes its task for each output. :meth:`AsyncGeneration.deliver` calls a function
while the message of the router is handled, which costs a fraction.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Self

from baton.proto.errors import BatonError, InternalError

from .connection import Connection
from .events import Ended, NewTokens
from .model import Prepared
from .output import Assembler, Output
from .result import Collector, Completion
from .window import Sink, Window

Prepare = Callable[[], Coroutine[Any, Any, Prepared]]


class _Mailbox:
    """Events of one request, for one reader.

    The connection holds the mailbox and not its reader, an :class:`AsyncGeneration`. So a reader
    without other references is deleted, which cancels the request.
    """

    __slots__ = ("_news", "_taker", "_waiter")

    def __init__(self) -> None:
        self._news: deque[NewTokens | Ended] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Sink | None = None

    def put(self, news: NewTokens | Ended) -> None:
        """Give an event to the function that takes them, or add it and wake the reader."""
        if self._taker is not None:
            self._taker(news)
            return
        self._news.append(news)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def pass_on(self, taker: Sink) -> None:
        """Call ``taker`` with all events, first with the events that have arrived."""
        self._taker = taker
        while self._news:
            taker(self._news.popleft())

    def end(self) -> None:
        """Forget the reader, which holds this mailbox."""
        self._taker = None

    async def get(self) -> NewTokens | Ended:
        """Wait for the next event."""
        while not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._news.popleft()


class AsyncGeneration:
    """Async iterator over the outputs of one request.

    :meth:`aclose`, or deleting the iterator, cancels the request.
    """

    __slots__ = (
        "__weakref__", "_assembler", "_client", "_connection", "_done", "_event_loop", "_failure",
        "_held", "_mailbox", "_on_error", "_on_output", "_sink", "_starting", "_whole",
        "_window", "request_id",
    )  # fmt: skip

    def __init__(
        self,
        client: object,
        connection: Connection,
        request_id: str,
        window: Window | None = None,
    ) -> None:
        self._client = client  # keeps the client alive as long as its requests
        self._connection = connection
        self._window = window
        self._mailbox = _Mailbox()
        self._sink: Sink = self._mailbox.put
        self._starting: asyncio.Task[Assembler] | None = None
        self._assembler: Assembler | None = None
        self._failure: Exception | None = None
        self._done = False
        self._whole = False
        self._held: NewTokens | None = None  # tokens of a whole answer
        self._event_loop = asyncio.get_running_loop()
        self.request_id = request_id

    def start(self, prepare: Callable[[], Prepared]) -> None:
        """Start the request now. The iterator raises the error of a request that is wrong."""
        try:
            prepared = prepare()
        except Exception as error:
            self._failure = error
            return
        self._assembler = prepared.assembler
        self._connection.start(prepared.spec, self._sink, self._window)

    def start_later(self, prepare: Prepare) -> None:
        """Start the request in a task. The iterator raises the error of a request that is wrong."""
        begun = _begin(self._connection, prepare, self._sink, self._window)
        self._starting = self._event_loop.create_task(begun)
        self._starting.add_done_callback(_retrieve)

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

    def deliver(
        self,
        on_output: Callable[[Output], object],
        on_error: Callable[[Exception], object],
        *,
        whole: bool = False,
    ) -> None:
        """Call ``on_output`` with each output as it arrives, in place of iterating.

        The last call has the output with a final status. If the request fails, ``on_error`` gets
        the error, and if ``on_output`` raises, the request is cancelled and ``on_error`` gets that
        exception; no further call follows. The first calls may come before this method returns.
        The connection keeps the generation alive. End it early with :meth:`cancel`.

        ``whole``: the caller reads the answer at its end. Then all tokens come as one output, with
        the final status, which takes less time.
        """
        self._whole = whole
        self._on_output, self._on_error = on_output, on_error
        if self._starting is not None:
            self._starting.add_done_callback(self._deliver_started)
        elif self._assembler is not None:
            self._pass_on()
        elif self._failure is not None and not self._done:
            self._done = True
            on_error(self._failure)

    async def result(self, index: int = 0) -> Completion:
        """Wait for the end, and return all outputs that have not been read, as a whole.

        ``index``: of the completion among the answers to a prompt.
        """
        collector = Collector()
        async for output in self:
            collector.add(output)
        return collector.completion(index)

    async def aclose(self) -> None:
        """Cancel the request if it still runs. The iterator then stops."""
        self.cancel()

    def cancel(self) -> None:
        """Cancel the request if it still runs, as :meth:`aclose`."""
        if not self._done:
            self._hand_over_held()
            if self._done:  # the caller has cancelled it meanwhile
                return
            sink = self._sink
            self._forget()
            _end(self._starting, self._connection, self.request_id, sink)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
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
        if self._starting is None:
            self._done = True
            raise self._failure or InternalError("the request was not started")
        try:
            # Shielded: cancelling the wait for an output must not cancel the request.
            return await asyncio.shield(self._starting)
        except BatonError:
            self._done = True
            raise

    def _deliver_started(self, starting: asyncio.Task[Assembler]) -> None:
        if self._done or starting.cancelled():
            return
        error = starting.exception()
        if isinstance(error, Exception):
            self._done = True
            self._on_error(error)
        elif error is None:
            self._assembler = starting.result()
            self._pass_on()

    def _pass_on(self) -> None:
        """Take all events: first the ones that are waiting, then each without the mailbox."""
        holds = self._whole and self._assembler is not None and not self._assembler.stops
        taker: Sink = self._hold if holds else self._hand_over
        self._mailbox.pass_on(taker)
        if not self._done and self._connection.replace(self.request_id, self._sink, taker):
            self._sink = taker

    def _hold(self, news: NewTokens | Ended) -> None:
        """Hold tokens until the end; hand over all of them with it, and anything else at once."""
        held = self._held
        if isinstance(news, NewTokens):
            if news.logprobs is None and news.media is None:
                if held is None:
                    self._held = news
                else:
                    held.tokens.extend(news.tokens)
                return
        elif held is not None and news.error is None:
            self._held = None
            self._hand_over_whole(held, news)
            return
        self._hand_over_held()
        self._hand_over(news)

    def _hand_over_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._hand_over(held)

    def _hand_over_whole(self, held: NewTokens, ended: Ended) -> None:
        """Take the end of a whole answer with its tokens, as :meth:`_hand_over`."""
        assembler = self._assembler
        if self._done or assembler is None:
            return
        try:
            self._forget()
            self._on_output(assembler.whole(held, ended))
        except Exception as error:
            self.cancel()
            self._on_error(error)

    def _hand_over(self, news: NewTokens | Ended) -> None:
        """Take an event. An exception must not reach the connection, which serves all requests."""
        assembler = self._assembler
        if self._done or assembler is None:
            return
        try:
            if isinstance(news, NewTokens) and not assembler.stops:  # nearly all
                output = assembler.tokens(news)
            else:
                output = self._take(assembler, news)
            if output is not None:
                self._on_output(output)
        except Exception as error:
            self.cancel()
            self._on_error(error)

    def _take(self, assembler: Assembler, news: NewTokens | Ended) -> Output | None:
        if isinstance(news, NewTokens):
            output = assembler.tokens(news)
            if assembler.stopped and output is not None:
                self._connection.stop(self.request_id, self._sink, report=True)
            return output
        self._forget()
        return assembler.end(news)

    def _forget(self) -> None:
        """Note the end; drop the references to this object that it holds itself."""
        self._done = True
        self._mailbox.end()
        self._sink = self._mailbox.put


async def _begin(
    connection: Connection, prepare: Prepare, sink: Sink, window: Window | None
) -> Assembler:
    prepared = await prepare()
    connection.start(prepared.spec, sink, window)
    return prepared.assembler


def _retrieve(task: asyncio.Task[Assembler]) -> None:
    """Mark the task's exception as retrieved, or asyncio logs it for a deleted generation."""
    if not task.cancelled():
        task.exception()


def _end(
    starting: asyncio.Task[Assembler] | None, connection: Connection, request_id: str, sink: Sink
) -> None:
    if starting is not None and not starting.done():
        starting.cancel()
    connection.stop(request_id, sink)
