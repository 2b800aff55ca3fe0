"""Wire form of a context: what a router can check and forward without building a context.

The classes users hold (:class:`.contexts.TextContext`, :class:`.sampling.SamplingParams`)
convert to and from these; see ``TextContext.to_wire`` and ``TextContext.from_wire``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from .equality import same
from .limits import (
    MAX_COUNT,
    MAX_EOS_SEQUENCE_TOKENS,
    MAX_EOS_SEQUENCES,
    MAX_EOS_TOKEN_IDS,
    MAX_IMAGES,
    MAX_NAME_CHARS,
    MAX_NAMED_ARRAYS,
    MAX_STOP_SEQUENCES,
    MAX_STOP_TOKEN_IDS,
    MAX_TEXT_CHARS,
    MAX_VISION_TOKEN_IDS,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    TokenArray = npt.NDArray[np.int32]
    AnyArray = npt.NDArray[Any]
else:
    # What the field decodes into before the codec puts the array in its place. A declared
    # ext, unlike a declared array, can never be decoded into generic lists and maps.
    TokenArray = AnyArray = msgspec.msgpack.Ext

# Lengths that a decoder refuses before it builds anything; see limits.py.
INT32 = 1 << 31
TokenId = Annotated[int, Meta(ge=-INT32, lt=INT32)]
Number = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
"""What a user may ask wrongly, so that a check can say what is wrong with it."""
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
StopStrings = Annotated[list[Name], Meta(max_length=MAX_STOP_SEQUENCES)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
EosTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_EOS_TOKEN_IDS)]
EosSequences = Annotated[
    list[Annotated[list[TokenId], Meta(max_length=MAX_EOS_SEQUENCE_TOKENS)]],
    Meta(max_length=MAX_EOS_SEQUENCES),
]


class WireSampling(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """SamplingParams without callables; fields and defaults as documented there."""

    top_k: Number = -1
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: Number | None = None
    min_new_tokens: Number = 0
    ignore_eos: bool = False
    stop: StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    detokenize: bool = True
    seed: int = 0


class WireContext(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="TextContext",
    gc=False,
    eq=False,
):
    """A text request: the prompt's tokens and everything that decides its continuation.

    ``tokens``: int32 ``[prompt_length]``, inline or as a frame of its own.
    ``eos_sequences``: token sequences that end the request (stop strings, user stop ids).
    ``json_schema``: JSON text the generated text must be an instance of.
    ``task``: "generate", or "embed": then the end of the request brings its vector.
    """

    tokens: TokenArray
    max_length: Number
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

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(same(getattr(self, n), getattr(other, n)) for n in self.__struct_fields__)

    __hash__ = None  # type: ignore[assignment]  # holds an array


# --------------------------------------------------------------------------- other kinds
#
# They add fields to a text request, so that whoever only passes a request on, places it by
# its tokens or ends it sees one class. Arrays stay views of the frames they came in.


class WireImage(msgspec.Struct, frozen=True, array_like=True, gc=False, eq=False):
    """One image: its tokens ``[start, end)``, its pixels, and its hash if it has one."""

    start: Annotated[int, Meta(ge=0, le=MAX_COUNT)]
    end: Annotated[int, Meta(ge=0, le=MAX_COUNT)]
    pixels: AnyArray
    image_hash: int | None = None

    __eq__ = WireContext.__eq__
    __hash__ = None  # type: ignore[assignment]


TokenState = Annotated[list[Number], Meta(max_length=8)]
"""See :meth:`.tokens.TokenBuffer.state`."""


class WireTokens(msgspec.Struct, frozen=True, array_like=True, gc=False, eq=False):
    """A token buffer: int32 ids (int64 where they do not fit) and its state as numbers."""

    ids: AnyArray
    state: TokenState

    __eq__ = WireContext.__eq__
    __hash__ = None  # type: ignore[assignment]


NamedArrays = Annotated[dict[Name, AnyArray], Meta(max_length=MAX_NAMED_ARRAYS)]


class WireVisionContext(
    WireContext,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="TextAndVisionContext",
    gc=False,
    eq=False,
):
    """A text request with images; ``pixel_values`` are those of no token range."""

    vision_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_VISION_TOKEN_IDS)] = []
    images: Annotated[list[WireImage], Meta(max_length=MAX_IMAGES)] = []
    pixel_values: Annotated[list[AnyArray], Meta(max_length=1)] = []
    pixels_encoded: bool = False
    extra_model_args: NamedArrays = {}


class WireSpeechContext(
    WireContext,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="TTSContext",
    gc=False,
    eq=False,
):
    """A speech request and how far it is; ``speech_tokens`` without what is reserved behind."""

    audio_prompt_tokens: AnyArray | None = None
    buffer_speech_tokens: AnyArray | None = None
    audio_buffer: AnyArray | None = None
    speech_tokens: AnyArray | None = None
    prev_samples_beyond_offset: Number = 0
    streaming: bool = False
    decoded_index: Number = 0
    block_counter: Number = 0
    arrival_time: float = 0.0
    audio_status: Name = "active"


class WirePixelContext(
    WireContext,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="PixelContext",
    gc=False,
    eq=False,
):
    """A request for an image and how far it is; ``max_length`` and sampling mean nothing."""

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
    height: Number = 1024
    width: Number = 1024
    num_inference_steps: Number = 50
    guidance_scale: float = 3.5
    true_cfg_scale: float = 1.0
    num_warmup_steps: Number = 0
    num_images_per_prompt: Number = 1


AnyWireContext = WireContext | WireVisionContext | WireSpeechContext | WirePixelContext
"""What a message carries; told apart by ``type``, the name of the class users hold."""
