"""Which audio tokens become which samples, and when.

Invariant: the borders of chunks are fixed frame numbers, and a chunk is decoded from its frames and
their context alone. So its samples depend on the tokens, not on when they arrive, on where
the decoding began or on the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.errors import CheckpointError
from baton.runtime.small_files import check_file
from baton.text.model_files import SPEECH_FILE
from baton.text.speech_format import SpeechFormat, parse_speech_format

from ..kernels.audio import AudioBackend
from ..kernels.load import load_backend
from ..loading.checkpoint import digest_tensors
from ..loading.safetensors import TensorStore
from .pcm import pcm16
from .snac import Rows, SnacDecoder
from .snac_weights import SnacConfig, load_snac_config

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
Integers = npt.NDArray[np.integer[Any]]

LONGEST_CHUNK = 16
"""Maximum frames per chunk."""


def chunk_end(first: int) -> int:
    """Return the end of the chunk that contains frame ``first``.

    Chunks have 1, 1, 2, 2, 4, 4, 8, 8 frames, then 16 each: short ones for the first sound to come
    soon, long ones because they cost less per frame.
    """
    end, size = 0, 1
    while size < LONGEST_CHUNK:
        for _ in range(2):
            end += size
            if first < end:
                return end
        size *= 2
    return end + ((first - end) // LONGEST_CHUNK + 1) * LONGEST_CHUNK


class Window(NamedTuple):
    """A chunk to decode: frames ``first..end``, from the tokens of frames ``start..stop``."""

    first: int
    end: int
    start: int
    stop: int


def next_window(first: int, frames: int, reach: int, *, ended: bool) -> Window | None:
    """Return the chunk that begins at frame ``first``, or None if it cannot be decoded yet.

    ``frames``: complete frames that were generated. ``reach``: frames of context on each side.
    ``ended``: no frames will follow.
    """
    end = chunk_end(first)
    if not ended and frames < end + reach:
        return None
    end = min(end, frames)
    if end <= first:
        return None
    return Window(first, end, max(0, first - reach), min(frames, end + reach))


@dataclass(slots=True, frozen=True)
class AudioLayout:
    """The audio tokens of a model. ``strides``: latent steps per entry, of each codebook."""

    first_token: int
    codebook_size: int
    strides: tuple[int, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        """The codebook of each token of a frame.

        A token of a coarse codebook comes before those of the finer ones that refine its time.
        """
        found: list[int] = []

        def visit(book: int) -> None:
            found.append(book)
            if book + 1 < len(self.strides):
                for _ in range(self.strides[book] // self.strides[book + 1]):
                    visit(book + 1)

        visit(0)
        return tuple(found)

    @property
    def frame_tokens(self) -> int:
        """Tokens per frame."""
        return sum(self.strides[0] // stride for stride in self.strides)

    @property
    def end_token(self) -> int:
        """The id after the last audio token."""
        return self.first_token + self.frame_tokens * self.codebook_size

    def check(self, vocabulary: int) -> None:
        """Raise CheckpointError if a vocabulary does not contain all audio tokens."""
        if self.end_token > vocabulary:
            raise CheckpointError(
                f"the audio tokens end at {self.end_token}, after the model's vocabulary "
                f"of {vocabulary}"
            )

    def entries(self, tokens: Integers) -> I32:
        """Return the codebook entries of the audio tokens; other tokens are left out.

        The position alone decides which codebook an entry belongs to, so a token with the ids of
        another slot still gives a valid entry.
        """
        places = tokens.astype(np.int64) - self.first_token
        inside = (places >= 0) & (places < self.frame_tokens * self.codebook_size)
        return (places[inside] % self.codebook_size).astype(np.int32)

    def by_codebook(self, entries: Integers) -> list[I32]:
        """Split the entries of whole frames by codebook, coarsest first."""
        frames = np.asarray(entries, np.int32).reshape(-1, self.frame_tokens)
        slots = np.array(self.slots)
        return [frames[:, slots == book].ravel() for book in range(len(self.strides))]

    def interleaved(self, entries: Sequence[Integers]) -> I32:
        """Return the entries of whole frames in the order of the tokens; see by_codebook."""
        slots = np.array(self.slots)
        frames = np.empty((len(entries[0]), self.frame_tokens), np.int32)
        for book, values in enumerate(entries):
            frames[:, slots == book] = values.reshape(len(frames), -1)
        return frames.ravel()


class AudioDecoder:
    """Decodes the windows of a model's audio tokens. Calls of several threads take turns."""

    def __init__(self, codec: SnacDecoder, first_token: int) -> None:
        self.codec = codec
        config = codec.config
        self.layout = AudioLayout(first_token, config.codebook_size, config.vq_strides)
        self._turn = threading.Lock()

    @property
    def sample_rate(self) -> int:
        """Samples per second."""
        return self.codec.config.sampling_rate

    def stream(self) -> TokenStream:
        """Return a decoder for the tokens of one request."""
        return TokenStream(self)

    def next_window(self, first: int, entries: int, *, ended: bool) -> Window | None:
        """Return the next window to decode; see :func:`next_window`. ``entries``: their number."""
        frames = entries // self.layout.frame_tokens
        return next_window(first, frames, self.codec.context_frames, ended=ended)

    def wanted_entries(self, first: int) -> int:
        """Return the number of entries at which the chunk from frame ``first`` can be decoded."""
        return (chunk_end(first) + self.codec.context_frames) * self.layout.frame_tokens

    def decode(self, window: Window, entries: Integers) -> F32:
        """Return the samples of a chunk; ``entries``: those of frames ``start..stop``."""
        with self._turn:
            *_, samples = self.stages(window, entries)
        return samples

    def reserve(self) -> None:
        """Decode a window of the longest chunk, so that no later chunk allocates or compiles."""
        reach = self.codec.context_frames
        frames = LONGEST_CHUNK + 2 * reach
        window = Window(reach, reach + LONGEST_CHUNK, 0, frames)
        self.decode(window, np.zeros(frames * self.layout.frame_tokens, np.int32))

    def decode_pcm(self, window: Window, entries: Integers) -> bytes:
        """Return the samples of a chunk as little-endian 16-bit integers."""
        return pcm16(self.decode(window, entries))

    def stages(self, window: Window, entries: Integers) -> Iterator[F32]:
        """Decode in stages; the last item is what :meth:`decode` returns."""
        size = self.codec.config.frame_samples
        wanted = Rows((window.first - window.start) * size, (window.end - window.start) * size)
        return self.codec.stages(self.layout.by_codebook(entries), wanted)


class TokenStream:
    """Decodes the tokens of one request as they arrive; see :meth:`AudioDecoder.stream`."""

    def __init__(self, audio: AudioDecoder) -> None:
        self._audio = audio
        self._entries = np.empty(0, np.int32)
        self._start = 0  # frame of the first entry that is kept
        self._next = 0  # first frame that is not decoded

    def feed(self, tokens: Sequence[int]) -> Iterator[F32]:
        """Yield the chunks that can be decoded after these tokens, float32 samples."""
        entries = self._audio.layout.entries(np.asarray(tokens, np.int64))
        self._entries = np.concatenate([self._entries, entries])
        return self._chunks(ended=False)

    def finish(self) -> Iterator[F32]:
        """Yield the last chunks: no tokens follow."""
        return self._chunks(ended=True)

    def _chunks(self, *, ended: bool) -> Iterator[F32]:
        size = self._audio.layout.frame_tokens
        while True:
            count = self._start * size + len(self._entries)
            window = self._audio.next_window(self._next, count, ended=ended)
            if window is None:
                return
            first, stop = ((frame - self._start) * size for frame in (window.start, window.stop))
            samples = self._audio.decode(window, self._entries[first:stop])
            self._next = window.end
            kept = max(self._start, window.end - self._audio.codec.context_frames)
            self._entries = self._entries[(kept - self._start) * size :]
            self._start = kept
            yield samples


def read_layout(folder: Path) -> tuple[AudioLayout, SnacConfig] | None:
    """Return the audio tokens and the codec's config of a model's folder.

    None if it has no ``speech.json``.

    Raises CheckpointError if ``speech.json`` or the codec's config is missing or invalid.
    """
    if not (folder / SPEECH_FILE).is_file():
        return None
    speech = _read_speech(folder)
    config = load_snac_config(folder / speech.codec)
    return AudioLayout(speech.first_token, config.codebook_size, config.vq_strides), config


def codec_fingerprint(folder: Path, *, full: bool = False) -> str:
    """Return the BLAKE2b-128 (hex) of what decides the samples of a model's audio tokens.

    That are the codec's config and weights, and the first audio token. ``full``: all bytes of the
    weights instead of samples, as for a model. Raises CheckpointError for missing or invalid files.
    """
    speech = _read_speech(folder)
    codec = folder / speech.codec
    digest = blake2b(digest_size=16)
    digest.update(msgspec.msgpack.encode((speech.first_token, load_snac_config(codec))))
    digest_tensors(digest, TensorStore.open(codec), full=full)
    return digest.hexdigest()


def _read_speech(folder: Path) -> SpeechFormat:
    path = folder / SPEECH_FILE
    try:
        check_file(path)
        return parse_speech_format(path.read_bytes(), str(folder))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def load_audio(
    folder: str | Path, backend: str | AudioBackend = "auto"
) -> tuple[SpeechFormat, AudioDecoder]:
    """Load ``speech.json`` and the codec of a model's folder.

    ``backend``: "auto", "cpu" or "numpy", or the kernels themselves. Raises CheckpointError if a
    file is missing or invalid, ConfigError for a codec that the kernels do not support.
    """
    speech = _read_speech(Path(folder))
    kernels = load_backend(backend) if isinstance(backend, str) else backend
    audio = AudioDecoder(SnacDecoder(Path(folder) / speech.codec, kernels), speech.first_token)
    if not kernels.on_host:
        audio.reserve()
    return speech, audio
