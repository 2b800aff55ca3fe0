"""Wire form of a context: what a router can check and forward without building a context.

The classes users hold (:class:`.contexts.TextContext`, :class:`.sampling.SamplingParams`)
convert to and from these; see ``TextContext.to_wire`` and ``TextContext.from_wire``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from .limits import (
    MAX_COUNT,
    MAX_EOS_SEQUENCE_TOKENS,
    MAX_EOS_SEQUENCES,
    MAX_EOS_TOKEN_IDS,
    MAX_NAME_CHARS,
    MAX_STOP_SEQUENCES,
    MAX_STOP_TOKEN_IDS,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    TokenArray = npt.NDArray[np.int32]
else:
    # What the field decodes into before the codec puts the array in its place. A declared
    # ext, unlike a declared array, can never be decoded into generic lists and maps.
    TokenArray = msgspec.msgpack.Ext

# Lengths that a decoder refuses before it builds anything; see limits.py.
INT32 = 1 << 31
TokenId = Annotated[int, Meta(ge=-INT32, lt=INT32)]
Number = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
"""What a user may ask wrongly, so that a check can say what is wrong with it."""
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
StopStrings = Annotated[list[Name], Meta(max_length=MAX_STOP_SEQUENCES)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
EosTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_EOS_TOKEN_IDS)]
EosSequences = Annotated[
    list[Annotated[list[TokenId], Meta(max_length=MAX_EOS_SEQUENCE_TOKENS)]],
    Meta(max_length=MAX_EOS_SEQUENCES),
]


class WireSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
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
    json_schema: str | None = None
    target_endpoint: Name | None = None
    cache_salt: Name = ""
    lora_name: Name | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WireContext):
            return NotImplemented
        return np.array_equal(self.tokens, other.tokens) and all(
            getattr(self, name) == getattr(other, name)
            for name in self.__struct_fields__
            if name != "tokens"
        )

    __hash__ = None  # type: ignore[assignment]  # holds an array
