"""Load a model folder's tokenizers as a client would: ``python -m baton.text.check FOLDER``.

The check is a separate process, because a damaged or hostile file can hang the library, exhaust
memory or end the process. Exit code 0, or 1 with the error on one line of standard output.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # for good: the process ends soon

from baton.runtime.process.helper import limit_process
from baton.runtime.process.os_settings import end_with_parent

from .model_files import PICTURE_FILES, read_files
from .picture_prompts import PicturePrompts
from .tokenizer import Tokenizer

MEMORY_BYTES = 4 << 30
"""Limit of the address space; the largest tokenizers need a tenth of it."""


def main() -> int:
    """Entry point."""
    end_with_parent()
    limit_process(MEMORY_BYTES)
    try:
        load(sys.argv[1])
    except BaseException as problem:
        sys.stdout.write(f"{problem}\n")
        return 1
    return 0


def load(folder: str) -> None:
    """Load the tokenizer of a text model or both of a picture model. Raises CheckpointError."""
    if (Path(folder) / PICTURE_FILES[0]).is_file():
        PicturePrompts.from_files(read_files(folder, PICTURE_FILES), trusted=True, origin=folder)
    else:
        Tokenizer.from_folder(folder)


if __name__ == "__main__":
    sys.exit(main())
