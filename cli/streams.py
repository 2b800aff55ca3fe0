"""Prepare the three standard streams: open them, and tolerate text they cannot encode."""

from __future__ import annotations

import io
import os
import sys


def prepare_streams() -> None:
    """Open closed descriptors 0 to 2 on the null device, and tolerate encoding errors.

    If a descriptor stayed closed, the first socket could get its number, and output would go
    there. A character that the terminal cannot show becomes ``?``. Input bytes that are not UTF-8
    become lone surrogates, which the tokenizer rejects with an error message.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `descriptor`
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115, PTH123 -- open until exit
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def silence_output() -> None:
    """Discard buffered output, so that the interpreter's flush at exit cannot fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
