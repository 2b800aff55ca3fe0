"""Prompts of Z-Image: a message of a user, in the chat template of Qwen3."""

from __future__ import annotations

from collections.abc import Mapping

from baton.proto.errors import CheckpointError

from .model_files import files_below, json_object
from .prompt_tokens import (
    CHAT_PROMPT_TOKENS,
    PictureDefaults,
    PromptTokens,
    check_prompt_length,
)
from .tokenizer import Tokenizer

TURBO_SHIFT = 3.0
"""Shift of the scheduler of Z-Image-Turbo; that of Z-Image is 6."""
TURBO_STEPS, STEPS = 8, 50
GUIDANCE = 4.0
"""Guidance of Z-Image; Z-Image-Turbo was trained to draw without."""


def zimage_defaults(files: Mapping[str, bytes], origin: str) -> PictureDefaults:
    """Read the scheduler's config, the only one in which the two models differ.

    Raises CheckpointError for a wrong one.
    """
    shift = json_object(files, "scheduler/scheduler_config.json", origin).get("shift", 1.0)
    if type(shift) not in (int, float):
        raise CheckpointError(f"{origin}: scheduler/scheduler_config.json: shift is no number")
    turbo = shift <= TURBO_SHIFT
    return PictureDefaults(
        takes_guidance=True,
        steps=TURBO_STEPS if turbo else STEPS,
        guidance=0.0 if turbo else GUIDANCE,
        true_cfg=None,
        lengths=(CHAT_PROMPT_TOKENS,),
    )


class ZImageTokenizer:
    """The tokenizer in the folder ``tokenizer``, with its chat template.

    ``files``, ``trusted``: as of :class:`.flux_prompts.FluxTokenizer`. ``lengths``: most tokens of
    a prompt with the template around it; the rest is cut, as diffusers does.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        lengths: tuple[int, ...] = (CHAT_PROMPT_TOKENS,),
        *,
        trusted: bool = False,
        origin: str = "the model",
    ) -> None:
        own = files_below(files, "tokenizer/")
        self._tokenizer = Tokenizer.from_files(own, trusted=trusted, origin=f"{origin}/tokenizer")
        (self._length,) = lengths

    def encode(self, prompt: str) -> PromptTokens:
        """Return the tokens of a prompt.

        Raises InputError if it is longer than the limit, or if the template fails.
        """
        check_prompt_length(prompt)
        message = {"role": "user", "content": prompt}
        text = self._tokenizer.render_chat([message], enable_thinking=True)
        tokens = self._tokenizer.encode(text)[: self._length]
        return PromptTokens(tokens, None, len(tokens))

    def close(self) -> None:
        """End the processes of an untrusted template or tokenizer, if any."""
        self._tokenizer.close()
