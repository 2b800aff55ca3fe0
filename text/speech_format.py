"""How a speech model is prompted and where its audio tokens are: ``speech.json`` in its folder.

The model generates one audio token per slot of a frame. Slot ``i`` has the ids from
``first_token + i * S`` on, where ``S`` is the number of entries of a codebook.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated

import msgspec

from baton.proto.errors import CheckpointError, InputError
from baton.proto.limits import MAX_NAME_CHARS

from .model_files import SPEECH_FILE

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
TokenIds = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=64)]
Voice = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
MAX_VOICES = 1024


class SpeechFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``speech.json``.

    ``codec``: folder of the audio codec inside the model's folder. ``first_token``: id of the first
    audio token. ``prompt``: text to tokenize; ``{voice}`` and ``{text}`` are replaced.
    ``start_tokens``, ``end_tokens``: ids before and after the prompt's tokens. ``stop_tokens``:
    ids that end the speech, beside the model's own. ``audio_prompt_end_tokens``: ids after the
    audio tokens of a voice; None if the model takes no audio. ``voices``: names of the voices, the
    default first; empty if the model has only one.
    """

    first_token: TokenId
    codec: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)] = "snac"
    prompt: Annotated[str, msgspec.Meta(max_length=4096)] = "{voice}: {text}"
    start_tokens: TokenIds = ()
    end_tokens: TokenIds = ()
    stop_tokens: TokenIds = ()
    audio_prompt_end_tokens: TokenIds | None = None
    voices: Annotated[tuple[Voice, ...], msgspec.Meta(max_length=MAX_VOICES)] = ()

    def prompt_text(self, text: str, voice: str | None = None) -> str:
        """Return the prompt for ``text``; ``voice``: None for the default.

        Raises InputError for an empty text or an unknown voice.
        """
        check_spoken(text)
        if voice is None:
            voice = self.voices[0] if self.voices else ""
        elif voice not in self.voices:
            known = f"the model's voices are {', '.join(self.voices)}"
            if not self.voices:
                known = "the model has no named voices, so leave it out"
            raise InputError(f"voice {voice[:80]!r} is unknown; {known}")
        before, _, after = self.prompt.partition("{text}")
        return before.replace("{voice}", voice) + text + after.replace("{voice}", voice)


def check_spoken(text: str) -> None:
    """Raise InputError for an empty text."""
    if not text.strip():
        raise InputError("the text to speak is empty")


def parse_speech_format(content: bytes, origin: str) -> SpeechFormat:
    """Read ``speech.json``. Raises CheckpointError, which names ``origin``, if it is not valid."""
    try:
        speech = msgspec.json.decode(content, type=SpeechFormat)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{origin}: {SPEECH_FILE}: {error}") from None
    if speech.prompt.count("{text}") != 1:
        raise CheckpointError(f"{origin}: {SPEECH_FILE}: prompt must contain {{text}} once")
    if speech.codec == ".." or PurePath(speech.codec).name != speech.codec:
        raise CheckpointError(f"{origin}: {SPEECH_FILE}: codec must be the name of a folder")
    return speech
