"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from ..client.async_client import AsyncGeneration
from ..client.model import ServedModel, TokensOrText, encode
from ..client.options import RequestOptions
from ..proto.limits import MAX_REQUEST_ID_CHARS
from ..proto.sampling import SamplingParams
from .answers import DONE, Answer, ChatForm, Choice, CompletionForm, TokenTexts, usage_of
from .bodies import BodyReader, ChatBody, CompletionBody, GenerationBody, StreamOptions
from .errors import ParameterError
from .parameters import messages_of, options_of, prompts_of, sampling_of
from .served import Served, read_body
from .streams import EventStream, outputs_of, unless_gone

_Start = Callable[[SamplingParams, RequestOptions], AsyncGeneration]
_chat_reader = BodyReader(ChatBody)
_completion_reader = BodyReader(CompletionBody)
_RANDOM_BYTES = 12


@dataclass(slots=True, frozen=True)
class _Job:
    """The native requests of one HTTP request, one per choice; ``prompts``: number of prompts."""

    name: str
    answer: Answer
    generations: list[AsyncGeneration]
    prompts: int
    body: GenerationBody

    async def whole(self) -> bytes:
        """Wait for all choices and return the answer."""
        choices = self._choices()
        async with aclosing(outputs_of(self.generations)) as outputs:
            async for index, output in outputs:
                choices[index].take(output, log_probs=self._has_log_probs)
        return self.answer.whole(choices, self.prompts)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer's stream."""
        choices = self._choices()
        options = self.body.stream_options or StreamOptions()
        async with aclosing(outputs_of(self.generations)) as outputs:
            async for index, output in outputs:
                choice, more = choices[index], {}
                is_first = not choice.prompt_tokens
                choice.take(output, log_probs=False)
                if options.continuous_usage_stats:
                    more = {"usage": usage_of(choices, self.prompts)}
                opening = self.answer.first(choice, more) if is_first else b""
                event = opening + self.answer.part(choice, output, more)
                if event:
                    yield event
        if options.include_usage:
            yield self.answer.usage(choices, self.prompts)
        yield DONE

    def _choices(self) -> list[Choice]:
        return [Choice(index) for index in range(len(self.generations))]

    @property
    def _has_log_probs(self) -> bool:
        return self.body.shown_log_probs() is not None


async def chat(request: Request) -> Response | EventStream:
    """``POST /v1/chat/completions``."""
    served = Served.of(request)
    body = _chat_reader.read(await read_body(request))
    model = await served.model(body.model)
    variables = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    messages = messages_of(body.messages)

    def start(params: SamplingParams, options: RequestOptions) -> AsyncGeneration:
        return served.client.chat(messages, params, variables=variables, **options)

    form = ChatForm(_token_texts(model, body))
    name = _name("chatcmpl", request)
    answer = Answer(form, name, served.name)
    return await _respond(request, name, answer, body, [start])


async def completions(request: Request) -> Response | EventStream:
    """``POST /v1/completions``."""
    served = Served.of(request)
    body = _completion_reader.read(await read_body(request))
    model = await served.model(body.model)
    prompts: Sequence[TokensOrText] = prompts_of(body)
    if body.add_special_tokens is False:
        prompts = await asyncio.to_thread(_without_special_tokens, prompts, model)
    echo: list[str] = []
    if body.echo:
        texts = [one if isinstance(one, str) else model.tokenizer.decode(one) for one in prompts]
        echo = [text for text in texts for _ in range(body.n or 1)]

    def starter(prompt: TokensOrText) -> _Start:
        def start(params: SamplingParams, options: RequestOptions) -> AsyncGeneration:
            options["show_text"] = True
            return served.client.generate(prompt, params, **options)

        return start

    form = CompletionForm(_token_texts(model, body), echo)
    name = _name("cmpl", request)
    answer = Answer(form, name, served.name)
    return await _respond(request, name, answer, body, [starter(one) for one in prompts])


async def _respond(
    request: Request,
    name: str,
    answer: Answer,
    body: GenerationBody,
    starts: Sequence[_Start],
) -> Response | EventStream:
    """Start ``n`` requests for each prompt and return their answer."""
    if body.stream_options is not None and not body.stream:
        raise ParameterError("stream_options needs stream: true", "stream_options")
    options = options_of(body, request.headers)
    number = body.n or 1
    params = [sampling_of(body, index) for index in range(number)]
    generations = []
    for at, start in enumerate(starts):
        for index in range(number):
            own = f"{name}-{at * number + index}" if len(starts) * number > 1 else name
            generations.append(start(params[index], {**options, "request_id": own}))
    job = _Job(name, answer, generations, len(starts), body)
    if body.stream:
        return await EventStream.begin(request.receive, job.events())
    content = await unless_gone(request.receive, job.whole())
    return Response(content, media_type="application/json")


def _without_special_tokens(
    prompts: Sequence[TokensOrText], model: ServedModel
) -> list[TokensOrText]:
    """Tokenize the texts; the tokenizer adds no token in front."""
    return [
        encode(one, model, add_special_tokens=False) if isinstance(one, str) else one
        for one in prompts
    ]


def _token_texts(model: ServedModel, body: GenerationBody) -> TokenTexts | None:
    shown = body.shown_log_probs()
    return None if shown is None else TokenTexts(model.tokenizer, shown)


def _name(kind: str, request: Request) -> str:
    """The request's id: with the client's own id in it, if there is one."""
    own = request.headers.get("x-request-id", "")
    random = secrets.token_hex(_RANDOM_BYTES)
    if not own:
        return f"{kind}-{random}"
    room = MAX_REQUEST_ID_CHARS - len(kind) - len(random) - 8
    return f"{kind}-{own[:room]}-{random}"
