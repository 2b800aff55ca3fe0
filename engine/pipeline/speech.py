"""Generates speech: a text model whose tokens are audio tokens, and the codec that decodes them.

Invariant: the chunks of a request are the same with any other requests in the batch, and after a
replay from any of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from baton.proto.contexts.generators import AudioGenerator
from baton.proto.contexts.speech import AudioGenerationMetadata, AudioGenerationOutput, TTSContext
from baton.proto.errors import InputError
from baton.proto.ids import RequestID

from ..audio.chunks import AudioDecoder, Integers, Window
from .text_generation import TextGenerationPipeline


class SpeechPipeline(AudioGenerator[TTSContext, AudioGenerationOutput]):
    """Generates audio tokens and decodes them to samples; for one thread.

    ``context.speech_tokens`` are codebook entries, and ``context.decoded_index`` is the number of
    entries that were decoded: a context with a higher one continues with later samples.
    """

    def __init__(self, text: TextGenerationPipeline, audio: AudioDecoder) -> None:
        audio.layout.check(text.model.vocab_size)
        self._text = text
        self._audio = audio
        self._read: dict[RequestID, int] = {}  # tokens whose entries are in the context
        self._steps = 0

    @property
    def decoder_sample_rate(self) -> int:
        """Samples of audio per second."""
        return self._audio.sample_rate

    @property
    def prev_num_steps(self) -> int:
        """Number of audio tokens generated in the last batch."""
        return self._steps

    def next_chunk(
        self, batch: Mapping[RequestID, TTSContext]
    ) -> dict[RequestID, AudioGenerationOutput]:
        """Return the next chunk of each request, the last one with its final status.

        Generates tokens until every request has a chunk or has ended; a request that can
        already be decoded waits meanwhile. Raises InputError if ``decoded_index`` is not a whole
        number of frames, and the errors of :meth:`TextGenerationPipeline.next_token`.
        """
        for context in batch.values():
            self._check(context)
        before = {r: self._take_tokens(context) for r, context in batch.items()}
        while waiting := {r: c for r, c in batch.items() if self._lacks(c) > 0}:
            steps = min(self._lacks(context) for context in waiting.values())
            self._text.next_token(waiting, steps)
            for context in waiting.values():
                self._take_tokens(context)
        outputs = {r: self._decode(r, c, before[r]) for r, c in batch.items()}
        self._steps = sum(output.steps_executed for output in outputs.values())
        return outputs

    def release(self, context: TTSContext) -> None:
        """Remove a context and free its blocks, if it is known."""
        self._read.pop(context.request_id, None)
        self._text.release(context)

    def _check(self, context: TTSContext) -> None:
        tokens = self._audio.layout.frame_tokens
        if context.decoded_index % tokens:
            raise InputError(f"decoded_index {context.decoded_index} is no multiple of {tokens}")

    def _take_tokens(self, context: TTSContext) -> int:
        """Append the entries of new tokens; return the number of entries before."""
        request_id, before = context.request_id, len(context.speech_tokens)
        if request_id not in self._read:
            self._read[request_id] = len(context.tokens) if before else context.prompt_length
        read = self._read[request_id]
        fresh = context.tokens.all[read:]
        if len(fresh):
            self._read[request_id] = read + len(fresh)
            context.update_speech_tokens(self._audio.layout.entries(fresh))
        return before

    def _lacks(self, context: TTSContext) -> int:
        """Return the number of entries to generate before the next chunk can be decoded."""
        if context.status.is_done:
            return 0
        wanted = self._audio.wanted_entries(self._first(context))
        return max(0, wanted - len(context.speech_tokens))

    def _first(self, context: TTSContext) -> int:
        """Return the first frame that is not decoded."""
        return context.decoded_index // self._audio.layout.frame_tokens

    def _decode(
        self, request_id: RequestID, context: TTSContext, before: int
    ) -> AudioGenerationOutput:
        first, entries = self._first(context), context.speech_tokens
        ended = context.status.is_done
        window = self._audio.next_window(first, len(entries), ended=ended)
        samples, used = np.zeros(0, np.float32), entries[:0]
        if window is not None:
            used = self._entries(window, context)
            samples = self._audio.decode(window, used)
            context.set_decoded_index(window.end * self._audio.layout.frame_tokens)
        over = (
            ended
            and self._audio.next_window(self._first(context), len(entries), ended=True) is None
        )
        if over:
            context.update_audio_generation_status(context.status)
            self._read.pop(request_id, None)
        return AudioGenerationOutput(
            final_status=context.audio_generation_status,
            steps_executed=len(entries) - before,
            audio_data=samples,
            buffer_speech_tokens=used,
            metadata=AudioGenerationMetadata(
                sample_rate=self._audio.sample_rate,
                duration=len(samples) / self._audio.sample_rate,
                chunk_id=None if window is None else window.first,
                final_chunk=over,
                request_id=request_id,
                tokens_generated=len(entries) - before,
            ),
        )

    def _entries(self, window: Window, context: TTSContext) -> Integers:
        size = self._audio.layout.frame_tokens
        return context.speech_tokens[window.start * size : window.stop * size].copy()
