"""From the outputs of native requests to the answer of one HTTP request, by callbacks.

A token becomes an event while the router's message is handled: no task is woken for it. The task of
the HTTP request waits for the end alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ..client.async_generation import AsyncGeneration
from ..client.output import Output
from ..proto.errors import BatonError, RequestCancelled
from .answers import DONE, Answer, Choice, usage_of
from .bodies import GenerationBody, StreamOptions
from .errors import content_of
from .exchange import Exchange
from .metrics import OutputTimes, current_clock

Take = Callable[[Output], object]
_encode = msgspec.json.encode


class Delivery:
    """The native requests of one HTTP request, one per choice. ``prompts``: number of prompts."""

    def __init__(
        self,
        exchange: Exchange,
        answer: Answer,
        generations: Sequence[AsyncGeneration],
        prompts: int,
        body: GenerationBody,
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        self._generations = generations
        self._prompts = prompts
        self._body = body
        self._choices = [Choice(index) for index in range(len(generations))]
        self._running = len(generations)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Answer. Raises the error of a request that fails before the answer has begun.

        Raises RequestCancelled if the client closes its connection before. The native requests end
        in any case.
        """
        self._exchange.watch(self._gone, self._has_room)
        try:
            for choice, generation in zip(self._choices, self._generations, strict=True):
                generation.deliver(self._taker(choice), self._failed)
            await self._over
        finally:
            self._exchange.unwatch()
            for generation in self._generations:
                generation.cancel()
            self._generations = ()  # they hold this delivery's methods: a cycle for the collector

    def _taker(self, choice: Choice) -> Take:
        """Return the function that takes the outputs of a choice."""
        raise NotImplementedError

    def _times(self, choice: Choice, *, streams: bool) -> OutputTimes | None:
        clock = current_clock.get()
        if clock is None:
            return None
        clock.streams = streams
        return clock.outputs(choice.index)

    def _end(self, error: Exception | None = None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _failed(self, error: Exception) -> None:
        self._end(error)

    def _gone(self) -> None:
        gone = RequestCancelled("the client has closed its connection")
        self._end(None if self._exchange.status else gone)

    def _has_room(self) -> None:
        """Do nothing: a whole answer is one write."""


class WholeDelivery(Delivery):
    """Answers with one JSON object."""

    def _taker(self, choice: Choice) -> Take:
        times = self._times(choice, streams=False)
        return partial(self._take, choice, times, self._body.shown_log_probs() is not None)

    def _take(
        self, choice: Choice, times: OutputTimes | None, log_probs: bool, output: Output
    ) -> None:
        if times is not None:
            times.took(output)
        choice.take(output, log_probs=log_probs)
        if output.is_done:
            self._running -= 1
            if not self._running and not self._over.done():
                self._exchange.respond(self._answer.whole(self._choices, self._prompts))
                self._end()


class StreamDelivery(Delivery):
    """Answers with events. An error after the first event is an event, and the last one.

    While the client reads too slowly, outputs are held; they are limited by the requests' lengths.
    """

    def __init__(
        self,
        exchange: Exchange,
        answer: Answer,
        generations: Sequence[AsyncGeneration],
        prompts: int,
        body: GenerationBody,
    ) -> None:
        super().__init__(exchange, answer, generations, prompts, body)
        options = body.stream_options or StreamOptions()
        self._with_usage = options.include_usage
        self._usage_in_each = options.continuous_usage_stats
        self._held: deque[Callable[[], None]] = deque()

    def _taker(self, choice: Choice) -> Take:
        times = self._times(choice, streams=True)
        halves = None if self._usage_in_each else self._answer.halves(choice)
        return partial(self._take, choice, times, halves)

    def _take(
        self,
        choice: Choice,
        times: OutputTimes | None,
        halves: tuple[bytes, bytes] | None,
        output: Output,
    ) -> None:
        if times is not None:
            times.took(output)
        if self._held or self._exchange.is_full:
            self._held.append(partial(self._send, choice, halves, output))
        else:
            self._send(choice, halves, output)

    def _send(self, choice: Choice, halves: tuple[bytes, bytes] | None, output: Output) -> None:
        if self._over.done():
            return
        text = output.text
        if halves is not None and text and choice.prompt_tokens and output.final_status is None:
            choice.tokens += len(output.tokens)
            self._exchange.next_event(halves[0], _encode(text), halves[1])
            return
        events = self._events(choice, output)
        if output.is_done:
            self._running -= 1
        if self._running:
            if events:
                self._exchange.event(events)
            return
        if self._with_usage:
            events += self._answer.usage(self._choices, self._prompts)
        self._exchange.last_event(events + DONE)
        self._end()

    def _events(self, choice: Choice, output: Output) -> bytes:
        """Return the events of any output, which may be none."""
        is_first = not choice.prompt_tokens
        choice.count(output)
        more = {}
        if self._usage_in_each:
            more = {"usage": usage_of(self._choices, self._prompts)}
        opening = self._answer.first(choice, more) if is_first else b""
        return opening + self._answer.part(choice, output, more)

    def _failed(self, error: Exception) -> None:
        if self._held:
            self._held.append(partial(self._send_error, error))
        else:
            self._send_error(error)

    def _send_error(self, error: Exception) -> None:
        if self._over.done():
            return
        if isinstance(error, BatonError) and self._exchange.status:
            self._exchange.last_event(b"data: " + content_of(error) + b"\n\n")
            self._end()
        else:
            self._end(error)

    def _has_room(self) -> None:
        try:
            while self._held and not self._exchange.is_full:
                self._held.popleft()()
        except Exception as error:  # as of an output that is written at once
            self._held.clear()
            self._end(error)
