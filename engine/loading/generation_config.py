"""generation_config.json: which ids end a text, and defaults of sampling parameters."""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.proto.errors import CheckpointError, InputError
from baton.proto.sampling import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
    with_limited_top_k,
)

from .json_files import read_json
from .model_config import ModelConfig, Token, token_ids


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """generation_config.json: ids that end a text, defaults for unset sampling parameters."""

    eos_token_ids: tuple[int, ...]
    defaults: SamplingParamsGenerationConfigDefaults


class _Ends(msgspec.Struct):
    eos_token_id: Token | list[Token] | None = None


def load_generation_config(folder: Path, config: ModelConfig) -> GenerationConfig:
    """Read ``generation_config.json``. If it is missing: ids of config.json, no defaults.

    A ``top_k`` above the limit for requests is lowered to that limit (docs/sampling.md);
    other values outside the limits for requests raise CheckpointError.
    """
    path = folder / "generation_config.json"
    try:
        raw = read_json(path) if path.is_file() else {}
        ends = msgspec.convert(raw, _Ends).eos_token_id
        defaults = msgspec.convert(raw, SamplingParamsGenerationConfigDefaults)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
    eos = token_ids(ends) or config.eos_token_ids
    if any(not 0 <= token < config.vocab_size for token in eos):
        raise CheckpointError(
            f"{folder}: eos_token_id {list(eos)} is outside the vocabulary of {config.vocab_size}"
        )
    defaults = with_limited_top_k(defaults)
    try:
        SamplingParams.from_input_and_generation_config(SamplingParamsInput(), defaults)
    except InputError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return GenerationConfig(eos_token_ids=eos, defaults=defaults)
