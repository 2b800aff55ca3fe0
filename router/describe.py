"""The model folder's text files, which clients need to tokenize and to format chats."""

from __future__ import annotations

from pathlib import Path

from ..proto.errors import ConfigError

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)
"""All a client may read; nothing else of the folder ever leaves it."""


def read_text_files(folder: str, max_bytes: int) -> dict[str, bytes]:
    """Contents of the files that exist, together at most ``max_bytes``.

    Raises ConfigError when the folder is missing or the files are too large.
    """
    if not folder:
        return {}
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"model_folder {folder} is not a folder")
    files: dict[str, bytes] = {}
    left = max_bytes
    for name in TEXT_FILES:
        path = root / name
        if not path.is_file():
            continue
        left -= path.stat().st_size
        if left < 0:
            raise ConfigError(
                f"the text files of {folder} are larger than {max_bytes} bytes with {name}"
            )
        files[name] = path.read_bytes()
    return files
