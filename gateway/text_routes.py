"""``/v1/chat/completions`` and ``/v1/completions``.

A :class:`Delivery` takes the outputs of native requests to the answer by callbacks: a token becomes
an event while the router's message is handled, and no task is woken for it. The task of the HTTP
request waits for the end alone.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request

from baton.client.async_generation import AsyncGeneration
from baton.client.model import ServedModel, TokensOrText, encode
from baton.client.options import RequestOptions, batch_options, check_options
from baton.client.output import Output
from baton.images.processor import Image, SharedImage
from baton.proto.contexts.status import GenerationStatus
from baton.proto.errors import BatonError, InputError, PromptTooLong, RequestCancelled
from baton.proto.sampling import SamplingParams

from .answers import (
    DONE,
    Answer,
    ChatForm,
    Choice,
    CompletionForm,
    PromptTexts,
    TokenTexts,
    usage_of,
)
from .asked import Asked
from .bodies import (
    MAX_PROMPTS,
    BodyReader,
    ChatBody,
    CompletionBody,
    GenerationBody,
    SamplingBody,
    StreamOptions,
    Warnings,
)
from .errors import ParameterError, error_json
from .exchange import Exchange
from .field_rules import CHAT_REFUSED
from .messages import ImageUrl, Unknown, messages_of
from .metrics import OutputTimes, current_clock
from .parameters import content_of, named, prompts_of, whitespace_of
from .served import Served, name_of, origin_of, read_body, target_of
from .served_by import served_by
from .tools import tools_of

_TURN = 32
"""Requests that are started in one turn of the event loop: a millisecond or two."""
_Start = Callable[[SamplingParams, RequestOptions], AsyncGeneration]
Take = Callable[[Output], object]
_encode = msgspec.json.encode
_chat_reader = BodyReader(ChatBody, CHAT_REFUSED)
_completion_reader = BodyReader(CompletionBody)


async def chat(request: Request) -> None:
    """``POST /v1/chat/completions``."""
    served = Served.of(request)
    content = await read_body(request)
    body, warnings = _chat_reader.read(content, strict=served.strict_parameters)
    model = await served.generating_model(body.model)
    variables = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    if (effort := body.reasoning_effort) is not None:
        warnings += await asyncio.to_thread(
            add_effort, "reasoning_effort", effort, variables, model, served
        )
    urls: list[ImageUrl] = []
    unknown = Unknown(strict=served.strict_parameters)
    messages = messages_of(body.messages, urls, unknown)
    warnings += unknown.warnings
    images: list[Image] = await served.images(model, urls) if urls else []
    if (body.n or 1) > 1:
        images = [SharedImage(one) for one in images]
    planned = partial(
        served.planner.plan,
        model,
        messages,
        variables=variables,
        tools=tools_of(body.tools, body.tool_choice, body.parallel_tool_calls),
        content=content_of(body),
        whitespace=whitespace_of(body),
    )
    plan = planned() if model.is_quick(len(content)) else await asyncio.to_thread(planned)

    def start(params: SamplingParams, options: RequestOptions) -> AsyncGeneration:
        own: RequestOptions = {**plan.constraint}
        if images:
            own["images"] = images  # copied, so the list may be cleared
        if own:
            options |= check_options(own)
        return served.client.begin(plan.tokens, params, options)

    asked = Asked.of(body, model.defaults)
    form = ChatForm(token_texts(model, body), plan.new_reader)
    name = name_of("chatcmpl", request)
    answer = Answer(form, name, served.name, prompt_texts(model, body), warnings)
    await _respond(request, name, answer, asked, body, [start], images)


async def completions(request: Request) -> None:
    """``POST /v1/completions``."""
    served = Served.of(request)
    body, warnings = _completion_reader.read(
        await read_body(request), strict=served.strict_parameters
    )
    model = await served.generating_model(body.model)
    prompts: Sequence[TokensOrText] = prompts_of(body)
    if body.add_special_tokens is False:
        prompts = await asyncio.to_thread(_without_special_tokens, prompts, model)
    asked = Asked.of(body, model.defaults)
    texts: list[str] = []
    if body.echo or body.logprobs is not None:
        once = await asyncio.to_thread(_texts_of, prompts, model)
        texts = [text for text in once for _ in range(body.n or 1)]

    def starter(prompt: TokensOrText) -> _Start:
        if isinstance(prompt, str):
            return partial(served.client.begin, prompt)
        # The body's ids fit 32 bits. Of a list, the client would have to check that. The array of
        # Python's library takes half as long as NumPy's.
        return partial(served.client.begin, np.frombuffer(array("i", prompt), np.int32))

    form = CompletionForm(token_texts(model, body), texts, echo=bool(body.echo))
    name = name_of("cmpl", request)
    answer = Answer(form, name, served.name, prompt_texts(model, body), warnings)
    await _respond(request, name, answer, asked, body, [starter(one) for one in prompts])


async def _respond(
    request: Request,
    name: str,
    answer: Answer,
    asked: Asked,
    body: GenerationBody,
    starts: Sequence[_Start],
    images: list[Image] | None = None,
) -> None:
    """Start ``n`` requests for each prompt and answer with their outputs.

    ``images``: of the prompt; the list is cleared, so that they are free once they are prepared.
    """
    if body.stream_options is not None and not body.stream:
        raise ParameterError("stream_options needs stream: true", "stream_options")
    options = asked.options | origin_of(request)
    if target := target_of(request):
        options |= check_options(target)
    number = body.n or 1
    if len(starts) * number > MAX_PROMPTS:
        text = f"{len(starts)} prompts with n={number} are {len(starts) * number} answers"
        raise ParameterError(f"{text}, at most {MAX_PROMPTS} are allowed", "n")
    params = [asked.sampling(body, index) for index in range(number)]
    generations = []
    for at, start in enumerate(starts):
        for index in range(number):
            own = f"{name}-{at * number + index}" if len(starts) * number > 1 else name
            generations.append(start(params[index], {**options, "request_id": own}))
            if len(generations) == 1:
                # A full cluster refuses the first one, and so the whole. The others wait for room:
                # an idle cluster would refuse a body with more answers than it takes, each time.
                options = batch_options(options)
            if len(generations) % _TURN == 0:
                await asyncio.sleep(0)  # other connections take their turn
    if images:
        images.clear()
    deliver = StreamDelivery if body.stream else WholeDelivery
    exchange = Exchange.of(request.scope)
    exchange.batch = Served.of(request).writes
    try:
        await deliver(exchange, answer, generations, len(starts), body).run()
    except InputError as error:
        raise named(error, body) from None


def _without_special_tokens(
    prompts: Sequence[TokensOrText], model: ServedModel
) -> list[TokensOrText]:
    """Tokenize the texts; the tokenizer adds no token in front."""
    return [
        encode(one, model, add_special_tokens=False) if isinstance(one, str) else one
        for one in prompts
    ]


def _texts_of(prompts: Sequence[TokensOrText], model: ServedModel) -> list[str]:
    """Return the prompts as texts. Raises ParameterError for too many token ids, before decoding.

    The time to decode a body full of token ids is most of a second.
    """
    most = model.card.max_length
    for one in prompts:
        if not isinstance(one, str) and len(one) >= most:
            text = f"prompt too long: {len(one)} tokens, limit {most - 1}"
            raise ParameterError(text, "prompt", PromptTooLong.code)
    return [one if isinstance(one, str) else model.tokenizer.decode(one) for one in prompts]


def add_effort(
    name: str, effort: object, variables: dict[str, Any], model: ServedModel, served: Served
) -> Warnings:
    """Add the effort of reasoning to a template's variables, or return that it is ignored.

    ``name``: the field. Raises ParameterError for one that is no text, and if it must not be
    ignored.
    """
    if not isinstance(effort, str):
        raise ParameterError(f"{name} must be text", name)
    source = model.tokenizer.chat_template.source
    if any("reasoning_effort" in source(with_tools=one) for one in (False, True)):
        variables.setdefault("reasoning_effort", effort)
        return []
    reason = "the model's chat template has none"
    if served.strict_parameters:
        raise ParameterError(f"{name} is not supported: {reason}", name)
    return [f"{name} is ignored: {reason}"]


def token_texts(model: ServedModel, body: SamplingBody) -> TokenTexts | None:
    """Return what shows log-probabilities, if the request asks for them."""
    shown = body.shown_log_probs()
    return None if shown is None else TokenTexts(model.tokenizer, shown)


def prompt_texts(model: ServedModel, body: GenerationBody) -> PromptTexts | None:
    """Return what shows log-probabilities of the prompt, if the request asks for them."""
    shown = body.prompt_logprobs
    return None if shown is None else PromptTexts(model.tokenizer, shown)


def _without_answer(take: Take) -> Take:
    """Return a function that takes the outputs of a request without its one new token."""

    def taker(output: Output) -> None:
        status = None if output.final_status is None else GenerationStatus.MAXIMUM_LENGTH
        bare = msgspec.structs.replace(
            output, tokens=[], text="", log_probabilities=None, final_status=status
        )
        take(bare)

    return taker


class Delivery:
    """The native requests of one HTTP request, one per choice. ``prompts``: number of prompts."""

    _is_whole = False  # whether the answer is written at its end

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
        self._ended = False
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Answer. Raises the error of a request that fails before the answer has begun.

        Raises RequestCancelled if the client closes its connection before. The native requests end
        in any case.
        """
        self._exchange.watch(self._gone, self._has_room)
        try:
            answers = self._body.answers
            for choice, generation in zip(self._choices, self._generations, strict=True):
                take = self._taker(choice)
                taker = take if answers else _without_answer(take)
                generation.deliver(taker, self._failed, whole=self._is_whole)
            await self._over
        finally:
            self._exchange.unwatch()
            for generation in self._generations:
                generation.cancel()
            # An error refers to the frames that it passes, so to this delivery and what it holds.
            # With what refers to the error, that would be a cycle for the garbage collector.
            self._ended = True
            self._generations = ()
            del self._over

    def _taker(self, choice: Choice) -> Take:
        """Return the function that takes the outputs of a choice."""
        raise NotImplementedError

    @staticmethod
    def _served_by(choice: Choice, output: Output) -> bytes:
        """Return the header lines of the first choice: several would contradict each other."""
        return b"" if choice.index else served_by(output)

    def _times(self, choice: Choice, *, streams: bool) -> OutputTimes | None:
        clock = current_clock.get()
        if clock is None:
            return None
        clock.streams = streams
        return clock.outputs(choice.index)

    def _end(self, error: Exception | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        if self._over.done():  # the task was cancelled
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

    _is_whole = True

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
            self._exchange.headers += self._served_by(choice, output)
            if not self._running and not self._ended:
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
        if self._with_usage:
            answer.promise_usage()
        self._usage_in_each = options.continuous_usage_stats
        self._held: deque[Callable[[], None]] = deque()

    def _taker(self, choice: Choice) -> Take:
        times = self._times(choice, streams=True)
        halves = None if self._usage_in_each else self._answer.halves(choice)
        if halves is None:
            return partial(self._take, choice, times)
        return partial(self._take_text, choice, times, *halves)

    def _take_text(
        self,
        choice: Choice,
        times: OutputTimes | None,
        before: bytes,
        after: bytes,
        output: Output,
    ) -> None:
        """Take an output of a choice whose events differ in nothing but the text."""
        text = output.text
        if (
            not text
            or output.final_status is not None
            or not choice.prompt_tokens  # the first output
            or not self._exchange.status  # no output had text: the answer has not begun
            or self._held
            or self._ended
            or self._exchange.flow.write_paused
        ):
            self._take(choice, times, output)
            return
        if times is not None:
            times.took(output)
        choice.tokens += len(output.tokens)
        self._exchange.next_event(before, _encode(text), after)

    def _take(self, choice: Choice, times: OutputTimes | None, output: Output) -> None:
        if times is not None:
            times.took(output)
        if self._held or self._exchange.flow.write_paused:
            self._held.append(partial(self._send, choice, output))
        else:
            self._send(choice, output)

    def _send(self, choice: Choice, output: Output) -> None:
        if self._ended:
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
        if is_first and not self._exchange.status:
            self._exchange.headers += self._served_by(choice, output)
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
        if self._ended:
            return
        if isinstance(error, BatonError) and self._exchange.status:
            self._exchange.last_event(b"data: " + error_json(error) + b"\n\n")
            self._end()
        else:
            self._end(error)

    def _has_room(self) -> None:
        try:
            while self._held and not self._exchange.flow.write_paused:
                self._held.popleft()()
        except Exception as error:  # as of an output that is written at once
            self._held.clear()
            self._end(error)
