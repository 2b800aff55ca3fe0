"""Speech from a cluster: the prompt of a speech model, and its audio tokens as samples.

Tokens arrive once and in order, whichever workers die meanwhile, and the samples depend on the
tokens alone. So no sample is lost or repeated. The client decodes: the cluster streams tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..proto.contexts.speech import TTSContext
from ..proto.contexts.tokens import TokenBuffer
from ..proto.errors import TaskMismatch
from ..text.model_files import SPEECH_FILE
from ..text.speech_format import SpeechFormat, parse_speech_format
from .model import Sampling, ServedModel, encode, sampling_with_defaults
from .output import Output

F32 = npt.NDArray[np.float32]


class AudioStream(Protocol):
    """Decodes one request's tokens; ``engine.audio.chunks`` implements it."""

    def feed(self, tokens: Sequence[int]) -> Iterator[F32]:
        """Yield the chunks that can be decoded now."""
        ...

    def finish(self) -> Iterator[F32]:
        """Yield the last chunks: no tokens follow."""
        ...


class Audio(Protocol):
    """A codec for a model's audio tokens; ``baton.engine.audio.chunks.load_audio`` loads it."""

    @property
    def sample_rate(self) -> int:
        """Samples per second."""
        ...

    def stream(self) -> AudioStream:
        """Return a decoder for one request."""
        ...


def speech_format(model: ServedModel) -> SpeechFormat:
    """Return the model's ``speech.json``. Raises TaskMismatch for a model without it."""
    content = model.description.files.get(SPEECH_FILE)
    if content is None or TTSContext.__name__ not in model.card.kinds:
        raise TaskMismatch(f"{model.card.name!r} is no speech model: it has no {SPEECH_FILE}")
    return parse_speech_format(content, model.description.folder or model.card.name)


def speech_context(
    model: ServedModel, text: str, voice: str | None, sampling: Sampling
) -> TTSContext:
    """Make the request for a text. Raises InputError for an empty text or an unknown voice."""
    speech = speech_format(model)
    words = encode(speech.prompt_text(text, voice), model)
    tokens = np.concatenate([speech.start_tokens, words, speech.end_tokens]).astype(np.int64)
    return TTSContext(
        max_length=model.card.max_length,
        tokens=TokenBuffer(tokens),
        sampling_params=sampling_with_defaults(sampling, model),
        eos_token_ids={*model.card.eos_token_ids, *speech.stop_tokens},
        model_name=model.card.name,
        streaming=True,
    )


def chunks_of(output: Output, stream: AudioStream) -> Iterator[F32]:
    """Yield the chunks that an output of the request completes."""
    yield from stream.feed(output.tokens)
    if output.is_done:
        yield from stream.finish()
