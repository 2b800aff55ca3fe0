"""Prompts of a picture model: its tokenizers, and the settings that its folder implies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..proto.errors import CheckpointError
from ..proto.picture_requests import Z_IMAGE
from .flux_prompts import FluxTokenizer, flux_defaults
from .model_files import PICTURE_FILES, json_object
from .prompt_tokens import PictureDefaults, PromptTokenizer
from .zimage_prompts import ZImageTokenizer, zimage_defaults


@dataclass(slots=True, frozen=True)
class PicturePrompts:
    """The tokenizers of a picture model, and the defaults of its requests."""

    defaults: PictureDefaults
    tokenizer: PromptTokenizer

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
        return cls(found, tokenizer(files, lengths, trusted=trusted, origin=origin))


def read_picture_files(folder: str | Path) -> dict[str, bytes]:
    """Return the existing ``PICTURE_FILES`` of a folder. Raises CheckpointError."""
    files: dict[str, bytes] = {}
    for name in PICTURE_FILES:
        try:
            files[name] = (Path(folder) / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{Path(folder) / name}: {error.strerror}") from None
    return files
