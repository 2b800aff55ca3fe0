"""Runs the native requests of one HTTP request, and ends them when the HTTP client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

from starlette.types import Receive, Scope, Send

from baton.client.async_generation import AsyncGeneration
from baton.client.output import Output
from baton.proto.errors import BatonError, InternalError, RequestCancelled

from .errors import error_json
from .metrics import GatewayMetrics, current_clock

T = TypeVar("T")
EVENTS = b"text/event-stream; charset=utf-8"
Events = AsyncGenerator[bytes, None]


async def outputs_of(
    generations: Sequence[AsyncGeneration],
) -> AsyncGenerator[tuple[int, Output], None]:
    """Yield the outputs of several requests with their request's index, as they arrive.

    Closing the iterator cancels the requests that still run. The first error ends all of them.
    """
    clock = current_clock.get()
    try:
        if len(generations) == 1:
            async for output in generations[0]:
                if clock is not None:
                    clock.outputs(0).took(output)
                yield 0, output
            return
        async with aclosing(_merged(generations)) as merged:
            async for index, output in merged:
                if clock is not None:
                    clock.outputs(index).took(output)
                yield index, output
    finally:
        for generation in generations:
            await generation.aclose()


async def _merged(
    generations: Sequence[AsyncGeneration],
) -> AsyncGenerator[tuple[int, Output], None]:
    arrived: asyncio.Queue[tuple[int, Output | BaseException | None]] = asyncio.Queue()

    async def read(index: int, generation: AsyncGeneration) -> None:
        try:
            async for output in generation:
                arrived.put_nowait((index, output))
        except BaseException as error:
            arrived.put_nowait((index, error))
            raise
        arrived.put_nowait((index, None))

    tasks = [asyncio.ensure_future(read(*pair)) for pair in enumerate(generations)]
    try:
        running = len(tasks)
        while running:
            index, found = await arrived.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                running -= 1
            else:
                yield index, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _client_gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. Cancel it if the client closes its connection.

    Raises RequestCancelled then. The work runs in the caller's task: a separate task would cost
    a short request more than all of its JSON.
    """
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    is_gone = False
    is_over = False

    def on_gone(_: asyncio.Future[None]) -> None:
        nonlocal is_gone
        if not is_over:
            is_gone = True
            task.cancel()

    gone = asyncio.ensure_future(_client_gone(receive))
    gone.add_done_callback(on_gone)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and not task.uncancel():
            raise RequestCancelled("the client has closed its connection") from None
        raise
    finally:
        is_over = True
        gone.cancel()


class EventStream:
    """A response of server-sent events, an ASGI application.

    The first event is awaited before the response begins, so an error up to there has its own
    status. A later error is an event, and the last one.
    """

    def __init__(self, first: bytes, events: Events) -> None:
        self._first = first
        self._events = events

    @classmethod
    async def begin(cls, receive: Receive, events: Events) -> EventStream:
        """Wait for the first event. Raises the error of a request that fails before."""
        try:
            first = await unless_gone(receive, _next(events))
        except BaseException:
            await events.aclose()
            raise
        return cls(first, events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last one, or until the client is gone."""
        headers = [
            (b"content-type", EVENTS),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await unless_gone(receive, self._send(scope, send))
            except RequestCancelled:
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, scope: Scope, send: Send) -> None:
        async for event in self._all(scope):
            await send({"type": "http.response.body", "body": event, "more_body": True})

    async def _all(self, scope: Scope) -> AsyncIterator[bytes]:
        yield self._first
        try:
            async for event in self._events:
                yield event
        except BatonError as error:
            yield b"data: " + error_json(error) + b"\n\n"
        except Exception as error:
            metrics: GatewayMetrics = scope["app"].state.metrics
            text = metrics.own_error(error, scope["path"])
            yield b"data: " + error_json(InternalError(text)) + b"\n\n"


async def _next(events: Events) -> bytes:
    return await anext(events)
