"""Checks of picture requests that clients, routers and workers share.

They read no model: what depends on a model (vocabulary, prompt length) its encoders check.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .contexts.pixels import PixelContext
from .errors import InputError
from .limits import (
    MAX_GUIDANCE,
    MAX_PICTURE_PIXELS,
    MAX_PICTURE_PROMPT_TOKENS,
    MAX_PICTURE_SIDE,
    MAX_PICTURE_STEPS,
)
from .wire.wire_context import WirePixelContext, WireTokens

PICTURE_MULTIPLE = 16
"""Width and height are multiples of so many pixels."""


def check_picture(request: PixelContext | WirePixelContext) -> None:
    """Raise InputError for the first fault of a picture request."""
    _check_size(request.height, request.width)
    steps = request.num_inference_steps
    _check_whole("num_inference_steps", steps, 1, MAX_PICTURE_STEPS)
    _check_scale("guidance_scale", request.guidance_scale)
    _check_scale("true_cfg_scale", request.true_cfg_scale)
    if request.num_images_per_prompt != 1:
        raise InputError(
            f"num_images_per_prompt is {request.num_images_per_prompt}, limit 1; "
            "send one request per picture, each with its own seed"
        )
    _check_prompts(request)
    _check_arrays(request)
    picture_seed(request)


def picture_seed(request: PixelContext | WirePixelContext) -> int | None:
    """Return the seed of a request modulo 2**64, None if unset.

    The seed is ``extra_params["seed"]``, an integer array of one element.

    Raises InputError for another array.
    """
    seed = request.extra_params.get("seed")
    if seed is None:
        return None
    if seed.size != 1 or seed.dtype.kind not in "iu":
        raise InputError(
            f"seed must be an integer array of one element, not {seed.dtype} of shape {seed.shape}"
        )
    return int(seed.reshape(-1)[0]) % (1 << 64)


def _check_size(height: int, width: int) -> None:
    for name, side in (("height", height), ("width", width)):
        _check_whole(name, side, PICTURE_MULTIPLE, MAX_PICTURE_SIDE)
        if side % PICTURE_MULTIPLE:
            raise InputError(f"{name} must be a multiple of {PICTURE_MULTIPLE}, not {side}")
    if height * width > MAX_PICTURE_PIXELS:
        raise InputError(
            f"picture too large: {height} x {width} are {height * width} pixels, "
            f"limit {MAX_PICTURE_PIXELS}"
        )


def _check_whole(name: str, value: object, least: int, most: int) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not least <= int(value) <= most:  # type: ignore[call-overload]
        raise InputError(f"{name} must be a whole number in {least}..{most}, not {value!r:.40}")


def _check_scale(name: str, value: object) -> None:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 <= value <= MAX_GUIDANCE:  # type: ignore[arg-type,operator]
        raise InputError(f"{name} must be a number in 0..{MAX_GUIDANCE}, not {value!r:.40}")


def _check_prompts(request: PixelContext | WirePixelContext) -> None:
    for name in ("tokens", "tokens_2", "negative_tokens", "negative_tokens_2"):
        buffer = getattr(request, name)
        if buffer is None:
            continue
        ids: npt.NDArray[Any] = buffer.array if isinstance(buffer, WireTokens) else buffer.all
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise InputError(f"{name} must be one-dimensional integers, at least one")
        if len(ids) > MAX_PICTURE_PROMPT_TOKENS:
            raise InputError(f"{name}: {len(ids)} tokens, limit {MAX_PICTURE_PROMPT_TOKENS}")


def _check_arrays(request: PixelContext | WirePixelContext) -> None:
    for name in ("sigmas", "timesteps"):
        array = getattr(request, name)
        if array is not None and array.size:
            raise InputError(f"{name} are computed by the model; leave them empty")
    guidance = request.guidance
    if guidance is not None:
        if guidance.size != 1 or guidance.dtype.kind not in "iuf":
            raise InputError("guidance must be an array of one number")
        _check_scale("guidance", float(guidance.reshape(-1)[0]))
    latents = request.latents
    if latents is not None and latents.size:
        pixels = request.height * request.width
        if latents.dtype.kind != "f" or latents.ndim != 2 or latents.size > pixels:
            raise InputError("latents must be floats [tokens, channels]")
        if not np.isfinite(latents).all():
            raise InputError("latents contain numbers that are not finite")
