"""Read the earlier form of a context's map into the present classes.

In that form ``tokens`` is an array with unused room at its end; its length and windows are separate
numbers. The request id is a text, and fields with default values are left out. Encoders write only
the later form (:mod:`..codec.single_buffer`).
"""

from __future__ import annotations

import time
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ..contexts import speech, text, vision
from ..contexts.status import GenerationStatus
from ..contexts.tokens import TokenBuffer
from ..limits import MAX_NAMED_ARRAYS
from ..sampling import SamplingParams
from ..wire.arrays import Array, ArrayMap, ArrayReader
from ..wire.bounds import Count, EosSequences, EosTokenIds, Name, Number, Text
from ..wire.context_maps import check_progress
from ..wire.log_prob_maps import read_queued
from ..wire.wire_context import WireSampling
from .old_names import INDEX_FIELDS, indexed_buffer

_UNSET = -1
_ACTIVE = GenerationStatus.ACTIVE


class EarlierText(msgspec.Struct, kw_only=True, tag="TextContext"):
    """Fields under their names on the wire; an index of -1 is unset."""

    max_length: Number
    tokens: ArrayMap
    request_id: Name
    eos_token_ids: EosTokenIds = []
    eos_sequences: EosSequences = []
    log_probabilities: Number | None = None
    log_probabilities_echo: bool = False
    ignore_eos: bool = False
    json_schema: Text | None = None
    sampling_params: WireSampling = WireSampling()
    model_name: Name = ""
    lora_name: Name | None = None
    target_endpoint: Name | None = None
    _status: GenerationStatus = _ACTIVE
    _start_idx: Count = 0
    _active_idx: Number = _UNSET
    _end_idx: Number = _UNSET
    _completion_start_idx: Number = _UNSET
    _completion_end_idx: Number = _UNSET
    _prompt_len: Number = _UNSET
    _committed_idx: Number = 0
    _log_probabilities_data: msgspec.Raw = msgspec.Raw(b"\xc0")
    _is_initial_prompt: bool = True
    _draft_offset: Number = 0

    def context(self, reader: ArrayReader) -> text.TextContext:
        """Build the context; raises ValueError if its numbers contradict each other."""
        return _checked(text.TextContext(**self._values(reader)))

    def _values(self, reader: ArrayReader) -> dict[str, Any]:
        queued = self._log_probabilities_data
        return {
            "max_length": self.max_length,
            "tokens": self._buffer(reader.read(self.tokens)),
            "request_id": self.request_id,
            "eos_token_ids": set(self.eos_token_ids),
            "eos_sequences": self.eos_sequences,
            "log_probabilities": self.log_probabilities,
            "log_probabilities_echo": self.log_probabilities_echo,
            "ignore_eos": self.ignore_eos,
            "json_schema": self.json_schema,
            "sampling_params": SamplingParams.from_wire(self.sampling_params),
            "model_name": self.model_name,
            "lora_name": self.lora_name,
            "target_endpoint": self.target_endpoint,
            "status": self._status,
            "_committed_idx": self._committed_idx,
            "_log_probabilities_data": read_queued(queued) or {},
            "_is_initial_prompt": self._is_initial_prompt,
            "_draft_offset": self._draft_offset,
        }

    def _buffer(self, tokens: Array) -> TokenBuffer:
        return indexed_buffer(tokens, {name: getattr(self, name) for name in INDEX_FIELDS})


class EarlierVision(EarlierText, kw_only=True, tag="TextAndVisionContext"):
    """One image without a token range."""

    pixel_values: Annotated[list[ArrayMap], Meta(max_length=1)] = []
    extra_model_args: Annotated[dict[Name, ArrayMap], Meta(max_length=MAX_NAMED_ARRAYS)] = {}
    _needs_vision_encoding: bool = True

    def context(self, reader: ArrayReader) -> vision.TextAndVisionContext:
        """See :meth:`EarlierText.context`."""
        context = vision.TextAndVisionContext(
            **self._values(reader),
            pixel_values=tuple(map(reader.read, self.pixel_values)),
            extra_model_args={n: reader.read(a) for n, a in self.extra_model_args.items()},
            _pixels_encoded=not self._needs_vision_encoding,
        )
        return _checked(context)


class EarlierSpeech(EarlierText, kw_only=True, tag="TTSContext"):
    """Speech tokens with unused room after them."""

    audio_prompt_tokens: ArrayMap | None = None
    buffer_speech_tokens: ArrayMap | None = None
    audio_buffer: ArrayMap | None = None
    prev_samples_beyond_offset: Count = 0
    streaming: bool = False
    _speech_token_size: Count | None = None
    _speech_token_end_idx: Count = 0
    _speech_tokens: ArrayMap | None = None
    _decoded_index: Count = 0
    _block_counter: Count = 0
    _arrival_time: float | None = None
    _audio_generation_status: GenerationStatus = _ACTIVE

    def context(self, reader: ArrayReader) -> speech.TTSContext:
        """See :meth:`EarlierText.context`."""
        prompt, sent, arrived = self.audio_prompt_tokens, self._speech_tokens, self._arrival_time
        room = speech.speech_room() if sent is None else reader.read(sent)
        size, end = self._speech_token_size, self._speech_token_end_idx
        if size not in (None, len(room)) or end > len(room) or self._decoded_index > end:
            raise ValueError(
                f"{size} speech tokens, valid up to {end}, but the array has {len(room)}"
            )
        context = speech.TTSContext(
            **self._values(reader),
            audio_prompt_tokens=speech.no_tokens() if prompt is None else reader.read(prompt),
            buffer_speech_tokens=_maybe(self.buffer_speech_tokens, reader),
            audio_buffer=_maybe(self.audio_buffer, reader),
            prev_samples_beyond_offset=self.prev_samples_beyond_offset,
            streaming=self.streaming,
            _speech_token_size=len(room),
            _speech_token_end_idx=end,
            _speech_tokens=room,
            decoded_index=self._decoded_index,
            _block_counter=self._block_counter,
            _arrival_time=time.time() if arrived is None else arrived,
            audio_generation_status=self._audio_generation_status,
        )
        return _checked(context)


EARLIER_MAPS: dict[type, type[EarlierText]] = {
    text.TextContext: EarlierText,
    vision.TextAndVisionContext: EarlierVision,
    speech.TTSContext: EarlierSpeech,
}
"""Earlier form by class, tried if a map does not have the later form."""

C = TypeVar("C", bound=text.TextContext)


def _checked(context: C) -> C:
    check_progress(context)
    return context


def _maybe(sent: ArrayMap | None, reader: ArrayReader) -> Array | None:
    return None if sent is None else reader.read(sent)
