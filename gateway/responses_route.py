"""``/v1/responses``: one answer as a list of output items, whole or as typed events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..client.async_generation import AsyncGeneration
from ..client.output import Output
from .answers import Choice, TokenTexts
from .bodies import BodyReader
from .messages import ImageUrl
from .parameters import content_of, options_of, sampling_of
from .response_items import ResponseItems, Shown
from .responses_bodies import (
    RESPONSES_REFUSED,
    ResponsesBody,
    messages_of_input,
    tools_of_body,
)
from .served import Served, name_of, origin_of, read_body
from .streams import EventStream, outputs_of, unless_gone
from .text_routes import token_texts

_encode = msgspec.json.encode
_reader = BodyReader(ResponsesBody, RESPONSES_REFUSED)


async def responses(request: Request) -> Response | EventStream:
    """``POST /v1/responses``."""
    served = Served.of(request)
    body = _reader.read(await read_body(request))
    body.check()
    model = await served.text_model(body.model)
    options, name = options_of(body, request.headers), name_of("resp", request)
    urls: list[ImageUrl] = []
    messages = messages_of_input(body, urls)
    images = await served.images(model, urls) if urls else []
    plan = await asyncio.to_thread(
        served.planner.plan,
        model,
        messages,
        variables=body.chat_template_kwargs,
        tools=tools_of_body(body),
        content=content_of(body),
    )
    options |= {**origin_of(request), **plan.constraint, "request_id": name, "show_text": True}
    if images:
        options["images"] = images
    generation = served.client.generate(plan.tokens, sampling_of(body, 0), **options)
    images.clear()  # the generation has a copy, until they are prepared
    reader = plan.new_reader and plan.new_reader()
    items = ResponseItems(name, reader, streamed=bool(body.stream))
    answer = ResponseAnswer(body, name, served.name, items, token_texts(model, body))
    if body.stream:
        return await EventStream.begin(request.receive, answer.events(generation))
    content = await unless_gone(request.receive, answer.whole(generation))
    return Response(content, media_type="application/json")


class ResponseAnswer:
    """One answer, which grows with the outputs of its request."""

    def __init__(
        self,
        body: ResponsesBody,
        name: str,
        model: str,
        items: ResponseItems,
        log_probs: TokenTexts | None,
    ) -> None:
        self._choice = Choice(0)
        self._items = items
        self._log_probs = log_probs
        self._number = 0
        form = body.text and body.text.format
        self._head: dict[str, Any] = {
            "id": name,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    async def whole(self, generation: AsyncGeneration) -> bytes:
        """Wait for the end and return the answer."""
        async with aclosing(outputs_of([generation])) as outputs:
            async for _, output in outputs:
                self._take(output)
        self._items.finish(cut=self._is_cut)
        return _encode(self._finished())

    async def events(self, generation: AsyncGeneration) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer's stream."""
        opening = self._opening()
        async with aclosing(outputs_of([generation])) as outputs:
            async for _, output in outputs:
                events = opening + self._encoded(self._take(output))
                opening = b""
                if events:
                    yield events
        last = self._encoded(self._items.finish(cut=self._is_cut))
        whole = self._finished()
        yield last + self._event(f"response.{whole['status']}", response=whole)

    @property
    def _is_cut(self) -> bool:
        return self._choice.finish_reason == "length"

    def _take(self, output: Output) -> list[Shown]:
        self._choice.take(output, log_probs=False)
        records: list[Any] = []
        if self._log_probs is not None:
            records = self._log_probs.of_output(output)["content"]
        return self._items.push(output.text or "", len(output.tokens), records)

    def _opening(self) -> bytes:
        begun = {**self._head, **_state("in_progress")}
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._event(kind, response=begun) for kind in kinds])

    def _finished(self) -> dict[str, Any]:
        choice = self._choice
        usage = {
            "input_tokens": choice.prompt_tokens,
            "input_tokens_details": {"cached_tokens": choice.cached_tokens},
            "output_tokens": choice.tokens,
            "output_tokens_details": {"reasoning_tokens": self._items.reasoning_tokens},
            "total_tokens": choice.prompt_tokens + choice.tokens,
        }
        reason = {"reason": "max_output_tokens"} if self._is_cut else None
        state = _state("incomplete" if self._is_cut else "completed", reason, usage)
        return {**self._head, **state, "output": self._items.shown()}

    def _encoded(self, events: Iterable[Shown]) -> bytes:
        return b"".join([self._event(kind, **fields) for kind, fields in events])

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(content))


def _state(
    status: str, incomplete: dict[str, str] | None = None, usage: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"status": status, "incomplete_details": incomplete, "output": [], "usage": usage}
