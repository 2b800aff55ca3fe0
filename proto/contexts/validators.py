"""Checks of requests that a model can require; each raises InputError or returns None.

Only the first check refuses requests of other kinds; for the other checks they have no images.
Images with a token range and ``pixel_values`` without a range count equally.
"""

from __future__ import annotations

from ..errors import InputError
from .text import TextContext
from .vision import Pixels, TextAndVisionContext


def validate_requires_vision_context(context: TextContext) -> None:
    """Require a request of a kind that can have images."""
    if not isinstance(context, TextAndVisionContext):
        raise InputError(f"this model needs a TextAndVisionContext, not a {type(context).__name__}")


def validate_only_one_image(context: TextContext) -> None:
    """Require at most one image."""
    count = len(_pixels(context))
    if count > 1:
        raise InputError(f"this model takes only one image, not {count}")


def validate_initial_prompt_has_image(context: TextContext) -> None:
    """Require an image in the first step."""
    vision = isinstance(context, TextAndVisionContext)
    if vision and context.is_initial_prompt and not _pixels(context):
        raise InputError("this model needs an image in the prompt")


def validate_aspect_ratio_args(context: TextContext) -> None:
    """Require ids and mask of aspect ratios for images."""
    if isinstance(context, TextAndVisionContext) and _pixels(context):
        for name in ("aspect_ratio_ids", "aspect_ratio_mask"):
            _need(context, name)


def validate_image_shape_5d(context: TextContext) -> None:
    """Require five dimensions for every image's pixels."""
    for pixels in _pixels(context):
        if pixels.ndim != 5:
            raise InputError(f"image pixels must have 5 dimensions, not shape {pixels.shape}")


def validate_image_grid_thw_args(context: TextContext) -> None:
    """Require grids (time, height, width) for images that wait for the encoder."""
    if isinstance(context, TextAndVisionContext) and context.needs_vision_encoding:
        _need(context, "image_grid_thw")


def validate_vision_position_ids(context: TextContext) -> None:
    """Require positions of patches for images that wait for the encoder."""
    if isinstance(context, TextAndVisionContext) and context.needs_vision_encoding:
        _need(context, "vision_position_ids")


def validate_text_only(context: TextContext) -> None:
    """Require a request without images, because a model without vision encoder ignores them."""
    if has_images(context):
        count = len(_pixels(context))
        raise InputError(f"this model takes no images, and the request has {count}")


def has_images(context: TextContext) -> bool:
    """Whether the request has an image, with or without a token range."""
    return isinstance(context, TextAndVisionContext) and bool(_pixels(context))


def _pixels(context: TextContext) -> list[Pixels]:
    """The pixels of every image, with or without a token range."""
    if not isinstance(context, TextAndVisionContext):
        return []
    return [image.pixel_values for image in context.images] + list(context.pixel_values)


def _need(context: TextAndVisionContext, name: str) -> None:
    if name not in context.extra_model_args:
        raise InputError(f"{name} is missing in extra_model_args")
