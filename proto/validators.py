"""What a model may ask of a request before it runs; each raises InputError or returns.

Only the first refuses a request of another kind; to the others it has no images. Images with
a token range and ``pixel_values`` without one count alike.
"""

from __future__ import annotations

from .contexts import TextContext
from .errors import InputError
from .vision import Pixels, TextAndVisionContext


def validate_requires_vision_context(context: TextContext) -> None:
    """The request must be able to carry images."""
    if not isinstance(context, TextAndVisionContext):
        raise InputError(f"this model needs a TextAndVisionContext, not a {type(context).__name__}")


def validate_only_one_image(context: TextContext) -> None:
    """At most one image."""
    count = len(_pixels(context))
    if count > 1:
        raise InputError(f"this model takes only one image, not {count}")


def validate_initial_prompt_has_image(context: TextContext) -> None:
    """The first step must have an image."""
    vision = isinstance(context, TextAndVisionContext)
    if vision and context.is_initial_prompt and not _pixels(context):
        raise InputError("this model needs an image in the prompt")


def validate_aspect_ratio_args(context: TextContext) -> None:
    """Images come with the ids and the mask of their aspect ratios."""
    if isinstance(context, TextAndVisionContext) and _pixels(context):
        for name in ("aspect_ratio_ids", "aspect_ratio_mask"):
            _need(context, name)


def validate_image_shape_5d(context: TextContext) -> None:
    """Every image's pixels have five dimensions."""
    for pixels in _pixels(context):
        if pixels.ndim != 5:
            raise InputError(f"image pixels must have 5 dimensions, not shape {pixels.shape}")


def validate_image_grid_thw_args(context: TextContext) -> None:
    """Images that wait for the encoder come with their grids (time, height, width)."""
    if isinstance(context, TextAndVisionContext) and context.needs_vision_encoding:
        _need(context, "image_grid_thw")


def validate_vision_position_ids(context: TextContext) -> None:
    """Images that wait for the encoder come with the positions of their patches."""
    if isinstance(context, TextAndVisionContext) and context.needs_vision_encoding:
        _need(context, "vision_position_ids")


def validate_text_only(context: TextContext) -> None:
    """No images: a model without a vision encoder would answer as if they were not there."""
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
