"""Converts bodies to what the native client takes: sampling parameters, options, prompts."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import msgspec

from baton.client.options import RequestOptions
from baton.proto.errors import InputError, PromptTooLong, SchemaTooComplex
from baton.proto.json_schema import check_pattern, whitespace_options
from baton.proto.sampling import (
    MAX_SEED,
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
)

from .bodies import (
    MAX_PROMPTS,
    CompletionBody,
    GenerationBody,
    Prompts,
    ResponseFormat,
    SamplingBody,
)
from .errors import ParameterError
from .grammars import Content, Schema, choice_rule, regex_rule

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
_scalars = attrgetter(*(name for name in _SAME if name != "stop_token_ids"))
_known: dict[object, SamplingParams] = {}
"""Checked parameters with the model's defaults, by the fields and defaults that decide them."""
_MOST_KNOWN = 1024
_OTHER = {
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "min_new_tokens": ("min_tokens",),
}
"""Names of the native parameters that are named otherwise in bodies."""


def sampling_of(
    body: SamplingBody, index: int, defaults: SamplingParamsGenerationConfigDefaults
) -> SamplingParams:
    """Return the parameters of answer ``index`` of ``n``. Raises ParameterError.

    ``defaults``: of the model. Each answer has a separate random stream: with a seed, answer 0 has
    this seed.
    """
    shared = shared_sampling(body, defaults)
    seed = seed_of(body, index)
    return _made(body, seed) if shared is None else shared.seeded(seed)


def shared_sampling(
    body: SamplingBody, defaults: SamplingParamsGenerationConfigDefaults
) -> SamplingParams | None:
    """Return parameters with the model's defaults that need only a seed; None if there are none.

    Bodies with equal fields share them. Raises ParameterError.
    """
    if body.stop is not None or body.stop_token_ids is not None or body.logit_bias is not None:
        return None
    # The parameters refer to the defaults, so no other defaults get this id.
    key = (id(defaults), body.answer_tokens(), body.min_tokens, *_scalars(body))
    known = _known.get(key)
    if known is None:
        known = _known[key] = _made(body, None).completed(defaults)
        if len(_known) > _MOST_KNOWN:
            del _known[next(iter(_known))]
    return known


def seed_of(body: SamplingBody, index: int) -> int | None:
    """Return the seed of answer ``index`` of ``n``; None: a random one."""
    if body.seed is None:
        return None
    return (body.seed + index) & MAX_SEED  # negative seeds are allowed by OpenAI


def _made(body: SamplingBody, seed: int | None) -> SamplingParams:
    given: dict[str, Any] = {"seed": seed}
    given |= {name: getattr(body, name) for name in _SAME}
    given["max_new_tokens"] = body.answer_tokens()
    given["min_new_tokens"] = body.min_tokens
    given["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.logit_bias:
        given["logit_bias"] = _biases(body.logit_bias)
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except InputError as error:
        raise renamed(error, body.__struct_fields__) from None


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Return the biases by token id, which JSON has as text. Raises ParameterError."""
    biases: dict[int, float] = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            text = f"logit_bias: {token[:40]!r} is not a token id"
            raise ParameterError(text, "logit_bias")
        biases[int(token)] = bias
    return biases


def renamed(error: InputError, fields: tuple[str, ...]) -> InputError:
    """Return the client's error with the names of a body that has these ``fields``.

    An error whose first word is not a field stays as it is.
    """
    said = str(error)
    name = said.split(" ", 1)[0].split("[", 1)[0]
    for native, others in _OTHER.items():
        for public in others:
            if public in fields:
                said = said.replace(native, public)
                name = public if name == native else name
    return ParameterError(said, name) if name in fields else error


_CONTENTS = ("json", "json_object", "regex", "choice", "grammar")
_ONE_CONTENT = "structured_outputs needs one of json, json_object, regex, choice and grammar"
_PROMPTS = ("messages", "input", "prompt")
"""The field of a body that has the prompt, with its images."""


def named(error: InputError, body: SamplingBody) -> InputError:
    """Return the cluster's error with the names of the body, and its field where it is known."""
    kind, fields = type(error), body.__struct_fields__
    if kind not in (InputError, PromptTooLong, SchemaTooComplex):
        return error
    if kind is InputError:
        error = renamed(error, fields)
    field = ""
    if kind is PromptTooLong or str(error).startswith("images"):
        field = next((name for name in _PROMPTS if name in fields), "")
    elif kind is SchemaTooComplex or str(error).startswith(("json_schema", "grammar")):
        field = _constraining_field(body)
    if not field or isinstance(error, ParameterError):
        return error
    return ParameterError(str(error), field, error.code)


def _constraining_field(body: SamplingBody) -> str:
    """Return the name of the field that constrains the answer."""
    if body.structured_outputs is not None:
        return "structured_outputs"
    if body.answer_format() is None:
        return "tools"
    return "response_format" if "response_format" in body.__struct_fields__ else "text.format"


def options_of(body: SamplingBody) -> RequestOptions:
    """Return the options of a request that are fields of its body."""
    options: RequestOptions = {}
    if body.cache_salt is not None:
        options["cache_salt"] = body.cache_salt
    if body.slo_ttft is not None:
        options["slo_ttft"] = body.slo_ttft
    if body.slo_itl is not None:
        options["slo_itl"] = body.slo_itl
    wanted = body.shown_log_probs()
    if wanted is not None:
        options["log_probabilities"] = max(1, wanted)
    if isinstance(body, GenerationBody) and (scored := body.scored_prompt()) is not None:
        options["prompt_log_probabilities"] = scored
    return options


def content_of(body: SamplingBody) -> Content | None:
    """Return what the content must be, or None. Raises ParameterError."""
    form = body.answer_format()
    schema = None if form is None else _schema_of(form)
    asked = body.structured_outputs
    given = [name for name in _CONTENTS if asked and getattr(asked, name) not in (None, False)]
    if asked is None or not given:
        if asked is not None and schema is None and not getattr(body, "tools", None):
            raise ParameterError(_ONE_CONTENT, "structured_outputs")
        return None if schema is None else Content(schema)
    if schema is not None:
        raise ParameterError(
            "structured_outputs cannot be combined with response_format", "structured_outputs"
        )
    if len(given) != 1:
        raise ParameterError(_ONE_CONTENT, "structured_outputs")
    if asked.regex is not None:
        check_pattern(asked.regex)
        return Content(rule=regex_rule(asked.regex))
    if asked.choice is not None:
        return Content(rule=choice_rule(asked.choice))
    if asked.grammar is not None:
        return Content(grammar=asked.grammar)
    return Content({"type": "object"} if asked.json is None else _json_of(asked.json))


def whitespace_of(body: SamplingBody) -> dict[str, Any]:
    """Return the options of schemas for whitespace between JSON tokens. Raises ParameterError."""
    asked = body.structured_outputs
    if asked is None:
        return {}
    try:
        return whitespace_options(asked.disable_any_whitespace, asked.whitespace_pattern)
    except InputError as error:
        name = "structured_outputs.whitespace_pattern"
        raise ParameterError(f"structured_outputs.{error}", name) from None


def _json_of(given: dict[str, Any] | bool | str) -> Schema:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any] | bool)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise ParameterError(f"structured_outputs.json: {error}", "structured_outputs") from None


def _schema_of(form: ResponseFormat) -> Mapping[str, Any] | None:
    if form.type != "json_schema" and form.json_schema is not None:
        name = "response_format.json_schema"
        raise ParameterError(f"{name} needs the type json_schema, not {form.type}", name)
    if form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
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
        return [entries]
    if len(kinds) != 1:
        what = "mixes texts and token ids" if entries else "is empty"
        raise ParameterError(f"{name} {what}", name)
    if len(entries) > most:
        raise ParameterError(f"{name} has {len(entries)} entries, at most {most} are allowed", name)
    if any(len(entry) == 0 for entry in entries):
        raise ParameterError(f"{name} has an empty entry", name)
    return entries
