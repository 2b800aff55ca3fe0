"""generation_config.json: which ids end a text, and defaults of sampling parameters."""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.proto.errors import CheckpointError, InputError
from baton.proto.limits import MAX_TOP_K
from baton.proto.sampling import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
)

from .json_files import read_json
from .model_config import ModelConfig, Token, token_ids


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """generation_config.json: ids that end a text, defaults for unset sampling parameters."""

    eos_token_ids: tuple[int, ...]
    defaults: SamplingParamsGenerationConfigDefaults


class _RawGeneration(msgspec.Struct, kw_only=True):
    eos_token_id: Token | list[Token] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None


def load_generation_config(folder: Path, config: ModelConfig) -> GenerationConfig:
    """Read ``generation_config.json``. If it is missing: ids of config.json, no defaults.

    A ``top_k`` above the limit for requests is lowered to that limit (docs/sampling.md);
    other values outside the limits for requests raise CheckpointError.
    """
    path = folder / "generation_config.json"
    try:
        raw = msgspec.convert(read_json(path) if path.is_file() else {}, _RawGeneration)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
    eos = token_ids(raw.eos_token_id) or config.eos_token_ids
    if any(not 0 <= token < config.vocab_size for token in eos):
        raise CheckpointError(
            f"{folder}: eos_token_id {list(eos)} is outside the vocabulary of {config.vocab_size}"
        )
    fields = {f: getattr(raw, f) for f in raw.__struct_fields__ if f != "eos_token_id"}
    if raw.top_k is not None:
        fields["top_k"] = min(raw.top_k, MAX_TOP_K)
    defaults = SamplingParamsGenerationConfigDefaults(**fields)
    try:
        SamplingParams.from_input_and_generation_config(SamplingParamsInput(), defaults)
    except InputError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return GenerationConfig(eos_token_ids=eos, defaults=defaults)
