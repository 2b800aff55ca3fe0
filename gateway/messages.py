"""Converts messages of requests to the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from .bodies import MOST_UNKNOWN, Warnings
from .errors import ParameterError

LOW_DETAIL_SIDE = 512
"""Longest side, in pixels, of an image with ``detail: low``, before it is prepared."""


class ImageUrl(NamedTuple):
    """A URL of an image. ``place``: the field, as ``messages[0].content[1].image_url.url``."""

    place: str
    url: str
    max_side: int = 0


class Unknown:
    """Members of messages that no reader knows: named among the warnings, or refused if ``strict``.

    ``warnings``: of the first of them.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.warnings: Warnings = []

    def check(self, place: str, item: Mapping[str, Any], known: Collection[str]) -> None:
        """Note the members that are neither known nor null. Raises ParameterError."""
        for name, value in item.items():
            if name in known or value is None:
                continue
            wrong = f"{place}.{name[:80]}"
            if self._strict:
                raise ParameterError(f"{wrong} is not a known parameter", wrong)
            if len(self.warnings) < MOST_UNKNOWN:
                self.warnings.append(f"{wrong} is ignored: it is not a known parameter")


def messages_of(
    messages: Sequence[dict[str, Any]],
    images: list[ImageUrl] | None = None,
    unknown: Unknown | None = None,
) -> list[dict[str, Any]]:
    """Return messages whose contents are texts, and the arguments of whose calls are objects.

    ``images``: gets the URLs of images, in order; such contents stay lists, with parts of type
    image. None: images are refused. ``unknown``: gets the unknown members of parts; the template
    gets those of messages. Raises ParameterError, which names the message.
    """
    rest = Unknown() if unknown is None else unknown
    return [_message(one, f"messages[{at}]", images, rest) for at, one in enumerate(messages)]


def _message(
    message: dict[str, Any], place: str, images: list[ImageUrl] | None, unknown: Unknown
) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ParameterError(f"{place}.role must be text", f"{place}.role")
    message = _without_empty(message)
    if "function_call" in message:
        raise ParameterError(
            f"{place}.function_call is not supported: use tool_calls", f"{place}.function_call"
        )
    changed = message
    if message["role"] == "developer":
        changed["role"] = "system"  # the name that chat templates know
    content = message.get("content")
    if isinstance(content, list):
        changed["content"] = _content_of(content, f"{place}.content", images, unknown)
    elif content is None and message["role"] == "assistant":
        changed["content"] = ""  # templates join it to texts
    elif not isinstance(content, str):
        raise ParameterError(f"{place}.content must be text or parts of text", f"{place}.content")
    calls = message.get("tool_calls")
    if calls:
        changed["tool_calls"] = _calls_of(calls, f"{place}.tool_calls")
    return changed


def _without_empty(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without null and empty members, which clients echo back.

    Templates ask whether a message has a member such as ``tool_calls``. Its content stays.
    """
    return {
        name: value
        for name, value in message.items()
        if name == "content" or (value is not None and value != [])
    }


def _content_of(
    parts: list[Any], place: str, images: list[ImageUrl] | None, unknown: Unknown
) -> str | list[dict[str, str]]:
    for at, part in enumerate(parts):
        if isinstance(part, dict):
            unknown.check(f"{place}[{at}]", part, ("type", "text", "image_url"))
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if images is None or "image_url" not in kinds:
        return _text_of(parts, place)
    found: list[dict[str, str]] = []
    for at, (kind, part) in enumerate(zip(kinds, parts, strict=True)):
        if kind == "image_url":
            images.append(_image_url(part, f"{place}[{at}].image_url", unknown))
            found.append({"type": "image"})
        else:
            text = _text_of([part], f"{place}[{at}]", "text or image_url")
            found.append({"type": "text", "text": text})
    return found


def _image_url(part: dict[str, Any], place: str, unknown: Unknown) -> ImageUrl:
    value = part.get("image_url")
    value = {"url": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or not isinstance(value.get("url"), str):
        raise ParameterError(f"{place}.url must be text", f"{place}.url")
    unknown.check(place, value, ("url", "detail"))
    return ImageUrl(f"{place}.url", value["url"], side_of(value.get("detail"), f"{place}.detail"))


def side_of(detail: object, place: str) -> int:
    """Return the longest side of an image with this detail, 0: any. Raises ParameterError."""
    if detail not in (None, "auto", "low", "high"):
        raise ParameterError(f"{place} must be auto, low or high", place)
    return LOW_DETAIL_SIDE if detail == "low" else 0


def _text_of(parts: list[Any], place: str, known: str = "text") -> str:
    """Return the text of parts. ``known``: types of parts that may stand there, for the error."""
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ParameterError(
                f"{place}: only parts of type {known} are taken here, not {kind!r}", place
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _calls_of(calls: object, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ParameterError(f"{place} must be a list of calls", place)
    return [_call_of(call, f"{place}[{at}]") for at, call in enumerate(calls)]


def _call_of(call: object, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise ParameterError(f"{place}.function must be an object", f"{place}.function")
    if not isinstance(function.get("name"), str):
        raise ParameterError(f"{place}.function.name must be text", f"{place}.function.name")
    arguments = arguments_of(function.get("arguments"), f"{place}.function.arguments")
    given = {name: value for name, value in call.items() if value is not None}
    return {**given, "function": {**function, "arguments": arguments}}


def arguments_of(given: object, place: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, also from its JSON text.

    Raises ParameterError, which names the ``place``.
    """
    arguments = _decoded(given) if isinstance(given, str) else given
    if not isinstance(arguments, dict):
        raise ParameterError(f"{place} must be the JSON text of an object", place)
    return arguments


def _decoded(text: str) -> object:
    try:
        return msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
