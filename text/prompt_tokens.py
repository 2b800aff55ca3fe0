"""Tokens of a prompt for a picture model, and what its folder implies for requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.proto.errors import InputError

Int32 = npt.NDArray[np.int32]

MAX_PROMPT_CHARS = 1 << 16
"""Longest prompt that is tokenized; far more than the encoders read."""
CHAT_PROMPT_TOKENS = 512
"""Most tokens of a prompt for a decoder as text encoder, as diffusers uses them."""


@dataclass(slots=True, frozen=True)
class PromptTokens:
    """A prompt for the text encoders of a model.

    ``tokens``: int32, for the first encoder. ``tokens_2``: int32, for the second encoder, padded to
    a fixed length; None for a model with one encoder. ``length``: tokens for the last encoder
    without the padding.
    """

    tokens: Int32
    tokens_2: Int32 | None
    length: int


class PromptTokenizer(Protocol):
    """Turns prompts into tokens."""

    def encode(self, prompt: str) -> PromptTokens:
        """Return the tokens of a prompt. Raises InputError if it is longer than the limit."""
        ...

    def close(self) -> None:
        """End the processes of tokenizers that are not plain, if any."""
        ...


@dataclass(slots=True, frozen=True)
class PictureDefaults:
    """What a picture model uses for the settings that a request leaves out.

    ``takes_guidance``: guidance has an effect. ``true_cfg``: default weight of a negative prompt
    beside the guidance; None for a model whose guidance is this weight. ``lengths``: most tokens of
    a prompt for each text encoder.
    """

    takes_guidance: bool
    steps: int
    guidance: float
    true_cfg: float | None
    lengths: tuple[int, ...]


def check_prompt_length(prompt: str) -> None:
    """Raise InputError for a prompt of too many characters."""
    if len(prompt) > MAX_PROMPT_CHARS:
        raise InputError(f"prompt too long: {len(prompt)} characters, limit {MAX_PROMPT_CHARS}")
