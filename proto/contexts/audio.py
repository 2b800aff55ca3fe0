"""Outputs of speech requests."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ids import RequestID
from .equality import same_fields
from .status import GenerationStatus

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
