"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from starlette.requests import Request

from ..client.async_generation import AsyncGeneration
from ..client.model import ServedModel, TokensOrText, encode
from ..client.options import RequestOptions
from ..images.processor import ScaledImage
from ..proto.sampling import SamplingParams
from .answers import Answer, ChatForm, CompletionForm, TokenTexts
from .bodies import (
    CHAT_REFUSED,
    BodyReader,
    ChatBody,
    CompletionBody,
    GenerationBody,
    SamplingBody,
)
from .delivery import StreamDelivery, WholeDelivery
from .errors import ParameterError
from .exchange import Exchange
from .grammars import constraint_of
from .messages import ImageUrl, messages_of
from .parameters import TARGET_HEADER, content_of, options_of, prompts_of, sampling_of
from .served import Served, header_of, name_of, origin_of, read_body
from .tools import tools_of

_Start = Callable[[SamplingParams, RequestOptions], AsyncGeneration]
_chat_reader = BodyReader(ChatBody, CHAT_REFUSED)
_completion_reader = BodyReader(CompletionBody)


async def chat(request: Request) -> None:
    """``POST /v1/chat/completions``."""
    served = Served.of(request)
    body = _chat_reader.read(await read_body(request))
    model = await served.text_model(body.model)
    variables = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    urls: list[ImageUrl] = []
    messages = messages_of(body.messages, urls)
    images = await served.images(model, urls) if urls else []
    plan = await asyncio.to_thread(
        served.planner.plan,
        model,
        messages,
        variables=variables,
        tools=tools_of(body.tools, body.tool_choice, body.parallel_tool_calls),
        content=content_of(body),
    )

    def start(params: SamplingParams, options: RequestOptions) -> AsyncGeneration:
        options |= {**plan.constraint, "show_text": True}
        if images:
            options["images"] = images  # copied, so the list may be cleared
        return served.client.generate(plan.tokens, params, **options)

    form = ChatForm(token_texts(model, body), plan.new_reader)
    name = name_of("chatcmpl", request)
    answer = Answer(form, name, served.name)
    await _respond(request, name, answer, body, [start], images)


async def completions(request: Request) -> None:
    """``POST /v1/completions``."""
    served = Served.of(request)
    body = _completion_reader.read(await read_body(request))
    model = await served.text_model(body.model)
    prompts: Sequence[TokensOrText] = prompts_of(body)
    if body.add_special_tokens is False:
        prompts = await asyncio.to_thread(_without_special_tokens, prompts, model)
    constraint = constraint_of(content_of(body))
    echo: list[str] = []
    if body.echo:
        texts = await asyncio.to_thread(_texts_of, prompts, model)
        echo = [text for text in texts for _ in range(body.n or 1)]

    def starter(prompt: TokensOrText) -> _Start:
        def start(params: SamplingParams, options: RequestOptions) -> AsyncGeneration:
            options |= {**constraint, "show_text": True}
            return served.client.generate(given, params, **options)

        # The body's ids fit 32 bits. Of a list, the client would have to check that.
        given = prompt if isinstance(prompt, str) else np.asarray(prompt, np.int32)
        return start

    form = CompletionForm(token_texts(model, body), echo)
    name = name_of("cmpl", request)
    answer = Answer(form, name, served.name)
    await _respond(request, name, answer, body, [starter(one) for one in prompts])


async def _respond(
    request: Request,
    name: str,
    answer: Answer,
    body: GenerationBody,
    starts: Sequence[_Start],
    images: list[ScaledImage] | None = None,
) -> None:
    """Start ``n`` requests for each prompt and answer with their outputs.

    ``images``: of the prompt; the list is cleared, so that they are free once they are prepared.
    """
    if body.stream_options is not None and not body.stream:
        raise ParameterError("stream_options needs stream: true", "stream_options")
    target = header_of(request, TARGET_HEADER.encode())
    options = options_of(body, {TARGET_HEADER: target}) | origin_of(request)
    number = body.n or 1
    params = [sampling_of(body, index) for index in range(number)]
    generations = []
    for at, start in enumerate(starts):
        for index in range(number):
            own = f"{name}-{at * number + index}" if len(starts) * number > 1 else name
            generations.append(start(params[index], {**options, "request_id": own}))
    if images:
        images.clear()
    deliver = StreamDelivery if body.stream else WholeDelivery
    exchange = Exchange.of(request.scope)
    exchange.batch = Served.of(request).writes
    await deliver(exchange, answer, generations, len(starts), body).run()


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
            raise ParameterError(text, "prompt")
    return [one if isinstance(one, str) else model.tokenizer.decode(one) for one in prompts]


def token_texts(model: ServedModel, body: SamplingBody) -> TokenTexts | None:
    """Return what shows log-probabilities, if the request asks for them."""
    shown = body.shown_log_probs()
    return None if shown is None else TokenTexts(model.tokenizer, shown)
