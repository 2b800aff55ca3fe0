"""``baton speak TEXT``: write the speech of a text to a file, or raw samples to a pipe."""

from __future__ import annotations

import argparse
import sys
import wave
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import numpy as np
import numpy.typing as npt

from baton.client.model import ServedModel
from baton.client.speech import I16, AudioPrompt, audio_card, speech_format
from baton.engine.audio.chunks import I32, read_layout
from baton.engine.audio.flac import FlacEncoder
from baton.engine.audio.pcm import wav_header
from baton.engine.audio.snac import SnacEncoder
from baton.proto.errors import ConfigError
from baton.runtime.process.memory import size_text
from baton.runtime.small_files import check_file
from baton.text.model_files import SPEECH_FILE

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
        "--voice-from", metavar="FILE", help="voice by its audio: .wav, or .npy or .json of tokens"
    )
    parser.add_argument(
        "--voice-text", metavar="TEXT", default="", help="text that is spoken in --voice-from"
    )
    add_sampling(parser, max_new_tokens=MAX_NEW_TOKENS, stop=False)
    add_deadline(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the chunks as they arrive."""
    text = text_of(arguments)
    check_output(arguments.output, {".wav": "WAV", ".flac": "FLAC"})
    with connect(arguments) as client:
        model = client.model()
        rate = audio_card(model).sample_rate
        voice = _voice_of(arguments, model)
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


def _voice_of(arguments: argparse.Namespace, model: ServedModel) -> str | AudioPrompt | None:
    """Return the voice. Raises ConfigError for two voices, or a file that cannot be used."""
    name, path, text = arguments.voice, arguments.voice_from, arguments.voice_text
    if path is None:
        if text:
            raise ConfigError("--voice-text needs --voice-from")
        return cast("str | None", name)
    if name is not None:
        raise ConfigError("--voice cannot be combined with --voice-from")
    file = Path(path)
    tokens = encoded(file, model) if file.suffix == ".wav" else audio_tokens(file)
    return AudioPrompt(tokens, text)


def encoded(path: Path, model: ServedModel) -> I32:
    """Return the audio tokens of a WAV file. Raises ConfigError, also without the model's codec."""
    folder = Path(model.description.folder)
    if not (folder / SPEECH_FILE).is_file():
        raise ConfigError(
            f"{path}: samples need the codec of the model, and this machine has no {folder}; give "
            "a .npy or a .json file of audio tokens"
        )
    layout, config = read_layout(folder) or (None, None)
    if layout is None or config is None:
        raise ConfigError(f"{folder}: no speech model")
    try:
        _check_size(path)
        with wave.open(str(path)) as file:
            shape = file.getsampwidth(), file.getnchannels(), file.getframerate()
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from None
    except (wave.Error, EOFError, ValueError) as problem:
        raise ConfigError(f"{path}: no WAV file of 16-bit samples: {problem}") from None
    if shape != (2, 1, config.sampling_rate):
        raise ConfigError(
            f"{path}: {8 * shape[0]} bit, {shape[1]} channels, {shape[2]} Hz; the codec takes 16 "
            f"bit, one channel, {config.sampling_rate} Hz"
        )
    encoder = SnacEncoder(folder / speech_format(model).codec)
    return layout.interleaved(encoder.encode(samples * np.float32(2**-15)))


def _check_size(path: Path) -> None:
    check_file(path)
    if path.stat().st_size > MAX_VOICE_BYTES:
        raise ConfigError(f"{path}: larger than {size_text(MAX_VOICE_BYTES)}")


def audio_tokens(path: Path) -> list[int] | npt.NDArray[np.integer]:
    """Read a list of audio tokens. Raises ConfigError."""
    if path.suffix not in (".npy", ".json"):
        raise ConfigError(
            f"{path}: a voice is a .wav file, or a .npy or .json file of audio tokens"
        )
    try:
        _check_size(path)
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
