"""Prompts of Flux: ``tokenizer`` for CLIP, ``tokenizer_2`` for T5."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from baton.proto.errors import CheckpointError
from baton.proto.limits import MAX_PICTURE_PROMPT_TOKENS

from .model_files import files_below, json_object
from .plain_tokenizers import CLIP, SPACES
from .prompt_tokens import Int32, PictureDefaults, PromptTokens, check_prompt_length
from .tokenizer import TOKENIZER_FILES, Tokenizer

GUIDED_STEPS, FAST_STEPS = 28, 4
"""Steps of a model with guidance (Flux dev) and of one without (Flux schnell)."""
GUIDED_PROMPT_TOKENS, FAST_PROMPT_TOKENS = 512, 256
"""Tokens of T5 that these models were trained with, as diffusers uses them."""
GUIDANCE = 3.5
TRUE_CFG = 4.0

_CLIP_START, _CLIP_END = "<|startoftext|>", "<|endoftext|>"


def flux_defaults(files: Mapping[str, bytes], origin: str) -> PictureDefaults:
    """Read the configs of transformer and CLIP. Raises CheckpointError for a wrong one."""
    guided = json_object(files, "transformer/config.json", origin).get("guidance_embeds", False)
    clip = json_object(files, "text_encoder/config.json", origin)
    length = clip.get("max_position_embeddings", 77)
    if not isinstance(guided, bool):
        raise CheckpointError(f"{origin}: transformer/config.json: guidance_embeds is no bool")
    if type(length) is not int or not 2 <= length <= MAX_PICTURE_PROMPT_TOKENS:
        raise CheckpointError(
            f"{origin}: text_encoder/config.json: max_position_embeddings must be in "
            f"2..{MAX_PICTURE_PROMPT_TOKENS}"
        )
    return PictureDefaults(
        takes_guidance=guided,
        steps=GUIDED_STEPS if guided else FAST_STEPS,
        guidance=GUIDANCE if guided else 0.0,
        true_cfg=TRUE_CFG,
        lengths=(length, GUIDED_PROMPT_TOKENS if guided else FAST_PROMPT_TOKENS),
    )


class FluxTokenizer:
    """The tokenizers in the folders ``tokenizer`` and ``tokenizer_2``.

    ``files``: contents of ``PICTURE_FILES`` by name. ``lengths``: most tokens for CLIP, and tokens
    for T5; shorter prompts are padded for T5 with the padding token, longer ones are cut. The last
    token is always the end token. ``trusted``: tokenize in this process, as of
    :meth:`Tokenizer.from_files`. Raises CheckpointError if a file is missing or malformed.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        lengths: tuple[int, ...] = (77, 512),
        *,
        trusted: bool = False,
        origin: str = "the model",
    ) -> None:
        first = files_below(files, "tokenizer/")
        self._clip = _load_clip(first, f"{origin}/tokenizer", trusted=trusted)
        second = files_below(files, "tokenizer_2/")
        self._t5 = Tokenizer.from_files(second, trusted=trusted, origin=f"{origin}/tokenizer_2")
        self._clip_length, self._t5_length = lengths

    def encode(self, prompt: str) -> PromptTokens:
        """Return the tokens of a prompt. Raises InputError if it is longer than the limit."""
        check_prompt_length(prompt)
        clip = _cut(self._clip.encode(prompt), self._clip_length)
        t5 = _cut(self._t5.encode(prompt), self._t5_length)
        padded = np.full(self._t5_length, self._t5.pad_token_id or 0, np.int32)
        padded[: len(t5)] = t5
        return PromptTokens(clip, padded, len(t5))

    def close(self) -> None:
        """End the processes of tokenizers that are not plain, if any."""
        self._clip.close()
        self._t5.close()


def _cut(ids: Int32, limit: int) -> Int32:
    """Keep at most ``limit`` tokens, the last of them the end token."""
    return ids if len(ids) <= limit else np.append(ids[: limit - 1], ids[-1])


def _load_clip(files: Mapping[str, bytes], origin: str, *, trusted: bool) -> Tokenizer:
    """Load ``tokenizer.json``, or ``vocab.json`` and ``merges.txt``, as older models have them."""
    if "tokenizer.json" in files:
        return Tokenizer.from_files(files, trusted=trusted, origin=origin)
    made = {name: files[name] for name in TOKENIZER_FILES if name in files}
    made["tokenizer.json"] = _clip_tokenizer(files, origin)
    # Vocabulary and merges alone come from the files, so the tokenizer is a plain one.
    return Tokenizer.from_files(made, trusted=trusted, origin=origin)


def _clip_tokenizer(files: Mapping[str, bytes], origin: str) -> bytes:
    """Return a ``tokenizer.json`` made from CLIP's vocabulary and merges."""
    vocabulary = json_object(files, "vocab.json", origin)
    if "merges.txt" not in files or not vocabulary:
        raise CheckpointError(f"{origin} has neither tokenizer.json nor vocab.json and merges.txt")
    try:
        lines = files["merges.txt"].decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{origin}: merges.txt cannot be read: {error}") from error
    merges = [line for line in lines if line and not line.startswith("#version")]
    ends = {name: vocabulary.get(name) for name in (_CLIP_START, _CLIP_END)}
    if not all(isinstance(value, int) for value in ends.values()):
        raise CheckpointError(f"{origin}: vocab.json: {_CLIP_START} or {_CLIP_END} is missing")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": name, "special": True, **flags} for name, index in ends.items()
    ]
    spaces = {"type": "Replace", "pattern": {"Regex": SPACES}, "content": " "}
    split = {"Regex": CLIP}
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole: dict[str, Any] = {
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
