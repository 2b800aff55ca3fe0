"""The three standard streams as every verb expects them: open, and never the reason of a fault."""

from __future__ import annotations

import io
import os
import sys


def prepare_streams() -> None:
    """Open closed descriptors 0 to 2 on the null device, and forgive odd bytes and characters.

    The first socket or loop would otherwise get a low number and be taken for a standard stream.
    What a terminal cannot show is shown as ``?``; bytes that are not UTF-8 become lone
    surrogates, which the tokenizer refuses in words.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115, PTH123 -- for as long as we live
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def silence_output() -> None:
    """Send what is left to print nowhere, so that the interpreter's end does not complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
