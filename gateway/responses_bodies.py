"""The body of ``POST /v1/responses``; its input, instructions and tools as templates expect them.

Neighbouring items of the assistant (reasoning, a message, calls) are one message, as in chats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .bodies import (
    MAX_TOP_LOGPROBS,
    Count,
    JsonSchema,
    ResponseFormat,
    SamplingBody,
    Warnings,
)
from .errors import ParameterError
from .field_rules import Rules
from .messages import ImageUrl, Unknown, arguments_of, side_of
from .tools import Tools, tools_of

LOG_PROBS = "message.output_text.logprobs"
"""The entry of ``include`` that asks for log-probabilities."""
Message = dict[str, Any]
_ROLES = {"developer": "system"}
"""Roles that chat templates know by another name."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_REASONING_PARTS = ("reasoning_text", "summary_text")
_PART_FIELDS = {"type", "text", "annotations", "logprobs"}


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer must look like; the other fields go with the type ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What the text of the answer must look like."""

    format: TextFormat | None = None
    verbosity: str | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call; ``parameters``: the JSON schema of its arguments."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ObfuscationOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: bool = False


class ResponsesBody(SamplingBody, kw_only=True):
    """``POST /v1/responses``. Parameters that OpenAI does not have are those of chat requests."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream_options: ObfuscationOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    background: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    truncation: Any = None

    def answer_tokens(self) -> int | None:
        """Return the maximum number of tokens of an answer; None: up to the context's end."""
        return self.max_output_tokens

    def answer_format(self) -> ResponseFormat | None:
        """Return what the answer must look like."""
        form = self.text and self.text.format
        if not form:
            return None
        if form.type == "json_schema":
            schema = JsonSchema(form.schema, form.name, form.description, form.strict)
            return ResponseFormat(form.type, schema)
        return ResponseFormat(form.type)

    def shown_log_probs(self) -> int | None:
        """Return the number of most likely tokens to show per token; None: no log-probabilities."""
        if LOG_PROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ParameterError(f"top_logprobs needs include: [{LOG_PROBS!r}]", "top_logprobs")
        return None

    def check(self, *, strict: bool = False) -> Warnings:
        """Return what is ignored of the options. Raises ParameterError for what is not."""
        form = self.text and self.text.format
        if form and form.type == "json_schema" and form.schema is None:
            raise ParameterError("text.format.schema is missing", "text.format.schema")
        if form and form.type != "json_schema" and form.schema is not None:
            name = "text.format.schema"
            raise ParameterError(f"{name} needs the type json_schema, not {form.type}", name)
        if self.stream_options and not self.stream:
            raise ParameterError("stream_options needs stream: true", "stream_options")
        ignored = dict(self._ignored_options())
        if strict and ignored:
            name, reason = next(iter(ignored.items()))
            raise ParameterError(f"{name} is not supported: {reason}", name.split(" ")[0])
        return [f"{name} is ignored: {reason}" for name, reason in ignored.items()]

    def _ignored_options(self) -> Iterator[tuple[str, str]]:
        """Yield the inner options that change nothing, and why."""
        for name in self.include or ():
            if name != LOG_PROBS:
                yield f"include {name[:80]!r}", "the response has no such entries"
        if self.text and self.text.verbosity not in (None, "medium"):
            yield "text.verbosity", "it is a property of OpenAI's models"
        if self.stream_options and self.stream_options.include_obfuscation:
            yield "stream_options.include_obfuscation", "events are not padded"
        for name, value in (self.reasoning or {}).items():
            if name != "effort" and value is not None:
                yield f"reasoning.{name[:80]}", "reasoning is shown as it is"


RESPONSES_REFUSED: Rules = {
    "background": ((False,), "an answer is not kept for later"),
    "conversation": ((), "nothing is stored: give the conversation as input"),
    "previous_response_id": ((), "nothing is stored: give the conversation as input"),
    "prompt": ((), "prompts are not stored"),
}
RESPONSES_IGNORED: Rules = {
    "max_tool_calls": ((), "it counts tools of the server, which are not offered"),
    "truncation": (("disabled",), "a too long input is refused"),
}
"""As in :mod:`.field_rules`."""


# --------------------------------------------------------------------------- input


def messages_of_input(
    body: ResponsesBody, images: list[ImageUrl], unknown: Unknown
) -> list[Message]:
    """Return instructions and input as messages for the chat template. Raises ParameterError.

    ``images``: gets the URLs of images, in order; their messages have parts of type image.
    ``unknown``: gets the unknown members of items and their parts.
    """
    messages: list[Message] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    first = len(messages)
    for at, item in enumerate(body.input):
        found = _message(f"input[{at}]", item, images, unknown)
        last = messages[-1] if len(messages) > first else {}
        if last.get("role") == found["role"] == "assistant" and _fits(last, found):
            _join(last, found)
        else:
            messages.append(found)
    for message in messages[first:]:
        message.setdefault("content", "")  # templates join it to texts
    return messages


def tools_of_body(body: ResponsesBody) -> Tools | None:
    """Return the tools that the answer may use, or None. Raises ParameterError."""
    given = [_tool(f"tools[{at}]", tool) for at, tool in enumerate(body.tools or ())]
    choice = body.tool_choice
    if isinstance(choice, dict):
        if choice.get("type") != "function" or choice.keys() - {"type", "name"}:
            raise ParameterError(
                "tool_choice must be none, auto, required, or the name of a function as in "
                '{"type": "function", "name": "f"}',
                "tool_choice",
            )
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    definitions = [{"type": "function", "function": _without_none(tool)} for tool in given]
    try:
        return tools_of(definitions, choice, body.parallel_tool_calls)
    except ParameterError as error:  # such a tool has its fields in ``function``
        said, name = str(error), error.parameter or ""
        raise ParameterError(
            said.replace(".function.", "."), name.replace(".function.", ".")
        ) from None


def _tool(place: str, tool: Mapping[str, Any]) -> FunctionTool:
    if tool.get("type") != "function":
        text = f"{place}.type must be function, not {_shown(tool.get('type'))}"
        raise ParameterError(text, f"{place}.type")
    Unknown(strict=True).check(place, tool, FunctionTool.__struct_fields__)
    try:
        given = {name: value for name, value in tool.items() if value is not None}
        return msgspec.convert(given, FunctionTool)
    except msgspec.ValidationError as error:
        said = str(error).replace("`$.", f"`{place}.").replace("`", "")
        raise ParameterError(f"{place}: {said[:1].lower()}{said[1:]}", place) from None


def _without_none(tool: FunctionTool) -> dict[str, Any]:
    fields = {name: getattr(tool, name) for name in tool.__struct_fields__ if name != "type"}
    return {name: value for name, value in fields.items() if value is not None}


def _fits(last: Message, found: Message) -> bool:
    """Return whether the message continues the turn of the last one."""
    if "tool_calls" in found:
        return True
    if "reasoning_content" in found:
        return False
    return "content" not in last


def _join(last: Message, found: Message) -> None:
    for name, value in found.items():
        if name == "tool_calls":
            last.setdefault("tool_calls", []).extend(value)
        elif name != "role":
            last[name] = value


def _message(
    place: str, item: Mapping[str, Any], images: list[ImageUrl], unknown: Unknown
) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        return _plain_message(place, item, images, unknown)
    read = _ITEMS.get(kind) if isinstance(kind, str) else None
    if read is None:
        text = f"{place}.type must be one of {', '.join(('message', *_ITEMS))}, not {_shown(kind)}"
        raise ParameterError(text, f"{place}.type")
    return read(place, item, unknown)


def _plain_message(
    place: str, item: Mapping[str, Any], images: list[ImageUrl], unknown: Unknown
) -> Message:
    # ``id`` and ``status`` of an item change nothing.
    unknown.check(place, item, ("type", "role", "content", "id", "status"))
    role = _text(place, item, "role")
    content = _content_of(f"{place}.content", item.get("content"), images, unknown)
    return {"role": _ROLES.get(role, role), "content": content}


def _content_of(
    place: str, content: Any, images: list[ImageUrl], unknown: Unknown
) -> str | list[dict[str, str]]:
    """Return a text, or with images a list of parts as chat templates know them."""
    parts = content if isinstance(content, list) else []
    if not any(_is_image(part) for part in parts):
        return _text_of(place, content, _TEXT_PARTS, unknown)
    found: list[dict[str, str]] = []
    for at, part in enumerate(parts):
        if _is_image(part):
            images.append(_image_url(f"{place}[{at}]", part, unknown))
            found.append({"type": "image"})
        else:
            text = _text_of(place, [part], _TEXT_PARTS, unknown, at)
            found.append({"type": "text", "text": text})
    return found


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _image_url(place: str, part: Mapping[str, Any], unknown: Unknown) -> ImageUrl:
    if part.get("file_id") is not None:
        text = f"{place}.file_id is not supported: nothing is stored; give image_url"
        raise ParameterError(text, f"{place}.file_id")
    unknown.check(place, part, ("type", "image_url", "detail", "file_id"))
    side = side_of(part.get("detail"), f"{place}.detail")
    return ImageUrl(f"{place}.image_url", _text(place, part, "image_url"), side)


def _call(place: str, item: Mapping[str, Any], unknown: Unknown) -> Message:
    unknown.check(place, item, ("type", "call_id", "name", "arguments", "id", "status"))
    name, call_id = _text(place, item, "name"), _text(place, item, "call_id")
    arguments = arguments_of(_text(place, item, "arguments"), f"{place}.arguments")
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _call_output(place: str, item: Mapping[str, Any], unknown: Unknown) -> Message:
    unknown.check(place, item, ("type", "call_id", "output", "id", "status"))
    content = _text_of(f"{place}.output", item.get("output"), _TEXT_PARTS, unknown)
    return {"role": "tool", "tool_call_id": _text(place, item, "call_id"), "content": content}


def _reasoning(place: str, item: Mapping[str, Any], unknown: Unknown) -> Message:
    unknown.check(place, item, ("type", "summary", "content", "id", "status"))
    parts = item.get("content") or item.get("summary") or []
    text = _text_of(f"{place}.content", parts, _REASONING_PARTS, unknown)
    return {"role": "assistant", "reasoning_content": text}


_ITEMS: Mapping[str, Callable[[str, Mapping[str, Any], Unknown], Message]] = {
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
}


def _text(place: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ParameterError(f"{place}.{name} must be text", f"{place}.{name}")
    return value


def _text_of(
    place: str, content: Any, kinds: tuple[str, ...], unknown: Unknown, first: int = 0
) -> str:
    """Return a text, or the texts of parts, one a line. ``first``: the place of the first part."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ParameterError(f"{place} must be text or parts of text", place)
    texts: list[str] = []
    for at, part in enumerate(content, first):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise ParameterError(f"{place}: the model takes text, not {_shown(kind)}", place)
        unknown.check(f"{place}[{at}]", part, _PART_FIELDS)
        texts.append(part["text"])
    return "\n".join(texts)


def _shown(value: object) -> str:
    return repr(value)[:80]
