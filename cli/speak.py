"""``baton speak TEXT``: write the speech of a text to a file, or raw samples to a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from ..client.speech import I16, audio_card
from ..engine.audio.flac import FlacEncoder
from ..engine.audio.pcm import wav_header
from ..proto.errors import ConfigError
from .cluster import add_address, connect
from .numbers import seconds
from .sampling import add_sampling, sampling_of

MAX_NEW_TOKENS = 2048
Chunks = Iterable[I16]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("speak", help="speak a text, with a speech model")
    parser.add_argument("text", metavar="TEXT", nargs="?", help="text [standard input]")
    add_address(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True,
        help="WAV file, FLAC if it ends with .flac; - writes raw 16-bit samples to a pipe",
    )  # fmt: skip
    parser.add_argument("--voice", metavar="NAME", help="voice [the model's first]")
    add_sampling(parser, max_new_tokens=MAX_NEW_TOKENS)
    parser.add_argument(
        "--deadline", type=seconds, metavar="SECONDS", help="seconds until the request fails"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the chunks as they arrive."""
    text = arguments.text if arguments.text is not None else sys.stdin.read()
    if not text.strip():
        raise ConfigError("the text is empty; give TEXT or pipe text to standard input")
    with connect(arguments) as client:
        rate = audio_card(client.model()).sample_rate
        chunks = client.speak(
            text, sampling_of(arguments), voice=arguments.voice, deadline=arguments.deadline
        )
        if arguments.output == "-":
            _write(sys.stdout.buffer, chunks, lambda chunk: chunk.tobytes())
            return 0
        try:
            with Path(arguments.output).open("wb") as file:
                count = _write_file(file, chunks, rate)
        except OSError as problem:
            raise ConfigError(f"cannot write {arguments.output}: {problem.strerror}") from None
    print(f"{arguments.output}: {count / rate:.2f} s")
    return 0


def _write_file(file: BinaryIO, chunks: Chunks, rate: int) -> int:
    """Write the chunks and a header with their number, and return it."""
    if str(file.name).endswith(".flac"):
        encoder = FlacEncoder(rate)
        file.write(encoder.header())
        count = _write(file, chunks, encoder.encode)
        header = encoder.header(count)
    else:
        file.write(wav_header(rate, 0))
        count = _write(file, chunks, lambda chunk: chunk.tobytes())
        header = wav_header(rate, 2 * count)
    file.seek(0)
    file.write(header)
    return count


def _write(file: BinaryIO, chunks: Chunks, encode: Callable[[I16], bytes]) -> int:
    """Write the chunks; return the number of samples."""
    count = 0
    for chunk in chunks:
        file.write(encode(chunk))
        file.flush()
        count += len(chunk)
    return count
