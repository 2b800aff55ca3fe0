"""Prompts of a picture model: its tokenizers, and the settings that its folder implies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from baton.proto.limits import MAX_PICTURE_SIDE
from baton.proto.picture_requests import PICTURE_MULTIPLE, Z_IMAGE

from .flux_prompts import FluxTokenizer, flux_defaults
from .model_files import json_object
from .prompt_tokens import PictureDefaults, PromptTokenizer
from .zimage_prompts import ZImageTokenizer, zimage_defaults

DEFAULT_SIDE = 1024


@dataclass(slots=True, frozen=True)
class PicturePrompts:
    """The tokenizers of a picture model, and the defaults of its requests.

    ``side``: width and height of the pictures that the model was trained on, in pixels.
    """

    defaults: PictureDefaults
    tokenizer: PromptTokenizer
    side: int

    @classmethod
    def from_files(
        cls,
        files: Mapping[str, bytes],
        *,
        trusted: bool = False,
        origin: str = "the model",
        most: int = 0,
    ) -> PicturePrompts:
        """Read contents of ``PICTURE_FILES`` by name. Raises CheckpointError.

        ``most``: tokens of a prompt for the last text encoder; 0: those of the model.
        """
        kind = json_object(files, "model_index.json", origin).get("_class_name")
        defaults, tokenizer = (
            (zimage_defaults, ZImageTokenizer)
            if kind == Z_IMAGE
            else (flux_defaults, FluxTokenizer)
        )
        found = defaults(files, origin)
        lengths = (*found.lengths[:-1], most or found.lengths[-1])
        side = json_object(files, "vae/config.json", origin).get("sample_size")
        return cls(
            found,
            tokenizer(files, lengths, trusted=trusted, origin=origin),
            side if _is_side(side) else DEFAULT_SIDE,
        )


def _is_side(side: object) -> TypeGuard[int]:
    return isinstance(side, int) and 0 < side <= MAX_PICTURE_SIDE and side % PICTURE_MULTIPLE == 0
