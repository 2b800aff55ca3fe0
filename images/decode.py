"""Decodes and resizes one image with Pillow. Encoded images are decoded in the helper process only.

Invariant: the size in the file's header is checked before any pixel is decoded.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from baton.proto.errors import ConfigError, InputError

if TYPE_CHECKING:
    from .settings import Settings

MAX_IMAGE_PIXELS = 40_000_000
"""Width times height of a decoded image."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

_SHALLOW = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB")
"""Modes with 8 bits or less per channel. Pillow clips deeper ones, as of 16-bit grey, to white."""
_SEVERAL_PICTURES = "MPO"
"""A JPEG file with previews after the picture, as telephones write; the first picture counts."""


def pillow() -> Any:
    """Return the module ``PIL.Image``; raises ConfigError without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("images need Pillow: pip install 'baton-serve[images]'") from None
    return Image


def open_image(content: bytes) -> Any:
    """Return the image of an encoded file, not decoded yet. Raises InputError."""
    module = pillow()
    module.MAX_IMAGE_PIXELS = None  # our own limit, which raises instead of warning
    try:
        image = module.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # the parsers of many formats raise whatever comes to their minds
        if isinstance(error, module.DecompressionBombError):
            raise InputError("the image has too many pixels") from None
        known = ", ".join(FORMATS)
        raise InputError(f"the image cannot be read; formats are {known}") from None
    check_size(image.width, image.height)
    return image


def check_size(width: int, height: int) -> None:
    """Raise InputError for an image with too many pixels."""
    if width * height > MAX_IMAGE_PIXELS:
        raise InputError(
            f"the image has {width} x {height} pixels, at most {MAX_IMAGE_PIXELS} are decoded"
        )


def resized_pixels(
    image: Any, settings: Settings, max_side: int = 0
) -> tuple[int, int, tuple[int, int, int], bytes]:
    """Return height, width, grid and RGB bytes of a Pillow image, resized for the model.

    ``max_side``: the image is first scaled down, so that no side has more pixels; 0: it is not.
    Orientation in the file's metadata is applied, and transparency is shown on white. Raises
    InputError for a damaged image, an animation, and more than 8 bits per channel.
    """
    module = pillow()
    from PIL import ImageOps

    check_size(image.width, image.height)
    _refuse_animation(image)
    if image.mode not in _SHALLOW:
        text = f"the image has more than 8 bits per channel (mode {image.mode})"
        raise InputError(f"{text}; convert it to 8 bits")
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        image = _as_rgb(image, module)
        if max_side and max(image.size) > max_side:
            scale = max_side / max(image.size)
            size = [max(1, round(side * scale)) for side in image.size]
            image = image.resize(size, resample=settings.resample)
        height, width, grid = settings.fit(image.height, image.width)
        image = image.resize((width, height), resample=settings.resample)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # as above
        raise InputError(
            f"the image is damaged: {str(error)[:100] or type(error).__name__}"
        ) from None
    return height, width, grid, image.tobytes()


def _refuse_animation(image: Any) -> None:
    try:
        moves = image.format != _SEVERAL_PICTURES and getattr(image, "is_animated", False)
    except Exception as error:
        raise _damaged(error) from None
    if moves:
        raise InputError("the image is animated: send one frame")


def _as_rgb(image: Any, module: Any) -> Any:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = module.new("RGBA", image.size, (255, 255, 255, 255))
    return module.alpha_composite(white, image).convert("RGB")


def _damaged(error: Exception) -> InputError:
    return InputError(f"the image is damaged: {str(error)[:100] or type(error).__name__}")
