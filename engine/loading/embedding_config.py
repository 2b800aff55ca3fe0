"""Reads whether and how a model folder computes embeddings.

The sentence-transformers layout has two files: ``modules.json`` lists the stages, and the
pooling stage has its own ``config.json``. An unsupported stage is rejected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from baton.proto.errors import CheckpointError

from .config_numbers import Finite
from .json_files import read_json

GENERATE, EMBED, DRAW = "generate", "embed", "draw"
TASKS = (GENERATE, EMBED, DRAW)

_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_STATES = "token_embeddings"
_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}
_NO_LIMIT = 1e9
"""Tokenizers without a limit have a larger one."""
_NAMES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


class EmbeddingSettings(msgspec.Struct, frozen=True):
    """``pooling``: "mean" over the tokens, or the "cls" (first) or "last" token alone.

    ``normalize``: embeddings are scaled to length 1. ``max_length``: maximum tokens of a text from
    ``sentence_bert_config.json``, 0 if the file sets none.
    """

    pooling: str
    normalize: bool
    max_length: int = 0

    @property
    def numerics(self) -> str:
        """Part of the numerics name, which identifies everything that decides a result's bits."""
        return f"embed-{self.pooling}{'-unit' if self.normalize else ''}"


class _Module(msgspec.Struct):
    type: str
    path: str = ""


class _SentenceConfig(msgspec.Struct):
    max_seq_length: int | None = None
    transformer_task: str = "feature-extraction"
    modality_config: dict[str, Any] | None = None
    module_output_name: str = _STATES


class _TokenizerConfig(msgspec.Struct):
    model_max_length: Finite | None = None


def load_embedding_settings(folder: Path) -> EmbeddingSettings | None:
    """Read ``modules.json``; None without the file. Raises CheckpointError if unsupported."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    stages = {_kind(module): module for module in _modules(path)}
    unknown = stages.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown or "Pooling" not in stages:
        problem = f"the stage {min(unknown)}" if unknown else "embeddings without pooling"
        raise CheckpointError(f"{path}: {problem} cannot be served")
    return EmbeddingSettings(
        pooling=_pooling(folder / stages["Pooling"].path / "config.json"),
        normalize="Normalize" in stages,
        max_length=_max_length(folder),
    )


def _modules(path: Path) -> list[_Module]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _kind(module: _Module) -> str:
    return module.type.rpartition(".")[2]


def _pooling(path: Path) -> str:
    raw: dict[str, Any] = read_json(path)
    modes = [mode for key, mode in _POOLINGS.items() if raw.get(key) is True]
    named = raw.get("pooling_mode")
    if isinstance(named, str):
        modes = [_NAMES[named]] if named in _NAMES else []
    others = [key for key, on in raw.items() if on is True and key.startswith("pooling_mode_")]
    if len(modes) != 1 or len(others) > 1:
        known = ", ".join(_POOLINGS)
        raise CheckpointError(f"{path}: exactly one of {known} must be on, and no other mode")
    return modes[0]


def _max_length(folder: Path) -> int:
    """Return the maximum tokens of a text, 0 if no file sets one.

    Newer files state it as the tokenizer's only. Raises CheckpointError if the first stage returns
    something other than the last hidden states of a text.
    """
    path = folder / "sentence_bert_config.json"
    tokenizer = folder / "tokenizer_config.json"
    try:
        raw = read_json(path) if path.is_file() else {}
        settings = msgspec.convert(raw, _SentenceConfig)
        if settings.max_seq_length is not None and settings.max_seq_length < 1:
            raise CheckpointError(
                f"{path}: max_seq_length {settings.max_seq_length} must be positive"
            )
        _refuse(path, settings)
        if settings.max_seq_length is not None or not tokenizer.is_file():
            return settings.max_seq_length or 0
        path = tokenizer
        limit = msgspec.convert(read_json(path), _TokenizerConfig).model_max_length
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return int(limit) if limit is not None and 1 <= limit < _NO_LIMIT else 0


def _refuse(path: Path, settings: _SentenceConfig) -> None:
    """Reject a first stage that returns something other than the last hidden states."""
    if settings.transformer_task != "feature-extraction":
        raise CheckpointError(
            f"{path}: transformer_task {settings.transformer_task} is unsupported"
        )
    if settings.module_output_name != _STATES:
        raise CheckpointError(
            f"{path}: module_output_name {settings.module_output_name} is not {_STATES}"
        )
    given = settings.modality_config
    if given is not None and given != {"text": _TEXT}:
        raise CheckpointError(
            f"{path}: modality_config must have a text's last_hidden_state of forward alone"
        )
