"""Pictures without processes: a prompt becomes pixels in the calling thread."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...proto.contexts.pixels import PixelContext
from ...proto.contexts.tokens import TokenBuffer
from ...proto.errors import CheckpointError, InputError
from ...proto.limits import MAX_PICTURE_PROMPT_TOKENS
from ...text.tokenizer import Tokenizer
from ..kernels import load_backend
from ..loading.safetensors import read_json
from .folder import open_folder
from .pipeline import Denoiser, PromptEncoder

OnStep = Callable[[int, int], None]
Int32 = npt.NDArray[np.int32]

MAX_PROMPT_CHARS = 1 << 16
"""Longest prompt that is tokenized; far more than the encoders read."""

_CLIP_START, _CLIP_END = "<|startoftext|>", "<|endoftext|>"
_CLIP_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class PictureEngine:
    """A loaded picture model with its tokenizers. Not thread-safe.

    ``folder``: in the diffusers layout. ``backend``: "auto", "cpu" or "numpy". ``prompt_tokens``:
    length of prompts for T5. Raises CheckpointError if the folder cannot be loaded.
    """

    def __init__(
        self, folder: str | Path, *, backend: str = "auto", prompt_tokens: int = 512
    ) -> None:
        if not 1 <= prompt_tokens <= MAX_PICTURE_PROMPT_TOKENS:
            raise ValueError(f"prompt_tokens must be in 1..{MAX_PICTURE_PROMPT_TOKENS}")
        opened, kernels = open_folder(folder), load_backend(backend)
        clip_length = opened.clip.max_position_embeddings
        self.tokenizer = PromptTokenizer(opened.folder, clip_length, prompt_tokens)
        self.encoder = PromptEncoder(opened, kernels)
        self.denoiser = Denoiser(opened, kernels)

    def request(
        self, prompt: str, negative_prompt: str | None = None, *, seed: int = 0, **fields: object
    ) -> PixelContext:
        """Return the request for a picture; ``fields`` are further fields of PixelContext."""
        context = PixelContext(tokens=TokenBuffer(np.zeros(1, np.int64)), **fields)  # type: ignore[arg-type]
        context.tokens, context.tokens_2 = self._buffers(prompt)
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

    def _buffers(self, prompt: str) -> tuple[TokenBuffer, TokenBuffer]:
        tokens = self.tokenizer.encode(prompt)
        return (
            TokenBuffer(tokens.clip.astype(np.int64)),
            TokenBuffer(tokens.t5.astype(np.int64)),
        )


# --------------------------------------------------------------------------- prompts


@dataclass(slots=True, frozen=True)
class PromptTokens:
    """A prompt for CLIP (int32, up to 77) and for T5 (int32, padded to a fixed length)."""

    clip: Int32
    t5: Int32


class PromptTokenizer:
    """The tokenizers in the folders ``tokenizer`` and ``tokenizer_2`` of a picture model.

    ``clip_length``: most tokens for CLIP. ``t5_length``: tokens for T5; shorter prompts are padded
    with the padding token, longer ones are cut. The last token is always the end token.
    """

    def __init__(self, folder: Path, clip_length: int = 77, t5_length: int = 512) -> None:
        self._clip = _load_clip(folder / "tokenizer")
        self._t5 = Tokenizer.from_folder(folder / "tokenizer_2")
        self._clip_length, self._t5_length = clip_length, t5_length

    def encode(self, prompt: str) -> PromptTokens:
        """Return the tokens of a prompt. Raises InputError if it is longer than the limit."""
        if len(prompt) > MAX_PROMPT_CHARS:
            raise InputError(f"prompt too long: {len(prompt)} characters, limit {MAX_PROMPT_CHARS}")
        clip = _cut(self._clip.encode(prompt), self._clip_length)
        t5 = _cut(self._t5.encode(prompt), self._t5_length)
        padded = np.full(self._t5_length, self._t5.pad_token_id or 0, np.int32)
        padded[: len(t5)] = t5
        return PromptTokens(clip, padded)


def _cut(ids: Int32, limit: int) -> Int32:
    """Keep at most ``limit`` tokens, the last of them the end token."""
    return ids if len(ids) <= limit else np.append(ids[: limit - 1], ids[-1])


def _load_clip(folder: Path) -> Tokenizer:
    """Load ``tokenizer.json``, or ``vocab.json`` and ``merges.txt``, as older models have them."""
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_folder(folder)
    content = _clip_tokenizer(folder)
    return Tokenizer.from_files({"tokenizer.json": content}, trusted=True, origin=str(folder))


def _clip_tokenizer(folder: Path) -> bytes:
    """Return a ``tokenizer.json`` made from CLIP's vocabulary and merges."""
    vocabulary = read_json(folder / "vocab.json")
    try:
        lines = (folder / "merges.txt").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / 'merges.txt'}: cannot be read: {error}") from error
    merges = [line for line in lines if line and not line.startswith("#version")]
    ends = {name: vocabulary.get(name) for name in (_CLIP_START, _CLIP_END)}
    if not all(isinstance(value, int) for value in ends.values()):
        raise CheckpointError(f"{folder / 'vocab.json'}: {_CLIP_START} or {_CLIP_END} is missing")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": name, "special": True, **flags} for name, index in ends.items()
    ]
    spaces = {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}
    split = {"Regex": _CLIP_SPLIT}
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "NFC"}, spaces, {"type": "Lowercase"}],
        },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": split, "behavior": "Removed", "invert": True},
                {"type": "ByteLevel", **byte_level},
            ],
        },
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": [_CLIP_END, ends[_CLIP_END]],
            "cls": [_CLIP_START, ends[_CLIP_START]],
            "trim_offsets": False,
            "add_prefix_space": False,
        },
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": _CLIP_END,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "</w>",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return json.dumps(whole).encode()
