"""``baton speak TEXT``: write the speech of a text to a file, or raw samples to a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from ..client.speech import I16, audio_card
from ..engine.audio.flac import FlacEncoder
from ..engine.audio.pcm import wav_header
from .cluster import add_deadline, connect
from .media import add_text_and_output, check_output, text_of, write_error
from .sampling import add_sampling, sampling_of

MAX_NEW_TOKENS = 2048
Chunks = Iterable[I16]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("speak", help="speak a text, with a speech model")
    add_text_and_output(
        parser, "WAV file, FLAC if it ends with .flac; - writes raw 16-bit samples to a pipe"
    )
    parser.add_argument("--voice", metavar="NAME", help="voice [the model's first]")
    add_sampling(parser, max_new_tokens=MAX_NEW_TOKENS)
    add_deadline(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the chunks as they arrive."""
    text = text_of(arguments)
    check_output(arguments.output)
    with connect(arguments) as client:
        rate = audio_card(client.model()).sample_rate
        spoken = client.speak(
            text, sampling_of(arguments), voice=arguments.voice, deadline=arguments.deadline
        )
        first = next(spoken)  # a text without speech fails here, before a file is changed
        chunks = chain([first], spoken)
        if arguments.output == "-":
            _write(sys.stdout.buffer, chunks, lambda chunk: chunk.tobytes())
            return 0
        try:
            with Path(arguments.output).open("wb") as file:
                count = _write_file(file, chunks, rate)
        except OSError as problem:
            raise write_error(arguments.output, problem) from None
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
