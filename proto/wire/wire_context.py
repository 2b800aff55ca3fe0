"""The form of a context in messages, files and buffers: the map of its fields.

The map has the field names of the public class and, under ``type``, the name of that class. Fields
with default values are left out, so a new request takes few bytes, and a partly generated request
has the same form. :func:`.context_maps.to_map` and :func:`.context_maps.from_map` convert; a
router checks and forwards a map without building a context.

The structs accept more than encoders write: every field of the classes may be present, and a token
buffer may have unused room after its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import astuple

from ..contexts.equality import same
from ..contexts.status import GenerationStatus
from ..limits import (
    MAX_COUNT,
    MAX_IMAGES,
    MAX_NAMED_ARRAYS,
    MAX_VISION_TOKEN_IDS,
)
from .arrays import ArrayMap, Frame
from .bounds import (
    Count,
    EosSequences,
    EosTokenIds,
    LogitBias,
    Name,
    Number,
    StopStrings,
    StopTokenIds,
    Text,
    TokenId,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..contexts.outputs import LogProbabilities

    AnyArray = npt.NDArray[Any]
    Queued = dict[int, LogProbabilities] | None
else:
    # The decoder's types: maps that arrays replace later, and log-probabilities that are counted
    # before they are built. No generic list or map is ever built.
    AnyArray = ArrayMap
    Queued = msgspec.Raw

_ACTIVE = GenerationStatus.ACTIVE
# An encoder leaves out a value only if it is the same object as the default. So the defaults of
# SamplingParams are the same objects.
OFF, NEUTRAL = 0.0, 1.0


class WireSampling(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """SamplingParams without callables, with the same fields and defaults."""

    top_k: Number = -1
    top_p: float = NEUTRAL
    min_p: float = OFF
    temperature: float = NEUTRAL
    frequency_penalty: float = OFF
    presence_penalty: float = OFF
    repetition_penalty: float = NEUTRAL
    max_new_tokens: Number | None = None
    min_new_tokens: Number = 0
    ignore_eos: bool = False
    stop: StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    detokenize: bool = True
    seed: int = 0
    logit_bias: LogitBias | None = None


def _equal(self: msgspec.Struct, other: object) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return all(same(getattr(self, n), getattr(other, n)) for n in self.__struct_fields__)


class WireRequestID(msgspec.Struct, frozen=True, gc=False):
    """The name of a request."""

    value: Name


class WireRange(msgspec.Struct, frozen=True, gc=False):
    """Half-open range of token positions."""

    start: Count
    end: Count


class WireTokens(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, eq=False):
    """A token buffer: its ids (int32, or int64 if they do not fit) and its windows.

    A buffer with only a prompt has no field but ``array``.
    """

    array: AnyArray
    _processing_range: WireRange | UnsetType = UNSET
    _processing_offset: Number = 0
    _completion_range: WireRange | UnsetType = UNSET
    _prompt_length: Count | UnsetType = UNSET
    _current_length: Count | UnsetType = UNSET
    _actively_chunked: bool = False

    __eq__ = _equal
    __hash__ = None  # type: ignore[assignment]  # holds an array

    def __len__(self) -> int:
        return len(self.array)

    @property
    def is_plain(self) -> bool:
        """Whether the buffer is a prompt without any state."""
        return (
            self._prompt_length is UNSET
            and self._processing_range is UNSET
            and self._completion_range is UNSET
            and not self._processing_offset
            and not self._actively_chunked
        )

    def state(self) -> tuple[int, ...] | None:
        """Return the :meth:`.TokenBuffer.state`, or None for a prompt without any state."""
        array, processing, offset, completion, prompt, _, chunked = astuple(self)
        # Not is_plain: this runs for every decoded buffer, and one astuple is faster.
        if prompt is processing is completion is UNSET and not (offset or chunked):
            return None
        length = len(array)
        start, end = (0, length) if processing is UNSET else astuple(processing)
        first, last = (length, length) if completion is UNSET else astuple(completion)
        if prompt is UNSET:
            prompt = length
        return length, start, end, offset, first, last, prompt, int(chunked)


def fresh_state(length: int) -> tuple[int, ...]:
    """Return the :meth:`.TokenBuffer.state` of a prompt of ``length`` tokens."""
    return length, 0, length, 0, length, length, length, 0


class WireContext(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    rename={"sampling": "sampling_params"},
    tag="TextContext",
    eq=False,
    dict=True,
):
    """A text request: its tokens, parameters and progress.

    ``eos_sequences``: token sequences that end the request (stop strings, the user's stop ids).
    ``json_schema``: JSON schema, as text, that the generated text must match. ``task``:
    "generate", or "embed" or "draw"; then the request's Terminal carries its embedding or picture.
    """

    packed: ClassVar[tuple[Frame, Sequence[Frame]] | None] = None
    """Encoded form of the map, received or sent: its bytes and its array frames. Not a field: an
    object that has it keeps it in its ``__dict__``."""

    tokens: WireTokens
    max_length: Number
    request_id: WireRequestID | None = None
    sampling: WireSampling = WireSampling()
    model_name: Name = ""
    eos_token_ids: EosTokenIds = []
    eos_sequences: EosSequences = []
    log_probabilities: Number = 0
    log_probabilities_echo: bool = False
    ignore_eos: bool = False
    json_schema: Text | None = None
    target_endpoint: Name | None = None
    cache_salt: Name = ""
    lora_name: Name | None = None
    task: Name = "generate"
    status: GenerationStatus = GenerationStatus.ACTIVE
    _log_probabilities_data: Queued = None
    _is_initial_prompt: bool = True
    _draft_offset: Number = 0
    _prompt_length: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] = -1
    _carried_start: Count = 0
    _carried_end: Count = 0
    _committed_idx: Count = 0
    _cache_seq_id: Count | None = None

    __eq__ = _equal
    __hash__ = None  # type: ignore[assignment]  # holds an array

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the original prompt."""
        if self._prompt_length >= 0:
            return self._prompt_length
        prompt = self.tokens._prompt_length
        return len(self.tokens.array) if prompt is UNSET else prompt

    @property
    def generated_length(self) -> int:
        """Number of tokens after the original prompt."""
        return len(self.tokens.array) - self.prompt_length

    @property
    def end_length(self) -> int:
        """Number of tokens at which the request ends at the latest."""
        return self.max_length

    @property
    def is_fresh(self) -> bool:
        """Whether the request is unprocessed: it has only its prompt."""
        tokens, prompt = self.tokens, self._prompt_length
        return (
            self.status is _ACTIVE
            and self._is_initial_prompt
            and not self._log_probabilities_data
            and not (self._carried_start or self._carried_end)
            and (prompt == -1 or prompt == len(tokens.array))
            and (tokens.is_plain or tokens.state() == fresh_state(len(tokens.array)))
        )


# --------------------------------------------------------------------------- other kinds
#
# They add fields to a text request. So code that forwards, places or ends requests of any kind
# handles one class. Arrays stay views of the received frames.


class WireImage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, eq=False):
    """One image: its tokens ``[start_idx, end_idx)``, its pixels, and optionally its hash."""

    start_idx: Count
    end_idx: Count
    pixel_values: AnyArray
    image_hash: int | None = None

    __eq__ = _equal
    __hash__ = None  # type: ignore[assignment]


NamedArrays = Annotated[dict[Name, AnyArray], Meta(max_length=MAX_NAMED_ARRAYS)]


class WireVisionContext(
    WireContext, frozen=True, kw_only=True, omit_defaults=True, tag="TextAndVisionContext", eq=False
):
    """A text request with images; ``pixel_values``: pixels of an image without a token range."""

    vision_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_VISION_TOKEN_IDS)] = []
    images: Annotated[list[WireImage], Meta(max_length=MAX_IMAGES)] = []
    pixel_values: Annotated[list[AnyArray], Meta(max_length=1)] = []
    extra_model_args: NamedArrays = {}
    _pixels_encoded: bool = False


class WireSpeechContext(
    WireContext, frozen=True, kw_only=True, omit_defaults=True, tag="TTSContext", eq=False
):
    """A speech request and its progress.

    ``_speech_tokens``: without the reserved room after them. Other encoders send that room too;
    then ``_speech_token_size`` is the array's length, and ``_speech_token_end_idx`` the number
    of valid tokens.
    """

    audio_prompt_tokens: AnyArray | None = None
    buffer_speech_tokens: AnyArray | None = None
    audio_buffer: AnyArray | None = None
    prev_samples_beyond_offset: Count = 0
    streaming: bool = False
    _speech_tokens: AnyArray | None = None
    _speech_token_size: Count | None = None
    _speech_token_end_idx: Count | None = None
    decoded_index: Count = 0
    _block_counter: Count = 0
    _arrival_time: float | None = None
    audio_generation_status: GenerationStatus = GenerationStatus.ACTIVE


class WirePixelContext(
    WireContext, frozen=True, kw_only=True, omit_defaults=True, tag="PixelContext", eq=False
):
    """A request for an image and its progress; ``max_length`` and sampling have no effect.

    Its generated tokens count steps: 0 after the prompt was encoded, 1 after the first step, and so
    on. In a Commit ``tokens`` stand for the state of the picture, and ``extra_params["base"]`` is
    the length of the request's own ``tokens``; clients and routers count positions from there.
    """

    max_length: Number = 0
    task: Name = "draw"
    mask: AnyArray | None = None
    tokens_2: WireTokens | None = None
    negative_tokens: WireTokens | None = None
    negative_tokens_2: WireTokens | None = None
    extra_params: NamedArrays = {}
    timesteps: AnyArray | None = None
    sigmas: AnyArray | None = None
    latents: AnyArray | None = None
    latent_image_ids: AnyArray | None = None
    guidance: AnyArray | None = None
    height: Count = 1024
    width: Count = 1024
    num_inference_steps: Count = 50
    guidance_scale: float = 3.5
    true_cfg_scale: float = 1.0
    num_warmup_steps: Count = 0
    num_images_per_prompt: Count = 1

    @property
    def end_length(self) -> int:
        """Number of tokens at which the request ends: its prompt, and one more than its steps."""
        return self.prompt_length + self.num_inference_steps + 1


AnyWireContext = WireContext | WireVisionContext | WireSpeechContext | WirePixelContext
"""Contexts of messages, distinguished by ``type``, the name of the public class."""

if TYPE_CHECKING:
    CarriedContext = WireContext
    CarriedArray = npt.NDArray[np.float32] | None
else:
    # A message's decoder keeps their bytes, so that they can be forwarded unread. The codec
    # replaces them by the decoded values.
    CarriedContext = CarriedArray = msgspec.Raw
