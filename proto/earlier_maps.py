"""The map of a context as the earlier page has it, read into the one set of classes.

There ``tokens`` is an array with room behind it, whose extent and windows are numbers beside it,
the request id is a text, and what has its default is left out. Only reading: what is written is
the later form (:mod:`.numpy_maps`).

The classes here are named as the contexts they become, for that is their tag on the wire.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from . import contexts, speech, vision
from .limits import MAX_EOS_TOKEN_IDS, MAX_NAMED_ARRAYS
from .outputs import LogProbabilities
from .sampling import SamplingParams
from .status import GenerationStatus
from .tokens import TokenBuffer
from .wire import EosSequences, Name

Array = npt.NDArray[Any]

_UNSET = -1


@dataclass(kw_only=True)
class TextContext:
    """Fields under their names on the wire; an index that is -1 was never set."""

    max_length: int
    tokens: Array
    request_id: Name
    eos_token_ids: Annotated[set[int], Meta(max_length=MAX_EOS_TOKEN_IDS)] = field(
        default_factory=set
    )
    eos_sequences: EosSequences = field(default_factory=list)
    log_probabilities: int | None = None
    log_probabilities_echo: bool = False
    ignore_eos: bool = False
    json_schema: str | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    model_name: str = ""
    lora_name: str | None = None
    target_endpoint: str | None = None
    _status: GenerationStatus = GenerationStatus.ACTIVE
    _start_idx: int = 0
    _active_idx: int = _UNSET
    _end_idx: int = _UNSET
    _completion_start_idx: int = _UNSET
    _completion_end_idx: int = _UNSET
    _prompt_len: int = _UNSET
    _committed_idx: int = 0
    _log_probabilities_data: dict[int, LogProbabilities] = field(default_factory=dict)
    _is_initial_prompt: bool = True
    _draft_offset: int = 0

    def context(self) -> contexts.TextContext:
        """The context that was sent; ValueError where its numbers contradict each other."""
        return contexts.TextContext(**self._values())

    def _values(self) -> dict[str, Any]:
        return {
            "max_length": self.max_length,
            "tokens": self._buffer(),
            "request_id": self.request_id,
            "eos_token_ids": self.eos_token_ids,
            "eos_sequences": self.eos_sequences,
            "log_probabilities": self.log_probabilities,
            "log_probabilities_echo": self.log_probabilities_echo,
            "ignore_eos": self.ignore_eos,
            "json_schema": self.json_schema,
            "sampling_params": self.sampling_params,
            "model_name": self.model_name,
            "lora_name": self.lora_name,
            "target_endpoint": self.target_endpoint,
            "status": self._status,
            "_committed_idx": self._committed_idx,
            "_log_probabilities_data": self._log_probabilities_data,
            "_is_initial_prompt": self._is_initial_prompt,
            "_draft_offset": self._draft_offset,
        }

    def _buffer(self) -> TokenBuffer:
        length = _or(self._end_idx, len(self.tokens))
        active = _or(self._active_idx, length)
        state = [
            length,
            self._start_idx,
            active,
            0,
            _or(self._completion_start_idx, active),
            _or(self._completion_end_idx, active),
            _or(self._prompt_len, active),
            active < length,
        ]
        if self.tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be integers, not {self.tokens.dtype}")
        return TokenBuffer.from_state(self.tokens.astype(np.int64), state)


@dataclass(kw_only=True)
class TextAndVisionContext(TextContext):
    """One image without a token range."""

    pixel_values: Annotated[tuple[Array, ...], Meta(max_length=1)] = ()
    extra_model_args: Annotated[dict[str, Array], Meta(max_length=MAX_NAMED_ARRAYS)] = field(
        default_factory=dict
    )
    _needs_vision_encoding: bool = True

    def context(self) -> vision.TextAndVisionContext:
        """See :meth:`TextContext.context`."""
        return vision.TextAndVisionContext(
            **self._values(),
            pixel_values=self.pixel_values,
            extra_model_args=self.extra_model_args,
            _pixels_encoded=not self._needs_vision_encoding,
        )


@dataclass(kw_only=True)
class TTSContext(TextContext):
    """Speech tokens with room behind them."""

    audio_prompt_tokens: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    buffer_speech_tokens: Array | None = None
    audio_buffer: Array | None = None
    prev_samples_beyond_offset: int = 0
    streaming: bool = False
    _speech_token_size: int = speech.SPEECH_ROOM
    _speech_token_end_idx: int = 0
    _speech_tokens: Array = field(default_factory=lambda: np.zeros(speech.SPEECH_ROOM, np.int32))
    _decoded_index: int = 0
    _block_counter: int = 0
    _arrival_time: float = field(default_factory=time.time)
    _audio_generation_status: GenerationStatus = GenerationStatus.ACTIVE

    def context(self) -> speech.TTSContext:
        """See :meth:`TextContext.context`."""
        return speech.TTSContext(
            **self._values(),
            audio_prompt_tokens=self.audio_prompt_tokens,
            buffer_speech_tokens=self.buffer_speech_tokens,
            audio_buffer=self.audio_buffer,
            prev_samples_beyond_offset=self.prev_samples_beyond_offset,
            streaming=self.streaming,
            _speech_token_size=self._speech_token_size,
            _speech_token_end_idx=self._speech_token_end_idx,
            _speech_tokens=self._speech_tokens,
            decoded_index=self._decoded_index,
            _block_counter=self._block_counter,
            _arrival_time=self._arrival_time,
            audio_generation_status=self._audio_generation_status,
        )


EARLIER_FORMS: dict[type, type[TextContext]] = {
    contexts.TextContext: TextContext,
    vision.TextAndVisionContext: TextAndVisionContext,
    speech.TTSContext: TTSContext,
}
"""What is read for each class where the later form is not found."""


def _or(index: int, default: int) -> int:
    return default if index == _UNSET else index
