"""Load a model folder's tokenizer as a client would: ``python -m baton.text.check FOLDER``.

The check is a separate process, because a damaged or hostile file can hang the library, exhaust
memory or end the process. Exit code 0, or 1 with the error on one line of standard output.
"""

from __future__ import annotations

import sys

from ..runtime.process.helper import limit_process
from .tokenizer import Tokenizer

MEMORY_BYTES = 4 << 30
"""Limit of the address space; the largest tokenizers need a tenth of it."""


def main() -> int:
    """Entry point."""
    limit_process(MEMORY_BYTES)
    try:
        Tokenizer.from_folder(sys.argv[1])
    except BaseException as problem:
        sys.stdout.write(f"{problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
