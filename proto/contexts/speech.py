"""A text-to-speech request: speech tokens are generated from text tokens, and audio from these.

The request is a context; its outputs hold audio.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ..compat.old_names import takes_earlier_fields
from ..ids import RequestID
from .equality import same, same_fields
from .status import GenerationStatus
from .text import TextContext

Integers = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]

SPEECH_ROOM = 128
"""Room for speech tokens grows in steps of this number of tokens."""


def no_tokens() -> Integers:
    """Return an empty int32 array."""
    return np.zeros(0, np.int32)


def speech_room() -> Integers:
    """Return zeroed room for the first speech tokens."""
    return np.zeros(SPEECH_ROOM, np.int32)


def roomy(tokens: Integers) -> Integers:
    """Copy the tokens, with as much zeroed room after them as repeated small updates leave."""
    room = np.zeros((len(tokens) // SPEECH_ROOM + 1) * SPEECH_ROOM, tokens.dtype)
    room[: len(tokens)] = tokens
    return room


@takes_earlier_fields
@dataclass(slots=True, kw_only=True, eq=False)
class TTSContext(TextContext):
    """One speech request.

    ``audio_prompt_tokens``: int32 voice prompt. ``buffer_speech_tokens``, ``audio_buffer``:
    state that the audio decoder keeps from the previous chunk. ``decoded_index``: number of speech
    tokens already decoded to audio. ``status``: of the speech tokens;
    ``audio_generation_status``: of the audio, and so of the request.
    """

    audio_prompt_tokens: Integers = field(default_factory=no_tokens)
    buffer_speech_tokens: Integers | None = None
    audio_buffer: Floats | None = None
    prev_samples_beyond_offset: int = 0
    streaming: bool = False
    _speech_token_size: int = field(default=SPEECH_ROOM, compare=False)
    _speech_token_end_idx: int = 0
    _speech_tokens: Integers = field(default_factory=speech_room, compare=False)
    decoded_index: int = 0
    _block_counter: int = 0
    _arrival_time: float = field(default_factory=time.time)
    audio_generation_status: GenerationStatus = GenerationStatus.ACTIVE
    type: str = field(default="TTSContext", init=False, repr=False)

    def __post_init__(self) -> None:
        TextContext.__post_init__(self)  # the class cell of a slotted dataclass is another
        if not 0 <= self._speech_token_end_idx <= len(self._speech_tokens):
            raise ValueError("the speech tokens end after their array")
        if not self._speech_tokens.flags.writeable:
            self._speech_tokens = self._speech_tokens.copy()

    def __eq__(self, other: object) -> bool:
        """Compare class and values, without the room for further speech tokens."""
        if not isinstance(other, TTSContext):
            return NotImplemented
        return same_fields(self, other) and same(self.speech_tokens, other.speech_tokens)

    __hash__ = None  # mutable

    @property
    def is_done(self) -> bool:
        """Whether the audio is complete."""
        return self.audio_generation_status.is_done

    @property
    def speech_tokens(self) -> Integers:
        """The speech tokens, as a view."""
        return self._speech_tokens[: self._speech_token_end_idx]

    @property
    def block_counter(self) -> int:
        """Number of calls of ``update_speech_tokens``, also those without tokens."""
        return self._block_counter

    @property
    def speech_token_status(self) -> GenerationStatus:
        """The status of the speech tokens: ``status``."""
        return self.status

    def update_speech_token_status(self, status: GenerationStatus) -> None:
        """Set the status of the speech tokens."""
        self.status = status

    def update_audio_generation_status(self, status: GenerationStatus) -> None:
        """Set the status of the audio."""
        self.audio_generation_status = status

    def set_decoded_index(self, idx: int) -> None:
        """Set the number of speech tokens that were decoded to audio."""
        self.decoded_index = idx

    def has_undecoded_speech_tokens(self, exclude_last_n: int = 0) -> bool:
        """Whether speech tokens before the last ``exclude_last_n`` are not decoded yet."""
        return self.decoded_index < self._speech_token_end_idx - exclude_last_n

    def update_speech_tokens(self, new_tokens: Integers) -> None:
        """Append speech tokens; new room is zeroed."""
        end = self._speech_token_end_idx + len(new_tokens)
        if end >= self._speech_token_size:
            self._speech_token_size += -(-len(new_tokens) // SPEECH_ROOM) * SPEECH_ROOM
        if self._speech_token_size > len(self._speech_tokens):
            room = np.zeros(self._speech_token_size, self._speech_tokens.dtype)
            room[: self._speech_token_end_idx] = self.speech_tokens
            self._speech_tokens = room
        self._speech_tokens[self._speech_token_end_idx : end] = new_tokens
        self._speech_token_end_idx = end
        self._block_counter += 1

    def next_speech_tokens(
        self, audio_chunk_size: int | None = None, buffer: int | None = None
    ) -> tuple[Integers, int]:
        """Return the speech tokens to decode next, and how many of them were decoded before.

        ``audio_chunk_size``: maximum new tokens; None: all. ``buffer``: maximum decoded tokens to
        repeat. Does not change ``decoded_index``; use :meth:`set_decoded_index`.
        """
        start, end = self.decoded_index, self._speech_token_end_idx
        again = min(buffer, start) if buffer is not None else 0
        if audio_chunk_size is not None:
            end = min(end, start + audio_chunk_size)
        return self._speech_tokens[start - again : end], again


Audio = npt.NDArray[np.float32]
SpeechTokens = npt.NDArray[np.integer[Any]]


@dataclass(slots=True, kw_only=True)
class AudioGenerationMetadata:
    """Metadata of a chunk of audio; None for unknown values.

    ``sample_rate``: Hz. ``duration``, ``processing_time``: seconds.
    """

    sample_rate: int | None = None
    duration: float | None = None
    chunk_id: int | None = None
    timestamp: str | None = None
    final_chunk: bool | None = None
    model_name: str | None = None
    request_id: RequestID | None = None
    tokens_generated: int | None = None
    processing_time: float | None = None
    echo: str | None = None

    def to_dict(self) -> dict[str, int | float | str | bool]:
        """Return the known values, also 0 and False, with the request id as text."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        if self.request_id is not None:
            values["request_id"] = str(self.request_id)
        return {name: value for name, value in values.items() if value is not None}


@dataclass(slots=True, kw_only=True, eq=False)
class AudioGenerationOutput:
    """Audio of one request.

    ``audio_data``: float32 samples. ``steps_executed``: number of its speech tokens.
    ``buffer_speech_tokens``: input of the next chunk.
    """

    final_status: GenerationStatus
    steps_executed: int
    audio_data: Audio = field(default_factory=lambda: np.zeros(0, np.float32))
    buffer_speech_tokens: SpeechTokens | None = None
    metadata: AudioGenerationMetadata = field(default_factory=AudioGenerationMetadata)

    def __eq__(self, other: object) -> bool:
        known = isinstance(other, AudioGenerationOutput)
        return same_fields(self, other) if known else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    @property
    def is_done(self) -> bool:
        """Whether this is the request's last audio."""
        return self.final_status.is_done


@dataclass(slots=True, eq=False)
class AudioGenerationResponse:
    """The earlier form of :class:`AudioGenerationOutput`; ``audio`` may be None."""

    final_status: GenerationStatus
    audio: Audio | None = None
    buffer_speech_tokens: SpeechTokens | None = None

    def __eq__(self, other: object) -> bool:
        known = isinstance(other, AudioGenerationResponse)
        return same_fields(self, other) if known else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    @property
    def is_done(self) -> bool:
        """Whether this is the request's last audio."""
        return self.final_status.is_done

    @property
    def has_audio_data(self) -> bool:
        """Whether there is audio."""
        return self.audio is not None

    @property
    def audio_data(self) -> Audio:
        """The audio; ValueError if None."""
        if self.audio is None:
            raise ValueError("the response has no audio")
        return self.audio
