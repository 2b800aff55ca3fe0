"""The small text files of a Hugging Face folder that a tokenizer needs, read as untrusted input."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from baton.proto.errors import CheckpointError
from baton.runtime.small_files import check_file

from .stated_tokens import special_tokens, stated_tokens

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/default.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""The files a tokenizer is built from. All except the first may be missing."""

SPEECH_FILE = "speech.json"
"""Present in the folder of a speech model; see :mod:`.speech_format`."""

PICTURE_FILES = (
    "model_index.json",
    "scheduler/scheduler_config.json",
    "transformer/config.json",
    "vae/config.json",
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

PROMPT_FILES = (*TOKENIZER_FILES, SPEECH_FILE, *PICTURE_FILES)
"""The text files that clients need to make prompts of any kind."""

_MORE_TEMPLATES = ("default", "tool_use")
_IMAGE_TOKEN_KEYS = ("image_token_id", "image_token_index")


class TokenizerSettings:
    """Settings from the files next to ``tokenizer.json``; each file may be missing.

    Raises:
        CheckpointError: a file is malformed; ``origin`` names the source.

    Attributes:
        special_tokens: text by name; see :mod:`.stated_tokens`.
        stated_tokens: tokens that ``tokenizer.json`` may lack.
        eos_token_ids: from ``generation_config.json``, else from ``config.json``.
        image_token_id: from ``config.json``, or None.
        templates: chat templates by name. Template files replace ``chat_template.json``, and that
            replaces the templates of ``tokenizer_config.json``.

    """

    def __init__(self, files: Mapping[str, bytes], origin: str) -> None:
        config = json_object(files, "tokenizer_config.json", origin)
        older = json_object(files, "special_tokens_map.json", origin)
        added = json_object(files, "added_tokens.json", origin)
        self.special_tokens = special_tokens(config, older)
        self.stated_tokens = stated_tokens(config, older, added, origin)
        self.eos_token_ids = _eos_ids(files, origin)
        model = json_object(files, "config.json", origin)
        self.image_token_id = _image_id(model, origin)
        self.templates = _templates(files, config, sees="vision_config" in model, origin=origin)


def _templates(
    files: Mapping[str, bytes], config: dict[str, Any], *, sees: bool, origin: str
) -> dict[str, str]:
    """Return the templates by name; ``sees``: the folder's processor has a template too."""
    found = {
        name: _text(files, file, origin)
        for name in _MORE_TEMPLATES
        if (file := f"additional_chat_templates/{name}.jinja") in files
    }
    if "chat_template.jinja" in files:
        found.setdefault("default", _text(files, "chat_template.jinja", origin))
    if not found and sees:  # the older form, which only processors of images read
        older = json_object(files, "chat_template.json", origin)
        found = _named_templates(older.get("chat_template"))
    return found or _named_templates(config.get("chat_template"))


def _image_id(config: dict[str, Any], origin: str) -> int | None:
    """Return the placeholder of images that ``config.json`` names."""
    ids = {config[key] for key in _IMAGE_TOKEN_KEYS if isinstance(config.get(key), int)}
    if len(ids) > 1:
        keys = " and ".join(_IMAGE_TOKEN_KEYS)
        raise CheckpointError(f"{origin}: {keys} in config.json differ: {sorted(ids)}")
    return next(iter(ids), None)


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


def read_files(folder: str | os.PathLike[str], names: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of those files that a folder has. Raises CheckpointError."""
    files = {}
    for name in names:
        path = Path(folder) / name
        try:
            files[name] = _content(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
    return files


def _content(path: Path) -> bytes:
    check_file(path)
    return path.read_bytes()


def has_tokenizer_files(
    folder: str, files: Mapping[str, bytes], known: Iterable[str] = TOKENIZER_FILES
) -> bool:
    """Whether a folder of this machine has these files, byte for byte, of the ``known`` ones."""
    root = Path(folder)
    names = [name for name in known if name in files]
    try:
        return all(_content(root / name) == files[name] for name in names)
    except OSError:
        return False
