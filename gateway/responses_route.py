"""``/v1/responses``: one answer as a list of output items, whole or as typed events.

Items come one after another: reasoning, a message, a call of a function. At most the last one is
open. Invariant: the items do not depend on how the answer is divided into outputs.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from baton.client.async_generation import AsyncGeneration
from baton.client.output import Output
from baton.proto.errors import InputError

from .answers import Choice, TokenTexts
from .bodies import BodyReader, Warnings
from .messages import ImageUrl, Unknown
from .parameters import content_of, named, options_of, sampling_of, whitespace_of
from .reader import MessageReader
from .responses_bodies import (
    RESPONSES_IGNORED,
    RESPONSES_REFUSED,
    ResponsesBody,
    messages_of_input,
    tools_of_body,
)
from .served import Served, name_of, origin_of, read_body, target_of
from .streams import EventStream, outputs_of, unless_gone
from .text_routes import add_effort, token_texts
from .tool_calls import CallArguments, CallBegin, CallBroken, Event, Reasoning, Text

_encode = msgspec.json.encode
_reader = BodyReader(ResponsesBody, RESPONSES_REFUSED, RESPONSES_IGNORED)

_SHOWN = ("metadata ", "user ")
"""Beginnings of warnings about fields that are part of this route's response."""
Record = dict[str, Any]
"""The log-probability of a token, as chat completions show it."""
Shown = tuple[str, dict[str, Any]]
"""An event of the stream: its type and its fields, without the number."""

_MESSAGE: Final = "message"
_REASONING: Final = "reasoning"
_CALL: Final = "function_call"
_PREFIXES = {_MESSAGE: "msg", _REASONING: "rs", _CALL: "fc"}
_STREAMS = {
    _MESSAGE: "response.output_text",
    _REASONING: "response.reasoning_text",
    _CALL: "response.function_call_arguments",
}


async def responses(request: Request) -> Response | EventStream:
    """``POST /v1/responses``."""
    served = Served.of(request)
    strict = served.strict_parameters
    body, warnings = _reader.read(await read_body(request), strict=strict)
    warnings = [one for one in warnings if not one.startswith(_SHOWN)]
    warnings += body.check(strict=strict)
    model = await served.generating_model(body.model)
    options, name = options_of(body) | target_of(request), name_of("resp", request)
    urls: list[ImageUrl] = []
    unknown = Unknown(strict=strict)
    messages = messages_of_input(body, urls, unknown)
    warnings += unknown.warnings
    images = await served.images(model, urls) if urls else []
    tools, variables = tools_of_body(body), dict(body.chat_template_kwargs or {})
    if (effort := (body.reasoning or {}).get("effort")) is not None:
        warnings += await asyncio.to_thread(
            add_effort, "reasoning.effort", effort, variables, model, served
        )
    plan = await asyncio.to_thread(
        served.planner.plan,
        model,
        messages,
        variables=variables,
        tools=tools,
        content=content_of(body),
        whitespace=whitespace_of(body),
    )
    options |= {**origin_of(request), **plan.constraint, "request_id": name, "show_text": True}
    options["whole"] = not body.stream
    if images:
        options["images"] = images
    params = sampling_of(body, 0, model.defaults)
    generation = served.client.generate(plan.tokens, params, **options)
    images.clear()  # the generation has a copy, until they are prepared
    reader = plan.new_reader and plan.new_reader()
    items = ResponseItems(name, reader, streamed=bool(body.stream))
    answer = ResponseAnswer(body, name, served.name, items, token_texts(model, body), warnings)
    try:
        if body.stream:
            return await EventStream.begin(request.receive, answer.events(generation))
        content = await unless_gone(request.receive, answer.whole(generation))
    except InputError as error:
        raise named(error, body) from None
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
        warnings: Warnings,
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
        if warnings:
            self._head["warnings"] = warnings

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


@dataclass(slots=True)
class _Item:
    """One output item. ``texts``: parts of its text, or of the JSON text of a call's arguments."""

    kind: str
    id: str
    function: str = ""
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    status: str = "in_progress"

    def shown(self) -> dict[str, Any]:
        """Return the item as JSON, with its parts so far."""
        found: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        parts = [self.part()] if self.texts or self.status != "in_progress" else []
        if self.kind == _CALL:
            arguments = "".join(self.texts)
            return {
                **found,
                "call_id": self.call_id,
                "name": self.function,
                "arguments": arguments,
            }
        if self.kind == _REASONING:
            return {**found, "summary": [], "content": parts}
        return {**found, "role": "assistant", "content": parts}

    def part(self) -> dict[str, Any]:
        """Return the part of content that a message or a reasoning item consists of."""
        text = "".join(self.texts)
        if self.kind == _REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.records}


class ResponseItems:
    """Grows with the outputs of one answer.

    ``name``: the answer's id. ``reader``: finds reasoning and calls; None if all text is content.
    ``streamed``: events that were returned cannot be taken back, so a call that turns out to be
    malformed stays, with the status ``incomplete``; otherwise it becomes text.
    """

    def __init__(self, name: str, reader: MessageReader | None, *, streamed: bool) -> None:
        self._name = name
        self._reader = reader
        self._streamed = streamed
        self._items: list[_Item] = []
        self._pending: list[Record] = []  # of tokens whose text has not been shown yet
        self._tokens = 0
        self._thought = False
        self._answered = False
        self.reasoning_tokens = 0
        """Number of tokens before the first content or call, if the answer has reasoning."""

    def push(self, text: str, tokens: int, records: Iterable[Record] = ()) -> list[Shown]:
        """Add the text of ``tokens`` tokens and return the events that are certain now."""
        self._pending += records
        if self._reader is not None:
            found = self._take(self._reader.push(text))
            self._tokens += tokens
            if self._thought and not self._answered:
                self.reasoning_tokens = self._tokens
            return found
        if not text and not self._pending:
            return []
        events = self._opened(_MESSAGE)
        events.append(self._text_delta(text, self._pending))
        self._pending = []
        return events

    def finish(self, *, cut: bool) -> list[Shown]:
        """Return the last events. ``cut``: the answer ends at a maximum length."""
        events = [] if self._reader is None else self._take(self._reader.finish(cut=cut))
        if not self._items:
            events += self._opened(_MESSAGE)
        return events + self._closed("incomplete" if cut else "completed")

    def shown(self) -> list[dict[str, Any]]:
        """Return all items as JSON."""
        return [item.shown() for item in self._items]

    def _take(self, events: Iterable[Event]) -> list[Shown]:
        shown: list[Shown] = []
        for event in events:
            match event:
                case Text(text):
                    shown += self._opened(_MESSAGE)
                    shown.append(self._text_delta(text, self._records_of(text)))
                case Reasoning(text):
                    shown += self._opened(_REASONING)
                    shown.append(self._delta(text, content_index=0))
                    self._thought = True
                case CallBegin(function):
                    shown += self._closed()
                    shown += self._opened(_CALL, function)
                case CallArguments(text):
                    shown.append(self._delta(text))
                case CallBroken(text):
                    shown += self._broken(text)
            self._answered = self._answered or not isinstance(event, Reasoning)
        return shown

    def _records_of(self, text: str) -> list[Record]:
        """Return the last records whose tokens cover the text; the others are not of the text."""
        found: list[Record] = []
        missing = len(text.encode("utf-8", "replace"))
        while self._pending and missing > 0:
            record = self._pending.pop()
            missing -= len(record["bytes"])
            found.append(record)
        self._pending = []
        return found[::-1]

    def _broken(self, text: str) -> list[Shown]:
        if self._streamed:
            return self._closed("incomplete")
        self._items.pop()
        if self._items and self._items[-1].kind == _MESSAGE:
            self._items[-1].status = "in_progress"
        return self._take([Text(text)])

    def _opened(self, kind: str, function: str = "") -> list[Shown]:
        """Open an item unless one of this kind is open, and return its first events."""
        last = self._items[-1] if self._items else None
        if last is not None and last.kind == kind and last.status == "in_progress":
            return []
        shown = self._closed()
        number = len(self._items)
        name = f"{_PREFIXES[kind]}-{self._name}" + (f"-{number}" if number else "")
        item = _Item(kind, name, function)
        self._items.append(item)
        if kind == _CALL:
            item.call_id = f"call_{secrets.token_hex(12)}"
        shown.append(("response.output_item.added", {"output_index": number, "item": item.shown()}))
        if kind != _CALL:
            place = self._place(content_index=0)
            shown.append(("response.content_part.added", {**place, "part": item.part()}))
        return shown

    def _text_delta(self, text: str, records: list[Record]) -> Shown:
        self._items[-1].records += records
        return self._delta(text, content_index=0, logprobs=records)

    def _delta(self, text: str, **more: Any) -> Shown:
        item = self._items[-1]
        item.texts.append(text)
        return f"{_STREAMS[item.kind]}.delta", {**self._place(**more), "delta": text}

    def _closed(self, status: str = "completed") -> list[Shown]:
        """Close the last item if it is open, and return its last events."""
        item = self._items[-1] if self._items else None
        if item is None or item.status != "in_progress":
            return []
        item.status = status
        kind = f"{_STREAMS[item.kind]}.done"
        end = ("response.output_item.done", {**self._index(), "item": item.shown()})
        if item.kind == _CALL:
            whole = {"name": item.function, "arguments": "".join(item.texts)}
            return [(kind, {**self._place(), **whole}), end]
        part = item.part()
        place = self._place(content_index=0)
        whole = {"text": part["text"]}
        if item.kind == _MESSAGE:
            whole["logprobs"] = part["logprobs"]
        return [
            (kind, {**place, **whole}),
            ("response.content_part.done", {**place, "part": part}),
            end,
        ]

    def _place(self, **more: Any) -> dict[str, Any]:
        return {"item_id": self._items[-1].id, **self._index(), **more}

    def _index(self) -> dict[str, int]:
        return {"output_index": len(self._items) - 1}
