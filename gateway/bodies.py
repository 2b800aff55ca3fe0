"""The JSON bodies of requests: their fields, types and limits.

Invariant: no field is ignored silently. A field is used, or it is refused, or the response names it
among its warnings: see :mod:`.field_rules`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, inspect

from baton.proto.errors import InputError

from .errors import ParameterError
from .field_rules import IGNORED, RECORDS, REFUSED, Rules

MAX_BODY_BYTES = 8 << 20
MAX_N = 16
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 1024
MAX_TEXTS = 2048
DEFAULT_COMPLETION_TOKENS = 16

Count = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenIds = list[TokenId]
Prompts = str | list[str | TokenId | TokenIds]
"""One text, texts, one list of token ids, or lists of them; which one is checked later."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``include_usage``: send a last chunk with the number of tokens."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema as OpenAI's clients send it; ``schema`` is the part that constrains the answer.

    Every schema is enforced, whatever ``strict`` is.
    """

    schema: dict[str, Any] | None = None
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer must look like; ``json_schema`` goes with the type of this name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's field: one of a JSON schema, any object, a pattern, texts, or a grammar in Lark.

    ``disable_any_whitespace``, ``whitespace_pattern``: of JSON, also that of other fields.
    """

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all bodies."""

    model: str | None = None
    user: Any = None


class SamplingBody(Body, kw_only=True):
    """Fields of all requests that get text; null stands for the default."""

    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    slo_ttft: float | None = None
    slo_itl: float | None = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    store: Any = None

    def answer_tokens(self) -> int | None:
        """Return the maximum number of tokens of an answer; None: up to the context's end."""
        raise NotImplementedError

    def answer_format(self) -> ResponseFormat | None:
        """Return what the answer must look like."""
        raise NotImplementedError

    def shown_log_probs(self) -> int | None:
        """Return the number of most likely tokens to show per token; None: no log-probabilities."""
        raise NotImplementedError


class GenerationBody(SamplingBody, kw_only=True):
    """Fields that chat and completion requests share."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = 1
    max_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    spaces_between_special_tokens: bool | None = None  # special tokens are not in the text
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    # Refused or ignored; see field_rules.
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    priority: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    request_id: Any = None
    session_id: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    truncation_side: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    stream_interval: Any = None
    return_tokens_as_token_ids: Any = None
    return_token_ids: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None

    def answer_format(self) -> ResponseFormat | None:
        """Return what the answer must look like."""
        return self.response_format

    def scored_prompt(self) -> int | None:
        """Return the most likely tokens to show per prompt token; None: no log-probabilities."""
        if self.prompt_logprobs is not None and self.stream:
            raise ParameterError("prompt_logprobs cannot be streamed", "prompt_logprobs")
        return self.prompt_logprobs

    @property
    def answers(self) -> bool:
        """Whether new tokens are wanted, and not the prompt's log-probabilities alone."""
        return True


class ChatBody(GenerationBody, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    echo: Any = None
    documents: Any = None
    include_reasoning: Any = None
    add_special_tokens: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None

    def answer_tokens(self) -> int | None:
        """Return the maximum number of tokens of an answer; None: up to the context's end."""
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise ParameterError("max_tokens differs from max_completion_tokens", "max_tokens")
        return self.max_completion_tokens

    def shown_log_probs(self) -> int | None:
        """Return the number of most likely tokens to show per token; None: no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Prompts
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = False
    add_special_tokens: bool | None = None

    suffix: Any = None
    best_of: Any = None
    prompt_embeds: Any = None

    def answer_tokens(self) -> int | None:
        """Return the maximum number of tokens of an answer, 16 by default as OpenAI has it."""
        if self.max_tokens is None:
            return DEFAULT_COMPLETION_TOKENS
        return max(1, self.max_tokens)  # the cluster computes one token, which is left out

    @property
    def answers(self) -> bool:
        """Whether new tokens are wanted, and not the prompt's log-probabilities alone."""
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ParameterError("max_tokens of 0 needs echo or prompt_logprobs", "max_tokens")
        return self.max_tokens != 0

    def shown_log_probs(self) -> int | None:
        """Return the number of most likely tokens to show per token; None: no log-probabilities."""
        return self.logprobs

    def scored_prompt(self) -> int | None:
        """Return the most likely tokens to show per prompt token; None: no log-probabilities."""
        own, echoed = super().scored_prompt(), self.logprobs if self.echo else None
        return echoed if own is None else max(own, echoed or 0)


class EmbeddingBody(Body, kw_only=True):
    """``POST /v1/embeddings``."""

    input: Prompts
    encoding_format: str | None = "float"
    dimensions: Count | None = None
    add_special_tokens: Any = None
    embed_dtype: Any = None
    endianness: Any = None
    messages: Any = None
    mm_processor_kwargs: Any = None
    normalize: Any = None
    truncate_prompt_tokens: Any = None
    use_activation: Any = None
    cache_salt: Any = None
    priority: Any = None
    request_id: Any = None
    truncation_side: Any = None


class TokenizeBody(Body, kw_only=True):
    """``POST /tokenize``: a prompt, or the messages of a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    """``POST /detokenize``."""

    tokens: TokenIds


B = TypeVar("B", bound=Body)
Warnings = list[str]
"""Of a response: a sentence for each field that was ignored."""
TEMPLATE_FIELDS = ("reasoning_effort",)
"""Fields that are ignored only if the model's chat template does not use them."""
_NONE: Rules = MappingProxyType({})
MOST_UNKNOWN = 64
_MOST_INNER = 16  # each takes one more look at the whole body


class BodyReader(Generic[B]):
    """Decodes JSON bodies of one type. Raises ParameterError, which names the field.

    ``refused``, ``ignored``: rules of this type besides those of all types.
    """

    def __init__(self, kind: type[B], refused: Rules = _NONE, ignored: Rules = _NONE) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        fields = set(kind.__struct_fields__)
        self._refused = {k: v for k, v in {**REFUSED, **refused}.items() if k in fields}
        self._ignored = {k: v for k, v in {**IGNORED, **ignored}.items() if k in fields}
        self._records = {k: v for k, v in RECORDS.items() if k in fields}
        self._names = (*self._refused, *self._ignored, *self._records)
        # With two names, an attrgetter returns a tuple.
        self._values: Callable[[B], tuple[Any, ...]] = attrgetter(*self._names, "model", "model")

    def read(self, content: bytes, *, strict: bool = False) -> tuple[B, Warnings]:
        """Decode and check a body, and return it with what was ignored. Errors name the field."""
        warnings: Warnings = []
        try:
            try:
                body = self._decoder.decode(content)
            except msgspec.ValidationError as error:
                if strict or not _UNKNOWN.match(str(error)):
                    raise
                body = self._without_unknown(msgspec.json.decode(content), warnings)
        except msgspec.ValidationError as error:
            raise _wrong_field(str(error), self._kind, content) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"the body is not valid JSON: {error}") from None
        except RecursionError:
            raise InputError("the body is nested too deep") from None
        values = self._values(body)[:-2]
        if values.count(None) < len(values):
            for name, value in zip(self._names, values, strict=True):
                if value is not None:
                    self._check(name, value, warnings, strict=strict)
        return body, warnings

    def _check(self, name: str, value: object, warnings: Warnings, *, strict: bool) -> None:
        """Raise ParameterError for a refused field, or note that it is ignored."""
        if name in self._records:
            if not strict:
                warnings.append(f"{name} is ignored: {self._records[name]}")
            return
        neutral, reason = (self._refused | self._ignored)[name]
        if any(_same(value, one) for one in neutral):
            return
        if strict or name in self._refused:
            raise ParameterError(f"{name} is not supported: {reason}", name)
        if name not in TEMPLATE_FIELDS:
            warnings.append(f"{name} is ignored: {reason}")

    def _without_unknown(self, tree: dict[str, Any], warnings: Warnings) -> B:
        """Return the body without its unknown fields, also those of inner objects.

        Raises msgspec.ValidationError, also for too many of them.
        """
        unknown = [name for name in tree if name not in self._kind.__struct_fields__]
        for name in unknown[:MOST_UNKNOWN]:
            del tree[name]
            warnings.append(f"{name[:80]} is ignored: it is not a known parameter")
        for _ in range(_MOST_INNER):
            try:
                return msgspec.convert(tree, self._kind)
            except msgspec.ValidationError as error:
                found = _UNKNOWN.match(str(error))
                inner = _place_in(tree, found[2]) if found and found[2] else None
                if found is None or not isinstance(inner, dict) or found[1] not in inner:
                    raise
                del inner[found[1]]
                name = f"{found[2]}.{found[1]}"
                warnings.append(f"{name[:80]} is ignored: it is not a known parameter")
        return msgspec.convert(tree, self._kind)


def _same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral


_UNKNOWN = re.compile(r"Object contains unknown field `(.+?)`(?: - at `\$\.?(.*)`)?$")
_MISSING = re.compile(r"Object missing required field `(.+?)`(?: - at `\$\.?(.*)`)?$")
_WRONG = re.compile(r"(.*) - at `\$\.?(.*)`$", re.DOTALL)


MAX_SHOWN_CHARS = 40
_RANGE = re.compile(r"Expected `(?:int|float)` [<>]")
_STEP = re.compile(r"([^.\[\]]+)|\[([0-9]+)\]")
_ENUM = re.compile(r"Invalid enum value (.*)$", re.DOTALL)
_TYPES = re.compile(r"\b(int|float|str|bool)\b(?=[^']*$)")
_JSON_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}


def _wrong_field(said: str, kind: type[Body], content: bytes) -> InputError:
    """Return an error that names the wrong field of a ``kind`` of body, from msgspec's message.

    For a number out of range it also names the number in ``content``.
    """
    for pattern, text in ((_UNKNOWN, "{} is not a known parameter"), (_MISSING, "{} is missing")):
        found = pattern.match(said)
        if found:
            name = ".".join(part for part in (found[2], found[1]) if part)
            return ParameterError(text.format(name), name)
    found = _WRONG.match(said)
    if found is None:
        return InputError(f"the body: {_plain(said)}")
    wrong = _ENUM.match(found[1])
    if wrong is not None:
        known = ", ".join(_values_of(kind, found[2]))
        return ParameterError(f"{found[2]} must be one of {known}, not {wrong[1]}", found[2])
    text = f"{found[2] or 'the body'}: {_plain(found[1])}"
    if _RANGE.match(found[1]):
        text += _but_got(content, found[2])
    return ParameterError(text, found[2])


def _but_got(content: bytes, place: str) -> str:
    """Return ``, not`` with the value at a place of a body, "" if the place names no value."""
    if "..." in place:  # some value of an object
        return ""
    value = _place_in(msgspec.json.decode(content), place)
    return "" if value is None else f", not {value}"[:MAX_SHOWN_CHARS]


def _place_in(value: Any, place: str) -> Any:
    """Return the value at a place of decoded JSON, None if there is none."""
    try:
        for name, index in _STEP.findall(place):
            value = value[name] if name else value[int(index)]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def _plain(said: str) -> str:
    """Return msgspec's message with the names of types that JSON has."""
    plain = said[:1].lower() + said[1:].replace("`", "").replace(" | ", " or ")
    return _TYPES.sub(lambda found: _JSON_TYPES[found[1]], plain)


def _values_of(kind: type[Body], place: str) -> list[str]:
    """Return the texts that a field may be. ``place``: its name, with dots for inner fields."""
    types: list[inspect.Type] = [inspect.type_info(kind)]
    for name in place.split("."):
        bare = name.partition("[")[0]
        structs = [one for one in _alternatives(types) if isinstance(one, inspect.StructType)]
        types = [one.type for struct in structs for one in struct.fields if one.encode_name == bare]
    literals = [one for one in _alternatives(types) if isinstance(one, inspect.LiteralType)]
    return [str(value) for one in literals for value in one.values]


def _alternatives(types: Iterable[inspect.Type]) -> list[inspect.Type]:
    """Return types without unions and lists."""
    found: list[inspect.Type] = []
    for one in types:
        if isinstance(one, inspect.UnionType):
            found += _alternatives(one.types)
        elif isinstance(one, inspect.ListType):
            found += _alternatives([one.item_type])
        else:
            found.append(one)
    return found
