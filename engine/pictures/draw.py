"""Pictures without processes: a prompt becomes pixels in the calling thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.pixels import PixelContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.limits import MAX_PICTURE_PROMPT_TOKENS
from baton.text.model_files import PICTURE_FILES, read_files
from baton.text.picture_prompts import PicturePrompts

from ..kernels.load import load_backend
from .folder import open_folder
from .pipeline import Denoiser, PromptEncoder

OnStep = Callable[[int, int], None]


class PictureEngine:
    """A loaded picture model with its tokenizers. Not thread-safe.

    ``folder``: in the diffusers layout. ``backend``: "auto", "cpu" or "numpy". ``prompt_tokens``:
    tokens of prompts for T5, or the most for Qwen3. Raises CheckpointError if the folder cannot be
    loaded.
    """

    def __init__(
        self, folder: str | Path, *, backend: str = "auto", prompt_tokens: int = 512
    ) -> None:
        if not 1 <= prompt_tokens <= MAX_PICTURE_PROMPT_TOKENS:
            raise ValueError(f"prompt_tokens must be in 1..{MAX_PICTURE_PROMPT_TOKENS}")
        opened, kernels = open_folder(folder), load_backend(backend)
        prompts = PicturePrompts.from_files(
            read_files(folder, PICTURE_FILES), trusted=True, origin=str(folder), most=prompt_tokens
        )
        self.tokenizer, self._defaults = prompts.tokenizer, prompts.defaults
        self.encoder = PromptEncoder(opened, kernels)
        self.denoiser = Denoiser(opened, kernels)

    def request(
        self, prompt: str, negative_prompt: str | None = None, *, seed: int = 0, **fields: object
    ) -> PixelContext:
        """Return the request for a picture; ``fields`` are further fields of PixelContext.

        A model whose guidance is the weight of the negative prompt gets an empty one by default.
        """
        context = PixelContext(tokens=TokenBuffer(np.zeros(1, np.int64)), **fields)  # type: ignore[arg-type]
        context.tokens, context.tokens_2 = self._buffers(prompt)
        if self._defaults.true_cfg is None and context.guidance_scale > 0:
            negative_prompt = negative_prompt or ""
        if negative_prompt is not None:
            context.negative_tokens, context.negative_tokens_2 = self._buffers(negative_prompt)
        context.extra_params["seed"] = np.array([seed % (1 << 64)], np.uint64)
        return context

    def draw(self, context: PixelContext, on_step: OnStep | None = None) -> npt.NDArray[np.uint8]:
        """Return the pixels ``[height, width, 3]``, also as the context's latents.

        ``on_step(done, total)`` is called after every step; an exception of it aborts the drawing.
        Raises InputError for a bad request.
        """
        drawing = self.denoiser.start(context, self.encoder.encode(context))
        total = len(drawing.sigmas) - 1
        while not drawing.is_done:
            self.denoiser.step([drawing])
            if on_step is not None:
                on_step(drawing.step, total)
        pixels = self.denoiser.finish(drawing)
        context.update(pixels)
        return pixels

    def _buffers(self, prompt: str) -> tuple[TokenBuffer, TokenBuffer | None]:
        made = self.tokenizer.encode(prompt)
        second = None if made.tokens_2 is None else TokenBuffer(made.tokens_2.astype(np.int64))
        return TokenBuffer(made.tokens.astype(np.int64)), second
