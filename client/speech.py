"""Speech from a cluster: the prompt of a speech model, and the samples that its workers decode.

Samples arrive with the tokens that complete them. Tokens arrive once and in order, whichever
workers die meanwhile, so no sample is lost or repeated.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..proto.contexts.speech import TTSContext
from ..proto.contexts.tokens import TokenBuffer
from ..proto.errors import InputError, TaskMismatch
from ..proto.layout import AudioCard
from ..text.model_files import SPEECH_FILE
from ..text.speech_format import SpeechFormat, parse_speech_format
from .model import Sampling, ServedModel, encode, sampling_with_defaults

I16 = npt.NDArray[np.int16]


def audio_card(model: ServedModel) -> AudioCard:
    """Return the model's sample rate and frames. Raises TaskMismatch if it does not speak."""
    audio = model.card.audio
    if audio is None or TTSContext.__name__ not in model.card.kinds:
        raise TaskMismatch(f"{model.card.name!r} is no speech model: it has no {SPEECH_FILE}")
    return audio


def speech_format(model: ServedModel) -> SpeechFormat:
    """Return the model's ``speech.json``. Raises TaskMismatch for a model without it."""
    audio_card(model)
    content = model.description.files.get(SPEECH_FILE)
    if content is None:
        raise TaskMismatch(f"the router has no {SPEECH_FILE} of {model.card.name!r}")
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


def no_speech(text: str) -> InputError:
    """Return the error for a text that ended without a sample."""
    return InputError(
        f"the model spoke nothing for {text[:80]!r}: it speaks no word of this text, or the "
        "maximum of new tokens is too small"
    )


def samples_of(media: bytes) -> I16:
    """Return the samples of a chunk."""
    return np.frombuffer(media, "<i2").astype(np.int16, copy=False)
