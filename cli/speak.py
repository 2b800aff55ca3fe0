"""``baton speak TEXT``: write the speech of a text to a file, or raw samples to a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import numpy as np
import numpy.typing as npt

from ..client.speech import I16, AudioPrompt, audio_card
from ..engine.audio.flac import FlacEncoder
from ..engine.audio.pcm import wav_header
from ..proto.errors import ConfigError
from .cluster import add_deadline, connect
from .media import add_text_and_output, check_output, text_of, write_error
from .sampling import add_sampling, sampling_of

MAX_NEW_TOKENS = 2048
MAX_VOICE_BYTES = 16 << 20
Chunks = Iterable[I16]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("speak", help="speak a text, with a speech model")
    add_text_and_output(
        parser, "WAV file, FLAC if it ends with .flac; - writes raw 16-bit samples to a pipe"
    )
    parser.add_argument("--voice", metavar="NAME", help="voice [the model's first]")
    parser.add_argument(
        "--voice-from", metavar="FILE", help="voice by its audio tokens, a .npy or .json file"
    )
    parser.add_argument(
        "--voice-text", metavar="TEXT", default="", help="text that is spoken in --voice-from"
    )
    add_sampling(parser, max_new_tokens=MAX_NEW_TOKENS)
    add_deadline(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the chunks as they arrive."""
    text = text_of(arguments)
    check_output(arguments.output)
    voice = _voice_of(arguments)
    with connect(arguments) as client:
        rate = audio_card(client.model()).sample_rate
        spoken = client.speak(
            text, sampling_of(arguments), voice=voice, deadline=arguments.deadline
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


def _voice_of(arguments: argparse.Namespace) -> str | AudioPrompt | None:
    """Return the voice. Raises ConfigError for two voices, or a file that cannot be used."""
    name, path, text = arguments.voice, arguments.voice_from, arguments.voice_text
    if path is None:
        if text:
            raise ConfigError("--voice-text needs --voice-from")
        return cast("str | None", name)
    if name is not None:
        raise ConfigError("--voice cannot be combined with --voice-from")
    return AudioPrompt(audio_tokens(Path(path)), text)


def audio_tokens(path: Path) -> list[int] | npt.NDArray[np.integer]:
    """Read a list of audio tokens. Raises ConfigError."""
    if path.suffix not in (".npy", ".json"):
        raise ConfigError(f"{path}: audio tokens are a .npy or a .json file; samples are not taken")
    try:
        if path.stat().st_size > MAX_VOICE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_VOICE_BYTES >> 20} MiB")
        if path.suffix == ".json":
            return msgspec.json.decode(path.read_bytes(), type=list[int])
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))  # a map is never larger
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from None
    except (ValueError, EOFError) as problem:  # also of msgspec
        raise ConfigError(f"{path}: no list of audio tokens: {problem}") from None


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
