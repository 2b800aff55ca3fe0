"""The small text files of a Hugging Face folder that a tokenizer needs, read as untrusted input."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..proto.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)
"""The files a tokenizer is built from. All except the first may be missing."""

SPEECH_FILE = "speech.json"
"""Present in the folder of a speech model; see :mod:`.speech_format`."""

PICTURE_FILES = (
    "model_index.json",
    "scheduler/scheduler_config.json",
    "transformer/config.json",
    "text_encoder/config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/special_tokens_map.json",
    "tokenizer/chat_template.jinja",
    "tokenizer/vocab.json",
    "tokenizer/merges.txt",
    "tokenizer_2/tokenizer.json",
    "tokenizer_2/tokenizer_config.json",
    "tokenizer_2/special_tokens_map.json",
)
"""The files of a picture model's folder that a prompt needs; see :mod:`.picture_prompts`."""

_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image")


class TokenizerSettings:
    """Settings from the files next to ``tokenizer.json``; each file may be missing.

    Raises:
        CheckpointError: a file is malformed; ``origin`` names the source.

    Attributes:
        special_tokens: text by name; ``tokenizer_config.json`` takes precedence over the older
            ``special_tokens_map.json``.
        eos_token_ids: from ``generation_config.json``, else from ``config.json``.
        templates: chat templates by name; ``chat_template.jinja`` takes precedence over
            ``tokenizer_config.json``.

    """

    def __init__(self, files: Mapping[str, bytes], origin: str) -> None:
        config = json_object(files, "tokenizer_config.json", origin)
        older = json_object(files, "special_tokens_map.json", origin)
        self.special_tokens = {
            f"{name}_token": text
            for name in _NAMED_TOKENS
            if (text := _token_text(config, older, f"{name}_token")) is not None
        }
        self.eos_token_ids = _eos_ids(files, origin)
        self.templates = _named_templates(config.get("chat_template"))
        if "chat_template.jinja" in files:
            self.templates["default"] = _text(files, "chat_template.jinja", origin)


def _text(files: Mapping[str, bytes], name: str, origin: str) -> str:
    try:
        return files[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{origin}: {name} is not UTF-8: {error}") from None


def json_object(files: Mapping[str, bytes], name: str, origin: str) -> dict[str, Any]:
    """Return a file's JSON object, empty if the file is missing. Raises CheckpointError."""
    if name not in files:
        return {}
    try:
        value = json.loads(_text(files, name, origin))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{origin}: {name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin}: {name} must hold an object")
    return value


def files_below(files: Mapping[str, bytes], folder: str) -> dict[str, bytes]:
    """Return the files of a folder, such as ``tokenizer/``, by their names in it."""
    return {
        name.removeprefix(folder): content
        for name, content in files.items()
        if name.startswith(folder)
    }


def _token_text(config: dict[str, Any], older: dict[str, Any], name: str) -> str | None:
    value = config[name] if name in config else older.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(files: Mapping[str, bytes], origin: str) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = json_object(files, name, origin).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) for i in ids):
                raise CheckpointError(f"{origin}: eos_token_id in {name} must hold token ids")
            return tuple(ids)
    return ()


def _named_templates(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }


def has_tokenizer_files(
    folder: str, files: Mapping[str, bytes], known: Iterable[str] = TOKENIZER_FILES
) -> bool:
    """Whether a folder of this machine has these files, byte for byte, of the ``known`` ones."""
    root = Path(folder)
    names = [name for name in known if name in files]
    try:
        return all((root / name).read_bytes() == files[name] for name in names)
    except OSError:
        return False
