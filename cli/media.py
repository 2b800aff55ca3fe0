"""The text that ``baton draw`` and ``baton speak`` read, and the file that they write."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from baton.proto.errors import ConfigError

from .cluster import add_address

_KNOWN_ENDS = frozenset(
    {
        ".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tiff", ".avif",
        ".wav", ".flac", ".mp3", ".ogg", ".opus", ".aac", ".m4a",
    }
)  # fmt: skip
"""Ends of names that promise a format; other names may end as they like."""


def add_text_and_output(parser: argparse.ArgumentParser, output_help: str) -> None:
    """Add the text, the cluster's address and the output file."""
    parser.add_argument("text", metavar="TEXT", nargs="?", help="text [standard input]")
    add_address(parser)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help=output_help)


def text_of(arguments: argparse.Namespace) -> str:
    """Return the text of the command line or of standard input. Raises ConfigError if empty."""
    text: str = arguments.text if arguments.text is not None else sys.stdin.read()
    if not text.strip():
        raise ConfigError("the text is empty; give TEXT or pipe text to standard input")
    return text


def check_output(output: str, formats: Mapping[str, str]) -> None:
    """Raise ConfigError, before anything is computed, for a file that cannot be written.

    ``formats``: names of the formats that are written, by the ends of files' names in lower case.
    A name without such an end is allowed.
    """
    path = Path(output)
    end = path.suffix.lower()
    if end in _KNOWN_ENDS - formats.keys():
        known = " or ".join(f"{name} ({ending})" for ending, name in formats.items())
        raise ConfigError(f"cannot write {output} as {end}: only {known} is written")
    if output != "-" and (path.is_dir() or not path.parent.is_dir()):
        reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"cannot write {output}: {reason}")


def write_error(output: str | Path, problem: OSError) -> ConfigError:
    """Return the error for an output file that could not be written."""
    return ConfigError(f"cannot write {output}: {problem.strerror}")
