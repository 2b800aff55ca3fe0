"""Wire form of a context: what a router can check and forward without building a context.

The classes users hold (:class:`.contexts.TextContext`, :class:`.sampling.SamplingParams`)
convert to and from these; see ``TextContext.to_wire`` and ``TextContext.from_wire``.
"""

from __future__ import annotations

import msgspec
import numpy as np


class WireSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """SamplingParams without callables; fields and defaults as documented there."""

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    detokenize: bool = True
    seed: int = 0


class WireContext(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="TextContext", gc=False
):
    """A text request: the prompt's tokens and everything that decides its continuation.

    ``tokens``: int32 ``[prompt_length]``, inline or as a frame of its own.
    ``eos_sequences``: token sequences that end the request (stop strings, user stop ids).
    """

    tokens: np.ndarray
    max_length: int
    sampling: WireSampling = WireSampling()
    model_name: str = ""
    eos_token_ids: list[int] = []
    eos_sequences: list[list[int]] = []
    log_probabilities: int = 0
    log_probabilities_echo: bool = False
    ignore_eos: bool = False
    json_schema: str | None = None
    target_endpoint: str | None = None
    cache_salt: str = ""
    lora_name: str | None = None
