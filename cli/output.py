"""Standard output of all commands: whole, or an error.

Invariant: :func:`open_output` replaces ``sys.stdout``, so whatever a command prints is written to
the last byte, or the write raises OSError. Python's own stream drops the rest of a short write if
PYTHONUNBUFFERED is set, and fails on a full pipe if another process made it non-blocking.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

from baton.runtime.process.log import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def say(line: str, *, error: bool = False) -> None:
    """Print a line in which other processes may have chosen words. ``error``: to stderr."""
    print(printable(line), file=sys.stderr if error else sys.stdout, flush=True)


def shown_text(text: str) -> str:
    """Return a model's text for standard output: on a terminal, without control characters."""
    return text if not sys.stdout.isatty() else text.translate(_CONTROLS)


_CONTROLS = {code: "?" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def _wait_writable(descriptor: int) -> None:
    poll = select.poll()  # select() fails for descriptors above 1023
    poll.register(descriptor, select.POLLOUT)
    poll.poll()


class _WholeWrites(io.RawIOBase):
    """A stream's descriptor: each write is complete, also if interrupted or non-blocking."""

    mode = "wb"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream  # it would close the descriptor
        self._descriptor = stream.fileno()

    def write(self, data: ReadableBuffer, /) -> int:
        with memoryview(data).cast("B") as left:
            at, count = 0, len(left)
            while at < count:
                try:
                    at += os.write(self._descriptor, left[at:])
                except BlockingIOError:
                    _wait_writable(self._descriptor)
        return count

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


class _Output(io.TextIOWrapper):
    """Text of which every character is written, or none of that call."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except UnicodeEncodeError as problem:
            lacking = text[problem.start]
            raise OSError(
                errno.EILSEQ,
                f"standard output has the encoding {self.encoding}, which lacks {lacking!a};"
                " set PYTHONIOENCODING=utf-8",
            ) from None


def open_output(stream: TextIO) -> TextIO:
    """Return the stream for standard output in place of Python's, with the same settings.

    The bytes of file names that are not text are written as they are.
    """
    if not isinstance(stream, io.TextIOWrapper) or not _has_descriptor(stream):
        return stream  # a caller of main() captures the output
    stream.flush()
    raw = _WholeWrites(stream)
    unbuffered = stream.write_through
    return _Output(
        raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding=stream.encoding,
        errors="surrogateescape",
        line_buffering=stream.line_buffering,
        write_through=unbuffered,
    )


def _has_descriptor(stream: TextIO) -> bool:
    try:
        stream.fileno()
    except OSError:
        return False
    return True


def silence_output() -> None:
    """Discard buffered output, so that the interpreter's flush at exit cannot fail."""
    descriptor = sys.stdout.fileno()
    os.close(descriptor)  # first, for a process that can open no more files
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
