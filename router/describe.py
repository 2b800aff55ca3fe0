"""Text files of the model folder that clients need to make prompts of any kind."""

from __future__ import annotations

from pathlib import Path

from baton.images.settings import SETTINGS_FILES
from baton.proto.errors import ConfigError
from baton.text.model_files import PROMPT_FILES


def read_text_files(folder: str, max_bytes: int) -> dict[str, bytes]:
    """Return the contents of the existing files by name, at most ``max_bytes`` together.

    Raises ConfigError if the folder is missing, if the files are too large, or if a file links out
    of the folder: otherwise a model folder could expose any file of the host to clients.
    """
    if not folder:
        return {}
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"model_folder {folder} is not a folder")
    files: dict[str, bytes] = {}
    left = max_bytes
    for name in (*PROMPT_FILES, *SETTINGS_FILES):
        path = root / name
        if not path.is_file():
            continue
        if not _belongs(path.resolve(), root.resolve()):
            raise ConfigError(
                f"{path} is a link to {path.resolve()}, outside the model folder; use a copy"
            )
        left -= path.stat().st_size
        if left < 0:
            raise ConfigError(
                f"the text files of {folder}, up to {name}, exceed the limit of {max_bytes} bytes"
            )
        files[name] = path.read_bytes()
    return files


def _belongs(file: Path, folder: Path) -> bool:
    """True if a file is inside the folder, or is a blob of the hub cache of this snapshot.

    A hub cache has ``MODEL/blobs/HASH`` and links to them in ``MODEL/snapshots/REVISION``.
    """
    if file.is_relative_to(folder):
        return True
    snapshots, model = folder.parent, folder.parent.parent
    return snapshots.name == "snapshots" and file.parent == model / "blobs"
