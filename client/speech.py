"""Speech from a cluster: the prompt of a speech model, and the samples that its workers decode.

Samples arrive with the tokens that complete them. Tokens arrive once and in order, whichever
workers die meanwhile, so no sample is lost or repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.speech import TTSContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.errors import InputError, TaskMismatch
from baton.proto.layout import AudioCard
from baton.text.model_files import SPEECH_FILE
from baton.text.speech_format import SpeechFormat, check_spoken, parse_speech_format

from .model import Sampling, ServedModel, encode, sampling_with_defaults

I16 = npt.NDArray[np.int16]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True, frozen=True, eq=False)
class AudioPrompt:
    """A voice, given by speech that the model continues.

    ``audio_prompt_tokens``: codebook entries of whole frames, in the order of the audio tokens, as
    in ``TTSContext.speech_tokens``. ``text``: the words of that speech.
    """

    audio_prompt_tokens: Sequence[int] | npt.NDArray[np.integer]
    text: str = ""


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
    model: ServedModel, text: str, voice: str | AudioPrompt | None, sampling: Sampling
) -> TTSContext:
    """Make the request for a text.

    Raises InputError for an empty text, an unusable voice, or stop strings.
    """
    speech = speech_format(model)
    params = sampling_with_defaults(sampling, model)
    if sampling is not None and sampling.stop:
        raise InputError("stop has no effect on speech, which contains no text")
    if isinstance(voice, AudioPrompt):
        check_spoken(text)
        example, prompt = _example(model, speech, voice), text
    else:
        example, prompt = [], speech.prompt_text(text, voice)
    words = encode(prompt, model)
    parts = [*example, speech.start_tokens, words, speech.end_tokens]
    tokens = np.concatenate(parts).astype(np.int64)
    return TTSContext(
        max_length=model.card.max_length,
        tokens=TokenBuffer(tokens),
        sampling_params=params,
        eos_token_ids={*model.card.eos_token_ids, *speech.stop_tokens},
        model_name=model.card.name,
        streaming=True,
    )


def _example(
    model: ServedModel, speech: SpeechFormat, voice: AudioPrompt
) -> list[Sequence[int] | npt.NDArray[np.integer]]:
    """Return the ids before the prompt: an earlier text and its speech, as the model makes them."""
    audio = audio_card(model)
    if speech.audio_prompt_end_tokens is None or not audio.codebook_size:
        raise InputError(
            f"{model.card.name!r} takes no voice by audio tokens: its {SPEECH_FILE} has no "
            "audio_prompt_end_tokens"
        )
    entries = _entries(voice.audio_prompt_tokens, audio, model.card.max_length)
    words = encode(voice.text, model) if voice.text.strip() else ()
    slots = np.arange(len(entries)) % audio.frame_tokens
    ids = speech.first_token + slots * audio.codebook_size + entries
    return [
        speech.start_tokens, words, speech.end_tokens, ids, speech.audio_prompt_end_tokens,
    ]  # fmt: skip


def _entries(given: Sequence[int] | npt.NDArray[np.integer], audio: AudioCard, most: int) -> I64:
    """Return the entries of an audio prompt as int64. Raises InputError for another number.

    ``most``: maximum number, checked before the array is made.
    """
    name = "audio_prompt_tokens"
    flat = not isinstance(given, np.ndarray) or given.ndim == 1
    if flat and len(given) > most:
        raise InputError(f"{name} has {len(given)} entries, limit {most} (the model's context)")
    try:
        entries = np.asarray(given)
    except ValueError:  # lists of several lengths
        flat, entries = False, np.empty(0)
    if not flat or entries.ndim != 1 or entries.dtype.kind not in "iu":
        raise InputError(f"{name} must be a list of integers, and not empty")
    if len(entries) % audio.frame_tokens:
        raise InputError(
            f"{name} has {len(entries)} entries; a frame has {audio.frame_tokens}, and only whole "
            "frames are taken"
        )
    wrong = (entries < 0) | (entries >= audio.codebook_size)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(
            f"{name}[{at}] is {entries[at]}; a codebook has entries 0 to {audio.codebook_size - 1}"
        )
    return entries.astype(np.int64)


def no_speech(text: str) -> InputError:
    """Return the error for a text that ended without a sample."""
    return InputError(
        f"the model spoke nothing for {text[:80]!r}: it speaks no word of this text, or the "
        "maximum of new tokens is too small"
    )


def samples_of(media: bytes) -> I16:
    """Return the samples of a chunk."""
    return np.frombuffer(media, "<i2").astype(np.int16, copy=False)
