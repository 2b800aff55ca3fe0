"""Converts bodies to what the native client takes: sampling parameters, options, prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..client.options import RequestOptions
from ..proto.errors import InputError
from ..proto.sampling import MAX_SEED, SamplingParams
from .bodies import MAX_PROMPTS, CompletionBody, GenerationBody, Prompts, ResponseFormat
from .errors import ParameterError

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
)
_OTHER = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Names of the native parameters that are named otherwise in bodies."""


def sampling_of(body: GenerationBody, index: int) -> SamplingParams:
    """Return the parameters of answer ``index`` of ``n``. Raises ParameterError.

    Each answer has a random stream of its own: with a seed, answer 0 has this seed.
    """
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    given["max_new_tokens"] = body.answer_tokens()
    given["min_new_tokens"] = body.min_tokens
    given["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.seed is not None:
        given["seed"] = (body.seed + index) & MAX_SEED  # negative seeds are allowed by OpenAI
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except InputError as error:
        raise _renamed(error) from None


def _renamed(error: InputError) -> InputError:
    """Name the field as the body does."""
    said = str(error)
    name = said.split(" ", 1)[0].split("[", 1)[0]
    public = _OTHER.get(name, name)
    if public in GenerationBody.__struct_fields__:
        return ParameterError(said.replace(name, public, 1), public)
    return error


def options_of(body: GenerationBody, headers: Mapping[str, str]) -> RequestOptions:
    """Return the options of a request; headers have precedence over the body."""
    options: RequestOptions = {}
    target = headers.get("x-target-endpoint")
    if target:
        options["target_endpoint"] = target
    if body.cache_salt is not None:
        options["cache_salt"] = body.cache_salt
    if body.response_format is not None:
        schema = _schema_of(body.response_format)
        if schema is not None:
            options["json_schema"] = schema
    wanted = body.shown_log_probs()
    if wanted is not None:
        options["log_probabilities"] = max(1, wanted)
    return options


def _schema_of(form: ResponseFormat) -> Mapping[str, Any] | None:
    if form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.type != "json_schema":
        raise ParameterError(
            "response_format.type must be text, json_object or json_schema",
            "response_format.type",
        )
    if form.json_schema is None or form.json_schema.schema is None:
        raise ParameterError(
            "response_format.json_schema.schema is missing", "response_format.json_schema.schema"
        )
    return form.json_schema.schema


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """Return the prompts of a completion as a list."""
    return list_of(body.prompt, "prompt", MAX_PROMPTS)


def list_of(given: Prompts, name: str, most: int) -> list[str | list[int]]:
    """Return texts or lists of token ids as a list: one text and one list of ids count as one.

    Raises ParameterError, with the field's name, for a mixture, an empty list or too many.
    """
    entries: list[Any] = [given] if isinstance(given, str) else given
    kinds = set(map(type, entries))
    if kinds == {int}:
        entries = [entries]
    elif len(kinds) != 1:
        what = "mixes texts and token ids" if entries else "is empty"
        raise ParameterError(f"{name} {what}", name)
    if len(entries) > most:
        raise ParameterError(f"{name} has {len(entries)} entries, at most {most} are allowed", name)
    if any(len(entry) == 0 for entry in entries):
        raise ParameterError(f"{name} has an empty entry", name)
    return entries


def messages_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are texts, as chat templates expect them."""
    return [_message(at, message) for at, message in enumerate(messages)]


def _message(at: int, message: dict[str, Any]) -> dict[str, Any]:
    place = f"messages[{at}]"
    if not isinstance(message.get("role"), str):
        raise ParameterError(f"{place}.role must be text", f"{place}.role")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ParameterError(
                f"{place}.content: the model takes parts of type text, not {kind!r}",
                f"{place}.content",
            )
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}
