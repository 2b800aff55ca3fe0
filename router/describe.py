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

    Raises ConfigError when the folder is missing, when the files are too large, and for a link to
    a file outside: whoever writes the folder could have any file of the host handed to clients.
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
        if not _belongs(path.resolve(), root.resolve()):
            raise ConfigError(
                f"{path} is a link to {path.resolve()}, outside the model folder; put a copy there"
            )
        left -= path.stat().st_size
        if left < 0:
            raise ConfigError(
                f"the text files of {folder} are larger than {max_bytes} bytes with {name}"
            )
        files[name] = path.read_bytes()
    return files


def _belongs(file: Path, folder: Path) -> bool:
    """Whether a file lies in the folder, or is a blob of the hub cache whose snapshot it is.

    A hub cache keeps ``MODEL/blobs/HASH`` and links to them in ``MODEL/snapshots/REVISION``.
    """
    if file.is_relative_to(folder):
        return True
    snapshots, model = folder.parent, folder.parent.parent
    return snapshots.name == "snapshots" and file.parent == model / "blobs"
