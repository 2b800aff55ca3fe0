"""Conversion between contexts and their maps (:mod:`.wire_context`).

Maps become bytes in :mod:`.map_bytes`. Grammar state is not sent: replaying the tokens rebuilds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import astuple

from ..contexts.images import ImageMetadata
from ..contexts.pixels import PixelContext
from ..contexts.speech import TTSContext, no_tokens, roomy
from ..contexts.status import GenerationStatus
from ..contexts.text import TextContext
from ..contexts.tokens import TokenBuffer
from ..contexts.vision import TextAndVisionContext
from ..errors import InputError
from ..ids import RequestID
from ..sampling import SamplingParams
from .arrays import Array
from .wire_context import (
    WireContext,
    WireImage,
    WirePixelContext,
    WireRange,
    WireRequestID,
    WireSpeechContext,
    WireTokens,
    WireVisionContext,
)

Context = TextContext | PixelContext
Write = Callable[[Array], dict[str, object]]
"""Converts an array to its map (:func:`.arrays.array_map`)."""

# --------------------------------------------------------------------------- to a map


def to_map(context: Context, write: Write | None = None) -> WireContext:
    """Return the map of a context with its progress, also during generation.

    ``write``: converts the token ids, which is faster than msgspec's hook. Such a map can only be
    encoded. Raises InputError for logits processors, which cannot be sent, and TypeError for
    another class.
    """
    make = _MAKERS.get(type(context))
    if make is None:
        raise TypeError(f"a {type(context).__name__} is no registered kind of context")
    return make(context, write)


def request_map(context: TextContext) -> WireContext:
    """Return the map of a context's original request: the prompt, without any progress.

    Raises InputError for what cannot be sent: logits processors, ids that are not int32.
    """
    ids = context.tokens.ids()
    if len(ids) != context._prompt_length:
        ids = ids[: context._prompt_length]
    if ids.dtype != np.int32:
        prompt, ids = ids, ids.astype(np.int32)
        if not np.array_equal(ids, prompt):
            raise InputError("a token id of the prompt is not int32 and cannot be sent")
    if type(context) is not TextContext:
        return msgspec.structs.replace(to_map(context), tokens=WireTokens(ids), **_FRESH)
    # The usual kind: all progress fields have their defaults.
    return WireContext(WireTokens(ids), *_request_values(context))


def grown_map(wire: WireContext, generated: Sequence[int]) -> WireContext:
    """Return the map of a request with generated tokens after its prompt."""
    prompt = wire.tokens.array
    ids = np.concatenate([prompt, np.array(generated, np.int64)]).astype(prompt.dtype)
    tokens = WireTokens(ids, _prompt_length=len(prompt))
    return msgspec.structs.replace(wire, tokens=tokens, _is_initial_prompt=False)


_PROGRESS = (
    "status",
    "_log_probabilities_data",
    "_is_initial_prompt",
    "_draft_offset",
    "_prompt_length",
    "_carried_start",
    "_carried_end",
    "_committed_idx",
    "_cache_seq_id",
)
"""The fields that hold a context's progress."""
_FRESH = {f.name: f.default for f in msgspec.structs.fields(WireContext) if f.name in _PROGRESS}


def _request_values(context: TextContext) -> tuple[Any, ...]:
    """Return a request's fields after ``tokens``, in the order of the map.

    Positional arguments make a map in a fifth of the time that keywords take.
    """
    return (
        context.max_length,
        WireRequestID(context.request_id.value),
        context.sampling_params.to_wire(),
        context.model_name,
        sorted(context.eos_token_ids),
        [*map(list, context.eos_sequences)],
        context.log_probabilities,
        context.log_probabilities_echo,
        context.ignore_eos,
        context.json_schema,
        context.target_endpoint,
        context.cache_salt,
        context.lora_name,
        context.task,
    )


def _text_values(context: TextContext, write: Write | None) -> tuple[Any, ...]:
    """All fields of the map of a text request, in their order."""
    tokens = context.tokens
    prompt = context._prompt_length
    return (
        _token_map(tokens, write),
        *_request_values(context),
        context.status,
        context._log_probabilities_data or None,
        context._is_initial_prompt,
        context._draft_offset,
        -1 if prompt == tokens._prompt else prompt,
        context._carried_start,
        context._carried_end,
        context._committed_idx,
        context._cache_seq_id,
    )


def _text_map(context: TextContext, write: Write | None) -> WireContext:
    return WireContext(*_text_values(context, write))


def _vision_map(context: TextAndVisionContext, write: Write | None) -> WireContext:
    return WireVisionContext(
        *_text_values(context, write),
        vision_token_ids=context.vision_token_ids,
        images=[
            WireImage(image.start_idx, image.end_idx, image.pixel_values, image.image_hash)
            for image in context.images
        ],
        pixel_values=list(context.pixel_values),
        extra_model_args=context.extra_model_args,
        _pixels_encoded=context._pixels_encoded,
    )


def _speech_map(context: TTSContext, write: Write | None) -> WireContext:
    prompt, speech = context.audio_prompt_tokens, context.speech_tokens
    return WireSpeechContext(
        *_text_values(context, write),
        audio_prompt_tokens=prompt if prompt.size else None,
        buffer_speech_tokens=context.buffer_speech_tokens,
        audio_buffer=context.audio_buffer,
        prev_samples_beyond_offset=context.prev_samples_beyond_offset,
        streaming=context.streaming,
        _speech_tokens=speech if speech.size else None,
        decoded_index=context.decoded_index,
        _block_counter=context._block_counter,
        _arrival_time=context._arrival_time,
        audio_generation_status=context.audio_generation_status,
    )


def _pixel_map(context: PixelContext, write: Write | None) -> WireContext:
    arrays = {name: getattr(context, name) for name in _FLOATS}
    fields: dict[str, Any] = {name: getattr(context, name) for name in _PIXELS}
    buffers = {name: getattr(context, name) for name in _BUFFERS}
    fields |= {n: None if one is None else _token_map(one, write) for n, one in buffers.items()}
    fields |= {name: array for name, array in arrays.items() if array.shape != (0,)}
    return WirePixelContext(
        tokens=_token_map(context.tokens, write),
        request_id=WireRequestID(context.request_id.value),
        status=context.status,
        **fields,
    )


_BUFFERS = ("tokens_2", "negative_tokens", "negative_tokens_2")
_FLOATS = ("timesteps", "sigmas", "latents", "latent_image_ids")
_PIXELS = (
    "model_name",
    "mask",
    "extra_params",
    "height",
    "width",
    "num_inference_steps",
    "guidance_scale",
    "guidance",
    "true_cfg_scale",
    "num_warmup_steps",
    "num_images_per_prompt",
    "target_endpoint",
    "cache_salt",
)
"""Fields that are one and the same in an image request and its map."""

_MAKERS: dict[type, Callable[[Any, Write | None], WireContext]] = {
    TextContext: _text_map,
    TextAndVisionContext: _vision_map,
    TTSContext: _speech_map,
    PixelContext: _pixel_map,
}
"""All kinds of contexts that can be sent."""


def _token_map(tokens: TokenBuffer, write: Write | None) -> WireTokens:
    ids: Any = tokens.ids()
    if write is not None:
        ids = write(ids)
    start, offset, first, prompt = (
        tokens._start, tokens._offset, tokens._completion_start, tokens._prompt
    )  # fmt: skip
    if first == prompt == tokens._length == tokens._completion_end and not (
        start or offset or tokens._chunked
    ):  # no progress
        return WireTokens(ids)
    return WireTokens(
        ids,
        WireRange(start, tokens._end),
        offset,
        WireRange(first, tokens._completion_end),
        prompt,
        UNSET,
        tokens._chunked,
    )


# --------------------------------------------------------------------------- from a map


def from_map(wire: WireContext, kind: type[TextContext] = TextContext) -> Context:
    """Return the context of a map. InputError or ValueError if its fields contradict each other.

    ``kind``: the class for a text request. Arrays are those of the map; tokens are widened, and
    so copied, at their first use.
    """
    # Field by field takes a third of the time that the constructor does with all of them.
    context: TextContext
    if type(wire) is WireContext:
        context = object.__new__(kind)
    elif isinstance(wire, WirePixelContext):
        return _pixel_context(wire)
    elif isinstance(wire, WireVisionContext):
        context = object.__new__(TextAndVisionContext)
        _take_vision(context, wire)
    elif isinstance(wire, WireSpeechContext):
        context = object.__new__(TTSContext)
        _take_speech(context, wire)
    else:
        context = object.__new__(kind)
    _take_text(context, wire)
    if type(context) is not TextContext:
        context.__post_init__()
    check_progress(context)
    return context


def context_to_run(
    wire: WireContext,
    request_id: RequestID | str | None = None,
    emitted: Sequence[int] = (),
    kind: type[TextContext] = TextContext,
) -> TextContext:
    """Return the context that a worker continues. Raises the errors of :func:`from_map`.

    ``emitted``: tokens that were generated and delivered before (a replay). They are appended to
    the map's tokens, count as generated and are not delivered again. The last one may end the
    context. ``max_new_tokens`` lowers ``max_length``.
    """
    context = from_map(wire, kind)
    if not isinstance(context, TextContext):
        raise InputError("an image request has no text to generate")
    params = context.sampling_params
    if request_id is not None:
        context.request_id = RequestID(request_id) if isinstance(request_id, str) else request_id
    if params.max_new_tokens is not None:
        longest = context.prompt_length + params.max_new_tokens
        context.max_length = min(context.max_length, longest)
    context.ignore_eos = context.ignore_eos or params.ignore_eos
    if emitted:
        _append(context, emitted)
    return context


def _append(context: TextContext, emitted: Sequence[int]) -> None:
    """Append tokens to a prompt that were generated and delivered before."""
    if context.tokens.generated_length or not context.is_initial_prompt:
        raise InputError("emitted tokens can only follow a context that has none")
    tokens = np.concatenate([context.tokens.ids(), np.array(emitted, np.int64)], dtype=np.int64)
    context.tokens = TokenBuffer(tokens)
    last = context._status_at(len(tokens), int(emitted[-1]), len(tokens))
    context.status = last or GenerationStatus.ACTIVE


def check_progress(context: TextContext) -> None:
    """Raise InputError for a state that no sequence of updates and resets leads to."""
    tokens, prompt = context.tokens, context._prompt_length
    length, start, end = tokens._length, context._carried_start, context._carried_end
    first, last = tokens._completion_start, tokens._completion_end
    if not 0 < prompt <= tokens._prompt:
        raise InputError(f"a prompt of {prompt} tokens in a context of {length}")
    if last > length or (first < prompt and first != last):
        raise InputError(f"undelivered tokens [{first}, {last}) were not generated")
    if start or end:
        follows = end == first or (first == last and end <= length)
        if not prompt <= start <= end or not follows:
            raise InputError(f"undelivered tokens [{start}, {end}) were not generated")
    for position in context._log_probabilities_data:
        if not 0 <= position < length:
            raise InputError(f"log-probabilities of position {position} of {length} tokens")


def _take_text(context: TextContext, wire: WireContext) -> None:
    """Set every field of a text request.

    This is most of the time of decoding a context. So the map's fields are read at once, and the
    constructor's checks run only for fields that can be wrong.
    """
    (
        tokens,
        context.max_length,
        request_id,
        sampling,
        context.model_name,
        eos_token_ids,
        eos_sequences,
        context.log_probabilities,
        context.log_probabilities_echo,
        context.ignore_eos,
        context.json_schema,
        target_endpoint,
        context.cache_salt,
        context.lora_name,
        context.task,
        context.status,
        queued,
        context._is_initial_prompt,
        context._draft_offset,
        prompt,
        context._carried_start,
        context._carried_end,
        context._committed_idx,
        context._cache_seq_id,
        *_,
    ) = astuple(wire)
    context.type = type(context).__name__
    context.tokens = buffer = token_buffer(tokens)
    context.request_id = RequestID() if request_id is None else _request_id(request_id.value)
    context.sampling_params = params = SamplingParams.from_wire(sampling)
    context.eos_token_ids = set(eos_token_ids)
    context.eos_sequences = [*map(list, eos_sequences)] if eos_sequences else []
    context.target_endpoint = target_endpoint
    context._matcher = None
    context._log_probabilities_data = {} if queued is None else dict(queued)
    context._prompt_length = buffer._prompt if prompt < 0 else prompt
    if eos_sequences or target_endpoint is not None or params.min_new_tokens:
        TextContext.__post_init__(context)


def _request_id(value: str) -> RequestID:
    """Make ``RequestID(value)`` in half the time of the constructor."""
    request_id = object.__new__(RequestID)
    _set_request_id(request_id, value)
    return request_id


_set_request_id: Callable[[RequestID, str], None] = RequestID.__dict__["value"].__set__


def _take_vision(context: TextAndVisionContext, wire: WireVisionContext) -> None:
    context.vision_token_ids = list(wire.vision_token_ids)
    context.images = [
        ImageMetadata(
            start_idx=image.start_idx,
            end_idx=image.end_idx,
            pixel_values=image.pixel_values,
            image_hash=image.image_hash,
        )
        for image in wire.images
    ]
    context.pixel_values = tuple(wire.pixel_values)
    context._pixels_encoded = wire._pixels_encoded
    context.extra_model_args = dict(wire.extra_model_args)


def _take_speech(context: TTSContext, wire: WireSpeechContext) -> None:
    speech = no_tokens() if wire._speech_tokens is None else wire._speech_tokens
    size, end = wire._speech_token_size, wire._speech_token_end_idx
    if speech.ndim != 1 or speech.dtype.kind not in "iu":
        raise InputError(f"speech tokens are {speech.dtype} of shape {speech.shape}")
    if size not in (None, len(speech)) or (end is not None and end > len(speech)):
        raise InputError(f"{size} speech tokens that end at {end}, but {len(speech)} came")
    room = roomy(speech if end is None else speech[:end])
    context.audio_prompt_tokens = _or_empty(wire.audio_prompt_tokens, np.int32)
    context.buffer_speech_tokens = wire.buffer_speech_tokens
    context.audio_buffer = wire.audio_buffer
    context.prev_samples_beyond_offset = wire.prev_samples_beyond_offset
    context.streaming = wire.streaming
    context._speech_token_size = len(room)
    context._speech_token_end_idx = len(speech) if end is None else end
    context._speech_tokens = room
    context.decoded_index = wire.decoded_index
    context._block_counter = wire._block_counter
    if wire._arrival_time is not None:
        context._arrival_time = wire._arrival_time
    else:
        context._arrival_time = 0.0
    context.audio_generation_status = wire.audio_generation_status
    if wire.decoded_index > context._speech_token_end_idx:
        raise InputError(f"{wire.decoded_index} of {len(speech)} speech tokens are audio")


def _pixel_context(wire: WirePixelContext) -> PixelContext:
    request_id = wire.request_id
    buffers = {name: getattr(wire, name) for name in _BUFFERS}
    fields: dict[str, Any] = {name: getattr(wire, name) for name in _PIXELS}
    fields |= {name: sent if sent is None else token_buffer(sent) for name, sent in buffers.items()}
    fields |= {name: _or_empty(getattr(wire, name), np.float32) for name in _FLOATS}
    return PixelContext(
        tokens=token_buffer(wire.tokens),
        request_id=RequestID() if request_id is None else RequestID(request_id.value),
        status=wire.status,
        **fields,
    )


def token_buffer(sent: WireTokens) -> TokenBuffer:
    """Return the buffer of a map. Raises ValueError if its windows contradict each other."""
    return TokenBuffer.from_state(sent.array, sent.state())


def _or_empty(array: Array | None, dtype: type[np.generic]) -> Array:
    return np.zeros(0, dtype) if array is None else array
