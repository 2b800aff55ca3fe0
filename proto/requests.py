"""Build the wire form of a request, and check it against the card of the served model.

Clients build and check it; routers and workers check it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple, replace

from .errors import FeatureMissing, InputError, PromptTooLong, TaskMismatch
from .json_schema import check_json_schema
from .layout import FEATURES, ModelCard
from .limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_CONTEXT_TOKENS,
    MAX_EOS_SEQUENCE_TOKENS,
    MAX_EOS_SEQUENCES,
    MAX_EOS_TOKEN_IDS,
    MAX_JSON_SCHEMA_CHARS,
    MAX_LOG_PROBABILITIES,
)
from .picture_requests import check_picture_area, check_picture_room, check_picture_shape
from .prompt_log_probs import check_prompt_log_probs
from .sampling import SamplingParams
from .vision_requests import check_images
from .wire.endpoints import check_target_endpoint
from .wire.wire_context import (
    WireContext,
    WirePixelContext,
    WireSampling,
    WireSpeechContext,
    WireTokens,
    WireVisionContext,
)

Int32 = npt.NDArray[np.int32]
_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)


def build_wire_context(
    tokens: npt.ArrayLike,
    card: ModelCard,
    params: SamplingParams,
    *,
    stop_sequences: Sequence[Sequence[int]] = (),
    max_length: int | None = None,
    log_probabilities: int = 0,
    log_probabilities_echo: bool = False,
    target_endpoint: str | None = None,
    cache_salt: str = "",
    json_schema: str | None = None,
) -> WireContext:
    """Build and check the wire form of a request for text.

    ``tokens``: 1-D integers. ``stop_sequences``: the strings of ``params.stop`` that always have
    the same tokens, as tokens. They and ``params.stop_token_ids`` become ``eos_sequences``, which
    end a request also under ``ignore_eos``; the model's own ids are ``eos_token_ids``.
    ``max_length``: total tokens; default: the limit of ``max_new_tokens`` and the model.
    ``json_schema``: JSON text. Raises InputError as :func:`check_wire_context`.
    """
    prompt = _int32_tokens(tokens)
    if json_schema is not None:
        check_json_schema(json_schema)
    limit = card.max_length if max_length is None else max_length
    if params.max_new_tokens is not None:
        limit = min(limit, len(prompt) + params.max_new_tokens)
    sequences = [[int(token)] for token in params.stop_token_ids or ()]
    sequences += [[int(token) for token in sequence] for sequence in stop_sequences]
    ends = sorted(card.eos_token_ids)
    wire = WireContext(
        tokens=WireTokens(prompt),
        max_length=limit,
        sampling=params.to_wire(),
        model_name=card.name,
        eos_token_ids=ends,
        eos_sequences=sequences,
        log_probabilities=log_probabilities,
        log_probabilities_echo=log_probabilities_echo,
        ignore_eos=params.ignore_eos,
        target_endpoint=target_endpoint,
        cache_salt=cache_salt,
        json_schema=json_schema,
    )
    plain = not (sequences or log_probabilities or log_probabilities_echo or target_endpoint)
    plain = plain and not (cache_salt or json_schema or params.logit_bias)
    if not (plain and len(ends) <= MAX_EOS_TOKEN_IDS and _fits(wire, card)):
        check_wire_context(wire, card)
    return wire


def _fits(wire: WireContext, card: ModelCard) -> bool:
    """True if tokens, lengths and sampling of a new request for text have no fault."""
    if card.task != "generate" or _TEXT not in card.kinds:
        return False
    tokens, most = wire.tokens.array, wire.max_length
    length = len(tokens)
    if not 0 < length < most <= min(card.max_length, MAX_CONTEXT_TOKENS):
        return False
    if length + wire.sampling.min_new_tokens > most:
        return False
    unsigned = tokens.view(_UINT32)  # as in _check_vocabulary
    if unsigned.item(unsigned.argmax()) >= card.vocab_size:
        return False
    SamplingParams.check_wire(wire.sampling)  # its fields may have been set after it was made
    return True


def build_embed_context(
    tokens: npt.ArrayLike, card: ModelCard, *, target_endpoint: str | None = None
) -> WireContext:
    """Build and check the wire form of a request for embeddings.

    ``tokens``: 1-D integers. Raises InputError as :func:`check_wire_context`.
    """
    text = _int32_tokens(tokens)
    wire = WireContext(
        tokens=WireTokens(text),
        max_length=len(text),
        model_name=card.name,
        sampling=WireSampling(),  # written, as of every context
        target_endpoint=target_endpoint,
        task="embed",
    )
    check_wire_context(wire, card)
    return wire


def needed_features(wire: WireContext) -> tuple[str, ...]:
    """Return the parameters of a request that a worker without them would ignore."""
    return FEATURES if wire.sampling.logit_bias else ()


_PROMPTS = "prompts:"


def prompt_feature(kind: str) -> str:
    """Return the feature of a decode worker that computes prompts of this kind of context."""
    return _PROMPTS + kind


def computes_prompts(card: ModelCard) -> bool:
    """Return whether a decode worker with this card computes prompts of any kind."""
    return any(feature.startswith(_PROMPTS) for feature in card.features)


def local_feature(wire: WireContext) -> str:
    """Return the feature of a decode worker that a request needs without a prefill worker."""
    return prompt_feature(str(wire.__struct_config__.tag))


def check_features(wire: WireContext, card: ModelCard) -> None:
    """Raise FeatureMissing if no worker reads a parameter of the request."""
    for feature in needed_features(wire):
        if feature not in card.features:
            raise FeatureMissing(f"{feature} needs newer workers than the cluster has")


def check_wire_shape(wire: WireContext) -> None:
    """Check a request without a model card, before any worker has registered; raises InputError."""
    check_kind(wire)
    _check_array(wire.tokens.array)
    _check_kind_fields(wire)
    _check_fresh(wire)
    if wire.task not in ("generate", "embed", "draw"):
        raise InputError(f"task is {wire.task[:80]!r}; known are generate, embed and draw")
    if not 0 < len(wire.tokens) <= wire.end_length - _least_new(wire) < MAX_CONTEXT_TOKENS:
        raise InputError(
            f"{len(wire.tokens)} prompt tokens do not fit a max_length of {wire.end_length}"
        )
    _check_numbers(wire)
    SamplingParams.check_wire(wire.sampling)


def check_emitted(wire: WireContext, emitted: Sequence[int], card: ModelCard | None) -> None:
    """Raise InputError unless ``emitted`` can be the tokens generated after the prompt."""
    _check_room(wire, len(emitted))
    limit = MAX_TOKEN_ID if card is None else card.vocab_size - 1
    if len(emitted) and not 0 <= min(emitted) <= max(emitted) <= limit:
        raise InputError(f"an emitted token id is outside 0 to {limit}")


def check_continued(wire: WireContext, card: ModelCard) -> None:
    """Raise InputError unless a worker with this model can continue a context from its tokens."""
    check_kind(wire, card)
    _check_array(wire.tokens.array)
    _check_vocabulary(wire.tokens.array, card)
    _check_kind_fields(wire, card, committed=True)
    if isinstance(wire, WirePixelContext):
        check_picture_area(wire, card)
    if wire.generated_length < 1:
        raise InputError("a context without a generated token has nothing to continue")
    _check_room(wire, wire.generated_length)


def _check_room(wire: WireContext, generated: int) -> None:
    room = wire.end_length - wire.prompt_length
    asked = wire.sampling.max_new_tokens
    room = room if asked is None else min(room, asked)
    if generated > room:
        raise InputError(f"{generated} tokens were emitted, but at most {room} may be generated")


def check_wire_context(wire: WireContext, card: ModelCard) -> None:
    """Raise InputError for the first fault of a request."""
    if _is_usual(wire, card):
        return
    check_kind(wire, card)
    if wire.task != card.task:
        refuse_task(card)
    _check_tokens(wire, card)
    _check_kind_fields(wire, card)
    _check_lengths(wire, card)
    _check_features(wire, card)
    _check_ends(wire, card)
    SamplingParams.check_wire(wire.sampling)
    if wire.target_endpoint is not None:
        check_target_endpoint(wire.target_endpoint)


def _is_usual(wire: WireContext, card: ModelCard) -> bool:
    """True if the request has no fault and is of the most frequent kind.

    That is a new request for text whose fields from ``eos_sequences`` on have their default values,
    except ``ignore_eos``, which load generators set.
    This saves half the time of all checks, and routers make them for every request.
    """
    if type(wire) is not WireContext or card.task != "generate" or _TEXT not in card.kinds:
        return False
    fields = astuple(wire)
    if fields[_FIRST_RARE:] not in _USUAL_RARE:
        return False
    tokens, max_length, _, sampling, name, ends = fields[:_FIRST_RARE]
    state = astuple(tokens)
    array = state[0]
    if state[1:] != _PLAIN or array.dtype is not _INT32 or array.ndim != 1:
        return False
    length = len(array)
    if not (
        0 < length < max_length <= card.max_length
        and max_length <= MAX_CONTEXT_TOKENS
        and length + sampling.min_new_tokens <= max_length
        and (not name or name == card.name)
        and (ends == card.eos_token_ids or ends == sorted(card.eos_token_ids))
        and len(ends) <= MAX_EOS_TOKEN_IDS
        and sampling.logit_bias is None
    ):
        return False
    unsigned = array.view(_UINT32)  # as in _check_vocabulary
    if unsigned.item(unsigned.argmax()) >= card.vocab_size:
        return False
    SamplingParams.check_wire(sampling)
    return True


_TEXT = str(WireContext.__struct_config__.tag)
_USUAL = WireContext(tokens=WireTokens(np.empty(0, np.int32)), max_length=1)
_FIRST_RARE = WireContext.__struct_fields__.index("eos_sequences")
_USUAL_RARE = tuple(
    astuple(replace(_USUAL, ignore_eos=value))[_FIRST_RARE:] for value in (False, True)
)
_PLAIN = astuple(_USUAL.tokens)[1:]
MAX_TOKEN_ID = (1 << 31) - 1


def _int32_tokens(tokens: npt.ArrayLike) -> Int32:
    array = np.asarray(tokens)
    if array.dtype is _INT32 and array.ndim == 1:
        return array.copy()
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"tokens must be integers, not {array.dtype}")
    if array.ndim != 1:
        raise InputError(f"tokens must be one-dimensional, not of shape {array.shape}")
    result = array.astype(np.int32)
    if array.dtype.itemsize >= 4 and array.dtype != np.int32 and (result != array).any():
        at = int(np.flatnonzero(result != array)[0])
        raise InputError(f"token id {array[at]} at position {at} does not fit 32 bits")
    return result


_SERVED = ("TextContext", "TextAndVisionContext", "TTSContext", "PixelContext")
_ADDED = {
    "TextAndVisionContext": "images",
    "TTSContext": "requests for speech",
    "PixelContext": "requests for pictures",
}
"""The kinds of requests that only some models take, in words."""


def check_kind(wire: WireContext, card: ModelCard | None = None) -> None:
    """Raise InputError unless the model takes this kind of request.

    ``card``: None if no worker has registered yet; then every kind is accepted that some model
    takes.
    """
    kind = str(wire.__struct_config__.tag)
    if kind in (_SERVED if card is None else card.kinds):
        return
    name = "the cluster" if card is None else repr(card.name)
    raise InputError(f"{name} takes no {_ADDED.get(kind, 'text')} ({kind})")


def _check_kind_fields(
    wire: WireContext, card: ModelCard | None = None, *, committed: bool = False
) -> None:
    """Check the fields that a text request has not. ``card``: None if it is not known yet."""
    if isinstance(wire, WireVisionContext):
        if wire.task != "generate":
            raise InputError(f"a request with images cannot have the task {wire.task[:80]!r}")
        check_images(wire, committed=committed, card=card)
    elif isinstance(wire, WireSpeechContext):
        _check_speech(wire)
    elif isinstance(wire, WirePixelContext):
        check_picture_shape(wire, committed=committed)


def _check_fresh(wire: WireContext) -> None:
    """Raise InputError unless the context is at its prompt.

    Tokens that were generated before travel beside the context, in ``emitted``.
    """
    if not wire.is_fresh:
        raise InputError("the context has already generated tokens; submit a new context")


def _check_speech(wire: WireSpeechContext) -> None:
    """Raise InputError for a speech request with the state of an audio decoder."""
    if wire.task != "generate":
        raise InputError(f"a request for speech cannot have the task {wire.task[:80]!r}")
    for name in ("audio_prompt_tokens", "buffer_speech_tokens", "audio_buffer", "_speech_tokens"):
        array = getattr(wire, name)
        if array is not None and array.size:
            more = ""
            if name == "audio_prompt_tokens":
                more = "; speak(voice=AudioPrompt(...)) puts such tokens into the prompt"
            raise InputError(f"{name.strip('_')} of a context must be empty{more}")


def _check_array(tokens: Int32) -> None:
    if tokens.dtype != _INT32 or tokens.ndim != 1:
        raise InputError(
            f"tokens must be one-dimensional int32, not {tokens.dtype} of shape {tokens.shape}"
        )


def refuse_task(card: ModelCard) -> NoReturn:
    """Raise TaskMismatch with what the model does instead."""
    if card.task == "draw":
        raise TaskMismatch(f"{card.name!r} is a picture model and generates no text")
    if card.task == "embed":
        raise TaskMismatch(f"{card.name!r} is an embedding model and generates no text; use embed")
    text = f"{card.name!r} is a generation model; to embed with it, serve it with --task embed"
    raise TaskMismatch(text)


def _least_new(wire: WireContext) -> int:
    """Minimum number of tokens to generate."""
    return 0 if wire.task == "embed" else 1


def _check_tokens(wire: WireContext, card: ModelCard) -> None:
    tokens = wire.tokens.array
    _check_array(tokens)
    _check_fresh(wire)
    count = len(tokens)
    if count == 0:
        raise InputError("the prompt is empty")
    if count > card.max_length - _least_new(wire):
        if wire.task == "embed":
            raise PromptTooLong(f"text too long: {count} tokens, limit {card.max_length}")
        raise PromptTooLong(
            f"prompt too long: {count} tokens, limit {card.max_length - 1} (context of "
            f"{card.max_length} tokens, by the model and the KV memory, minus one new token)"
        )
    _check_vocabulary(tokens, card)


def _check_vocabulary(tokens: Int32, card: ModelCard) -> None:
    # Read as unsigned, negative ids are the largest: one pass finds both. A reduction would take
    # twice as long, and three times as long in a process that has just woken up.
    unsigned = tokens.view(_UINT32)
    if unsigned.item(unsigned.argmax()) >= card.vocab_size:
        at = int(np.flatnonzero(unsigned >= card.vocab_size)[0])
        raise InputError(
            f"token id {tokens[at]} at position {at} is outside the vocabulary of {card.vocab_size}"
        )


def _check_lengths(wire: WireContext, card: ModelCard) -> None:
    count = len(wire.tokens.array)
    if isinstance(wire, WirePixelContext):
        check_picture_area(wire, card)
        check_picture_room(wire, card)
    if wire.max_length > card.max_length or wire.max_length > MAX_CONTEXT_TOKENS:
        raise InputError(f"max_length {wire.max_length} is over the served {card.max_length}")
    if wire.end_length < count + _least_new(wire):
        raise InputError(
            f"max_length {wire.max_length} leaves no room after the prompt of {count} tokens"
        )
    if count + wire.sampling.min_new_tokens > wire.end_length:
        raise InputError(
            f"min_new_tokens {wire.sampling.min_new_tokens} + prompt length {count} is more than "
            f"max_length {wire.max_length}"
        )


def _check_features(wire: WireContext, card: ModelCard) -> None:
    if wire.json_schema is not None:
        _check_grammar(wire, wire.json_schema, card)
    if wire.log_probabilities_echo:
        _check_echo(wire)
    if wire.lora_name is not None:
        raise InputError("lora_name is not supported yet")
    _check_numbers(wire)
    check_features(wire, card)
    for token in wire.sampling.logit_bias or ():
        if not 0 <= token < card.vocab_size:
            raise InputError(
                f"logit_bias has token id {token}, outside the vocabulary of {card.vocab_size}"
            )
    if wire.model_name and wire.model_name != card.name:
        raise InputError(f"model {wire.model_name[:80]!r} is not served, only {card.name!r} is")


def _check_echo(wire: WireContext) -> None:
    """Check that log-probabilities of the prompt can be computed and sent."""
    if type(wire) is not WireContext or wire.task != "generate":
        raise InputError("log-probabilities of a prompt are for prompts of text alone")
    check_prompt_log_probs(len(wire.tokens.array), wire.log_probabilities)


def _check_grammar(wire: WireContext, schema: str, card: ModelCard) -> None:
    """Check the schema's length, and that an answer can end; the engine reads the schema."""
    if len(schema) > MAX_JSON_SCHEMA_CHARS:
        raise InputError(
            f"json_schema has {len(schema)} characters, at most {MAX_JSON_SCHEMA_CHARS} are allowed"
        )
    if wire.ignore_eos or wire.sampling.ignore_eos:
        raise InputError("json_schema cannot be combined with ignore_eos")
    if not any(0 <= token < card.vocab_size for token in wire.eos_token_ids):
        raise InputError("json_schema needs an end-of-sequence id the model can generate")


def _check_numbers(wire: WireContext) -> None:
    if not 0 <= wire.log_probabilities <= MAX_LOG_PROBABILITIES:
        raise InputError(
            f"log_probabilities must be 0 to {MAX_LOG_PROBABILITIES}, not {wire.log_probabilities}"
        )
    if len(wire.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise InputError(f"cache_salt is longer than {MAX_CACHE_SALT_CHARS} characters")


def _check_ends(wire: WireContext, card: ModelCard) -> None:
    if len(wire.eos_token_ids) > MAX_EOS_TOKEN_IDS:
        raise InputError(f"more than {MAX_EOS_TOKEN_IDS} end-of-sequence ids")
    for token in wire.eos_token_ids:
        # A model may declare an end-of-sequence id outside its vocabulary.
        if not 0 <= token < card.vocab_size and token not in card.eos_token_ids:
            raise InputError(
                f"end-of-sequence id {token} is outside the vocabulary of {card.vocab_size}"
            )
    if not wire.eos_sequences:
        return
    if len(wire.eos_sequences) > MAX_EOS_SEQUENCES:
        raise InputError(
            f"{len(wire.eos_sequences)} stop sequences, at most {MAX_EOS_SEQUENCES} are allowed"
        )
    for sequence in wire.eos_sequences:
        if not 0 < len(sequence) <= MAX_EOS_SEQUENCE_TOKENS:
            raise InputError(f"a stop sequence must have 1 to {MAX_EOS_SEQUENCE_TOKENS} tokens")
        if not 0 <= min(sequence) <= max(sequence) < card.vocab_size:
            raise InputError(
                f"stop sequence {sequence[:8]} has an id outside the vocabulary of "
                f"{card.vocab_size}"
            )
