"""Makes a model folder from a GGUF file, so that everything else sees only model folders.

The folder has config.json, the tokenizer's files, and links to the file and its other parts. It is
in the cache of the user, ``$XDG_CACHE_HOME/baton/gguf`` or ``~/.cache/baton/gguf``, under a
fingerprint of the file's path, size, time and header. A folder that is there is used again; the
cache may be deleted at any time while no cluster uses it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from baton.proto.errors import CheckpointError

from .gguf import SUFFIX, GgufFile, gguf_file, model_stem, open_parts, part_paths
from .gguf_config import config_json, end_tokens
from .gguf_tensors import GgufTensors
from .gguf_tokenizer import tokenizer_files

_FORM = 1
"""Raised when the made files change, so that folders of older releases are not used."""


def local_folder(model: str | Path) -> str:
    """Return the model folder of a path: of a GGUF file the folder made from it, else the path.

    A folder with one GGUF model and without config.json counts as the file. Raises CheckpointError
    if the file is malformed or not supported, or if the folder cannot be written.
    """
    path = Path(model)
    if path.suffix != SUFFIX or path.is_dir():
        found = None if (path / "config.json").is_file() else gguf_file(path)
        if found is None:
            return str(model)
        path = found
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    parts = part_paths(path.absolute())
    return str(_made(parts[0], tuple(map(_facts, parts))))


def is_gguf(model: str) -> bool:
    """True if a path names a GGUF file, which may not exist."""
    return model.endswith(SUFFIX) and not Path(model).is_dir()


@lru_cache(maxsize=8)
def _made(path: Path, facts: tuple[tuple[int, int], ...]) -> Path:  # noqa: ARG001 -- cache key
    """Return the folder of a file, which is made if it is not in the cache."""
    parts = open_parts(path)
    stem = model_stem(path)
    place = _cache() / _digest(parts) / stem
    if place.is_dir():
        return place
    files = _contents(parts)
    try:
        place.parent.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=place.parent.parent))
        try:
            _write(draft / stem, files, parts)
            draft.rename(place.parent)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            if not place.is_dir():  # another process was not first
                raise
    except OSError as error:
        raise CheckpointError(
            f"{place}: cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder for "
            f"the settings and the tokenizer of {path.name}"
        ) from error
    return place


def _contents(parts: list[GgufFile]) -> dict[str, Any]:
    """Return the objects and texts of the folder's files."""
    metadata = parts[0].metadata
    for part in parts:
        GgufTensors(part, metadata)  # refuses types that are not computed
    files = {"config.json": config_json(parts), **tokenizer_files(metadata)}
    ends = end_tokens(metadata)
    return files | ({"generation_config.json": {"eos_token_id": ends}} if ends else {})


def _write(folder: Path, files: dict[str, Any], parts: list[GgufFile]) -> None:
    folder.mkdir()
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        file.write_text(text, encoding="utf-8")
    for part in parts:
        (folder / part.path.name).symlink_to(part.path)


def _digest(parts: list[GgufFile]) -> str:
    digest = blake2b(f"{_FORM}".encode(), digest_size=12)
    for part in parts:
        digest.update(f"\0{part.path}\0{_facts(part.path)}\0".encode())
        digest.update(part.header)
    return digest.hexdigest()


def _facts(path: Path) -> tuple[int, int]:
    """Return size and time of a file, (0, 0) for a missing one."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _cache() -> Path:
    own = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(own) if own else Path("~/.cache").expanduser()) / "baton" / "gguf"
