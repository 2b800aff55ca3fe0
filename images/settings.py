"""The size that a model's images are resized to, from its ``preprocessor_config.json``.

:class:`ImageSettings` is the rule of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: both sides become multiples
of a merged patch, the area stays between two bounds, and the aspect ratio is kept as far as that
allows. :class:`.TileSettings` is the rule of mllama.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.proto.errors import CheckpointError, InputError
from baton.proto.limits import MAX_IMAGE_PIXEL_BYTES

from .tiles import TILE_PROCESSORS, TileSettings

SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings, the first of which counts; the second has them under a key."""

MAX_ASPECT_RATIO = 200
"""Longest side by shortest side; narrower images are refused, as by transformers."""
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_MOST_PIXELS = 1 << 28
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
_BICUBIC = 3


@dataclass(slots=True, frozen=True)
class ImageSettings:
    """How a model's images are resized.

    ``min_pixels``, ``max_pixels``: bounds of the area. ``patch_size``: pixels of a patch's side.
    ``merge_size``: patches of a token's side. ``resample``: Pillow's number of the filter.
    """

    min_pixels: int = _MIN_PIXELS
    max_pixels: int = _MAX_PIXELS
    patch_size: int = 14
    merge_size: int = 2
    resample: int = _BICUBIC

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], origin: str = "the model") -> ImageSettings:
        """Read the settings of a model folder's files.

        ``max_pixels`` is lowered to the largest image that a message can have. Raises
        CheckpointError if the files have none, or settings of another processor.
        """
        name, found = _settings(files, origin)
        where = f"{origin}: {name}"
        kind = found.get("image_processor_type", _PROCESSORS[0])
        if kind not in _PROCESSORS or found.get("do_resize") is False:
            raise CheckpointError(f"{where}: image processor {kind!r} is not supported")
        size = found.get("size")
        size = size if isinstance(size, dict) else {}
        bounds = {
            "min_pixels": _first(found, "min_pixels", size, "shortest_edge", _MIN_PIXELS),
            "max_pixels": _first(found, "max_pixels", size, "longest_edge", _MAX_PIXELS),
        }
        others = {"patch_size": (14, 256), "merge_size": (2, 16), "resample": (_BICUBIC, 5)}
        limits = dict.fromkeys(bounds, _MOST_PIXELS) | {n: most for n, (_, most) in others.items()}
        values: dict[str, Any] = {n: found.get(n, default) for n, (default, _) in others.items()}
        values |= bounds
        for field, value in values.items():
            least = 0 if field == "resample" else 1
            if type(value) is not int or not least <= value <= limits[field]:
                raise CheckpointError(
                    f"{where}: {field} is {str(value)[:40]}; {least} to {limits[field]} is valid"
                )
        values["max_pixels"] = min(values["max_pixels"], MAX_IMAGE_PIXEL_BYTES // 3)
        settings = cls(**values)
        if settings.min_pixels > settings.max_pixels:
            raise CheckpointError(f"{where}: min_pixels exceeds max_pixels")
        return settings

    @property
    def token_side(self) -> int:
        """Pixels of the side of the square that becomes one token."""
        return self.patch_size * self.merge_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width after resizing. Raises InputError for a too narrow image."""
        if height < 1 or width < 1:
            raise InputError(f"an image of {width} x {height} pixels is empty")
        long, short = max(height, width), min(height, width)
        if long / short > MAX_ASPECT_RATIO:
            raise InputError(
                f"an image of {width} x {height} pixels is too narrow: one side may be at most "
                f"{MAX_ASPECT_RATIO} times the other"
            )
        side, area = self.token_side, height * width
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.max_pixels:
            shrink = math.sqrt(area / self.max_pixels)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side * side < self.min_pixels:
            grow = math.sqrt(self.min_pixels / area)
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows * side, columns * side

    def fit(self, height: int, width: int) -> tuple[int, int, tuple[int, int, int]]:
        """Return height and width after resizing, and (1, rows, columns) in patches.

        Raises InputError for a too narrow image.
        """
        height, width = self.resized(height, width)
        return height, width, (1, height // self.patch_size, width // self.patch_size)

    def tokens(self, height: int, width: int) -> int:
        """Return the tokens of a resized image."""
        return height * width // self.token_side**2

    @property
    def most_pixels(self) -> int:
        """Bound of a resized image's area: a side of less than one token is rounded up."""
        return max(self.max_pixels, self.min_pixels) + 1024 * self.token_side**2


Settings = ImageSettings | TileSettings
"""How a model's images are resized."""


def read_settings(files: Mapping[str, bytes], origin: str = "the model") -> Settings:
    """Read the settings of a model folder's files, of the processor that they name.

    Raises CheckpointError if the files have none, or settings of an unknown processor.
    """
    name, found = _settings(files, origin)
    if found.get("image_processor_type") in TILE_PROCESSORS:
        return TileSettings.from_settings(found, f"{origin}: {name}")
    return ImageSettings.from_files(files, origin)


def _settings(files: Mapping[str, bytes], origin: str) -> tuple[str, dict[str, Any]]:
    for name in SETTINGS_FILES:
        if name not in files:
            continue
        try:
            value = json.loads(files[name])
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{origin}: {name} is not JSON: {error}") from None
        if isinstance(value, dict) and name == SETTINGS_FILES[1]:
            value = value.get("image_processor")
            if value is None:
                continue
        if not isinstance(value, dict):
            raise CheckpointError(f"{origin}: {name} must hold an object")
        return name, value
    raise CheckpointError(f"{origin} has no {SETTINGS_FILES[0]}, so images cannot be prepared")


def _first(
    found: dict[str, Any], name: str, size: dict[str, Any], edge: str, default: int
) -> object:
    """Return a bound of the area. A field of its name precedes both forms of ``size``."""
    given = (found.get(name), size.get(edge), size.get(name))
    return next((value for value in given if value is not None), default)
