"""Loads a model folder's tokenizer as a client would: ``python -m baton.text.check FOLDER``.

A process of its own, because a damaged or hostile file can hang the library, take all memory or
end the process. The exit code is 0, or 1 with one line on standard output.
"""

from __future__ import annotations

import sys

from .template_worker import limit_process
from .tokenizer import Tokenizer

MEMORY_BYTES = 4 << 30
"""Address space; the largest tokenizers take a tenth of it."""


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
