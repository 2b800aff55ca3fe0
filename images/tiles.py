"""The size of images of tiles (mllama), from the model's ``preprocessor_config.json``.

An image lies at the top left of a canvas, a rectangle of square tiles. The canvas is the smallest
that the image fits into; an image that is too large for all gets the canvas on which it is scaled
down least. The pixels of the canvas beyond the image are black and are not part of the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.proto.contexts.tiled_images import MAX_TILES, aspect_ratios
from baton.proto.errors import CheckpointError, InputError
from baton.proto.limits import MAX_IMAGE_PIXEL_BYTES

TILE_PROCESSORS = ("MllamaImageProcessor", "MllamaImageProcessorFast", "MllamaImageProcessorPil")
_BILINEAR = 2
_MAX_SIDE = 1 << 12


@dataclass(slots=True, frozen=True)
class TileSettings:
    """How a model's images of tiles are resized.

    ``tile_size``: pixels of a tile's side. ``max_tiles``: of an image. ``resample``: Pillow's
    number of the filter.
    """

    tile_size: int = 224
    max_tiles: int = 4
    resample: int = _BILINEAR

    @classmethod
    def from_settings(cls, found: Mapping[str, Any], where: str) -> TileSettings:
        """Read the settings of an image processor. Raises CheckpointError; ``where`` names them."""
        for name in ("do_resize", "do_pad"):
            if found.get(name) is False:
                raise CheckpointError(f"{where}: {name} must not be false")
        size = found.get("size", {"height": 224, "width": 224})
        sides = [size.get(name) for name in ("height", "width")] if isinstance(size, dict) else []
        if len(sides) != 2 or sides[0] != sides[1]:
            raise CheckpointError(f"{where}: size must have equal height and width")
        fields = {
            "tile_size": (sides[0], 1, _MAX_SIDE),
            "max_tiles": (found.get("max_image_tiles", 4), 1, MAX_TILES),
            "resample": (found.get("resample", _BILINEAR), 0, 5),
        }
        for field, (value, least, most) in fields.items():
            if type(value) is not int or not least <= value <= most:
                raise CheckpointError(
                    f"{where}: {field} is {str(value)[:40]}; {least} to {most} is valid"
                )
        settings = cls(**{field: value for field, (value, _, _) in fields.items()})
        if 3 * settings.most_pixels > MAX_IMAGE_PIXEL_BYTES:
            raise CheckpointError(
                f"{where}: {settings.max_tiles} tiles of {settings.tile_size} pixels are more than "
                f"{MAX_IMAGE_PIXEL_BYTES} bytes"
            )
        return settings

    @property
    def most_pixels(self) -> int:
        """Bound of a resized image's area."""
        return self.max_tiles * self.tile_size**2

    def fit(self, height: int, width: int) -> tuple[int, int, tuple[int, int, int]]:
        """Return height and width after resizing, and (1, rows, columns) of the canvas in tiles.

        Raises InputError for an empty image.
        """
        if height < 1 or width < 1:
            raise InputError(f"an image of {width} x {height} pixels is empty")
        side = self.tile_size
        rows, columns = self._canvas(height, width)
        tall = min(max(height, side), rows * side)
        wide = min(max(width, side), columns * side)
        if wide / width < tall / height:
            tall = min(math.floor(height * (wide / width)) or 1, tall)
        else:
            wide = min(math.floor(width * (tall / height)) or 1, wide)
        return tall, wide, (1, rows, columns)

    def tokens(self, height: int, width: int) -> int:
        """Return 0: the positions of an image depend on the model, not on its size."""
        return 0

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the canvas in tiles."""
        side = self.tile_size
        scales = {
            ratio: min(ratio[0] * side / height, ratio[1] * side / width)
            for ratio in aspect_ratios(self.max_tiles)
        }
        fitting = [scale for scale in scales.values() if scale >= 1]
        best = min(fitting) if fitting else max(scales.values())
        equal = [ratio for ratio, scale in scales.items() if scale == best]
        return min(equal, key=lambda ratio: ratio[0] * ratio[1])
