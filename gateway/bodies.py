"""The JSON bodies of requests: their fields, types and limits.

Invariant: no field is ignored silently. A field is used, or it changes nothing by its meaning
(``user``), or it is refused with a message that names it unless it has its neutral value
(:data:`REFUSED`). Unknown fields are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, inspect

from ..proto.errors import InputError
from .errors import ParameterError

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
    """Fields of all bodies. ``user`` names the sender's user; it changes nothing."""

    model: str | None = None
    user: str | None = None


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
    metadata: dict[str, str] | None = None  # for the sender's own records: changes nothing

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

    # Accepted with their neutral values only; see REFUSED.
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    priority: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    service_tier: Any = None
    store: Any = None
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
    prompt_cache_key: str | None = None  # the prefix cache finds common prefixes without it
    safety_identifier: str | None = None  # names the sender's user: changes nothing

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
    prompt_cache_retention: Any = None

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


Refused = Mapping[str, tuple[tuple[Any, ...], str]]
REFUSED: Refused = {
    "skip_special_tokens": ((True,), "special tokens are never part of the text"),
    "include_stop_str_in_output": ((False,), "stop strings are never part of the text"),
    "truncate_prompt_tokens": ((), "prompts are not truncated"),
    "use_beam_search": ((False,), "beam search is not offered"),
    "length_penalty": ((1, 1.0), "beam search is not offered"),
    "priority": ((0,), "requests have no priorities"),
    "allowed_token_ids": (([],), "use response_format to constrain the answer"),
    "bad_words": (([],), "use response_format to constrain the answer"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "nothing is stored"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "audio": ((), "the model answers with text"),
    "modalities": ((["text"],), "the model answers with text"),
    "prediction": ((), "predicted outputs are not used"),
    "reasoning_effort": ((), "set it by chat_template_kwargs if the model's template has it"),
    "verbosity": (("medium",), "it is a property of OpenAI's models"),
    "web_search_options": ((), "the server has no access to the web"),
    "chat_template": ((), "only the model's own template is rendered"),
    "continue_final_message": ((False,), "the template starts a new message"),
    "documents": (([],), "give documents as messages"),
    "suffix": (("",), "text is not inserted before a suffix"),
    "best_of": ((1,), "use n"),
    "request_id": ((), "give it as the header X-Request-Id"),
    "session_id": ((), "the prefix cache needs no session"),
    "guided_json": ((), "use structured_outputs"),
    "guided_regex": ((), "use structured_outputs"),
    "guided_choice": ((), "use structured_outputs"),
    "guided_grammar": ((), "use structured_outputs"),
    "guided_decoding_backend": ((), "there is only one"),
    "guided_whitespace_pattern": ((), "use structured_outputs.whitespace_pattern"),
    "structural_tag": ((), "use tools, or structured_outputs.grammar"),
    "logits_processors": (([],), "code is not accepted; use logit_bias"),
    "logprob_token_ids": (([],), "use top_logprobs"),
    "truncation_side": ((), "prompts are not truncated"),
    "thinking_token_budget": ((), "use max_tokens"),
    "repetition_detection": ((), "use the penalties"),
    "stream_interval": ((1,), "each token is sent as it arrives"),
    "return_tokens_as_token_ids": ((False,), "tokens are shown as text"),
    "return_token_ids": ((False,), "use /tokenize"),
    "kv_transfer_params": ((), "the cluster hands over the KV itself"),
    "ec_transfer_params": ((), "prefill workers encode the images of their prompts"),
    "vllm_xargs": (({},), "this server takes no extra arguments"),
    "include_reasoning": ((True,), "reasoning is always shown"),
    "mm_processor_kwargs": (({},), "images are prepared with the settings of the model's folder"),
    "media_io_kwargs": (({},), "images are prepared with the settings of the model's folder"),
    "prompt_embeds": ((), "prompts are texts or token ids"),
}
"""Fields that are accepted with these values only, and the reason. None is always accepted."""
CHAT_REFUSED: Refused = {
    "echo": ((False,), "use /v1/completions for echo"),
    "add_special_tokens": ((False,), "the chat template writes them"),
    "prompt_cache_retention": (("in_memory",), "the prefix cache is in memory"),
}

B = TypeVar("B", bound=Body)


class BodyReader(Generic[B]):
    """Decodes JSON bodies of one type. Raises ParameterError, which names the field."""

    def __init__(self, kind: type[B], more_refused: Refused = MappingProxyType({})) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        refused = {**REFUSED, **more_refused}
        self._refused = {name: refused[name] for name in kind.__struct_fields__ if name in refused}
        # With two names, an attrgetter returns a tuple.
        self._values: Callable[[B], tuple[Any, ...]] = attrgetter(*self._refused, "user", "user")

    def read(self, content: bytes) -> B:
        """Decode and check a body. Errors name the field."""
        try:
            body = self._decoder.decode(content)
        except msgspec.ValidationError as error:
            raise _wrong_field(str(error), self._kind, content) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"the body is not valid JSON: {error}") from None
        except RecursionError:
            raise InputError("the body is nested too deep") from None
        values = self._values(body)[:-2]
        if values.count(None) < len(values):
            for (name, (neutral, reason)), value in zip(self._refused.items(), values, strict=True):
                if value is not None and not any(_same(value, one) for one in neutral):
                    raise ParameterError(f"{name} is not supported: {reason}", name)
        return body


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
    value = msgspec.json.decode(content)
    try:
        for name, index in _STEP.findall(place):
            value = value[name] if name else value[int(index)]
    except (KeyError, IndexError, TypeError):
        return ""
    return f", not {value}"[:MAX_SHOWN_CHARS]


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
