"""Requests with images: make their map, check it without reading pixels, drop the pixels.

In the map, an image is its resized pixels (uint8 ``[height, width, 3]``), the range of its
placeholder tokens and a 64-bit hash of its content. ``extra_model_args`` has ``image_grid_thw``
(int32 ``[images, 3]``: 1, rows and columns in patches), and after prefill ``rope_delta`` (int32
``[1]``), the rope position of a generated token minus its position in the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from .contexts.images import image_hash, image_key
from .contexts.rope_positions import DELTA, GRIDS
from .errors import InputError
from .hashing import ImageSpan
from .limits import MAX_PIXEL_BYTES, MAX_REQUEST_IMAGES
from .wire.wire_context import WireContext, WireImage, WireVisionContext

Int32 = npt.NDArray[np.int32]

_NO_PIXELS = np.zeros((0, 0, 3), np.uint8)
_UINT8, _INT32 = np.dtype(np.uint8), np.dtype(np.int32)


def with_images(
    wire: WireContext, images: Sequence[WireImage], grids: Int32, placeholder: int
) -> WireVisionContext:
    """Return a request for text with images in it.

    ``grids``: int32 ``[images, 3]``. ``placeholder``: the id of an image's tokens. Raises
    InputError as :func:`check_images`.
    """
    fields = {name: getattr(wire, name) for name in WireContext.__struct_fields__}
    made = WireVisionContext(
        **fields,
        vision_token_ids=[placeholder],
        images=list(images),
        extra_model_args={GRIDS: grids},
    )
    check_images(made)
    return made


def complete_images(wire: WireContext) -> WireContext:
    """Return a user's own context with the hashes of its images, and with grids of int32."""
    if not isinstance(wire, WireVisionContext):
        return wire
    named = {
        name: array.astype(np.int32) if name == GRIDS and array.dtype.kind in "iu" else array
        for name, array in wire.extra_model_args.items()
    }
    images = [
        msgspec.structs.replace(one, image_hash=image_hash(one.pixel_values)) for one in wire.images
    ]
    return msgspec.structs.replace(wire, images=images, extra_model_args=named)


def check_images(wire: WireVisionContext, *, committed: bool = False) -> None:
    """Raise InputError unless images, grids and placeholder tokens agree.

    Reads shapes, the grids and the placeholder tokens, but no pixel. ``committed``: the images were
    computed, so their pixels are gone and ``rope_delta`` is there.
    """
    images, named = wire.images, wire.extra_model_args
    if len(images) > MAX_REQUEST_IMAGES:
        raise InputError(f"{len(images)} images, at most {MAX_REQUEST_IMAGES} are allowed")
    if wire.pixel_values or (wire._pixels_encoded and not committed):
        raise InputError("pixel_values without a range of tokens are not served; use images")
    if len(wire.vision_token_ids) != 1:
        raise InputError(f"{len(wire.vision_token_ids)} vision_token_ids; exactly one is needed")
    wanted = {GRIDS, DELTA} if committed else {GRIDS}
    if named.keys() != wanted:
        raise InputError(f"extra_model_args must be {', '.join(sorted(wanted))}")
    grids = named[GRIDS]
    if grids.dtype != _INT32 or grids.shape != (len(images), 3):
        _refuse_array(GRIDS, grids, f"int32 [{len(images)}, 3]")
    if committed:
        delta = named[DELTA]
        if delta.dtype != _INT32 or delta.shape != (1,):
            _refuse_array(DELTA, delta, "int32 [1]")
    _check_bytes(images)
    position = 0
    for number, (image, grid) in enumerate(zip(images, grids.tolist(), strict=True)):
        place = f"images[{number}]"
        _check_range(image, wire, position, place)
        _check_grid(image, grid, place)
        if not (committed and not image.pixel_values.size):
            _check_pixels(image, grid, place)
        position = image.end_idx + 1  # at least one token is between two images


def _check_bytes(images: Sequence[WireImage]) -> None:
    total = sum(image.pixel_values.nbytes for image in images)
    if total > MAX_PIXEL_BYTES:
        raise InputError(f"the images have {total} bytes of pixels, limit {MAX_PIXEL_BYTES}")


def _check_range(image: WireImage, wire: WireVisionContext, least: int, place: str) -> None:
    tokens = wire.tokens.array
    start, end = image.start_idx, image.end_idx
    if not least <= start < end <= len(tokens):
        raise InputError(
            f"{place} has the tokens {start} to {end}; expected a range from {least} on, "
            f"within {len(tokens)} tokens"
        )
    if (tokens[start:end] != wire.vision_token_ids[0]).any():
        raise InputError(f"a token of {place} is not {wire.vision_token_ids[0]}")


def _check_grid(image: WireImage, grid: list[int], place: str) -> None:
    time, rows, columns = grid
    count = image.end_idx - image.start_idx
    if time != 1 or rows < 1 or columns < 1 or rows * columns % count:
        raise InputError(f"{place} has a grid of {grid} and {count} tokens, which do not agree")
    merge = round((rows * columns // count) ** 0.5)
    if merge * merge * count != rows * columns or rows % merge or columns % merge:
        raise InputError(f"{place} has a grid of {grid} and {count} tokens, which do not agree")
    if image.image_hash is None or not 0 <= image.image_hash < 1 << 64:
        raise InputError(f"{place} has no image_hash of 64 bits")


def _check_pixels(image: WireImage, grid: list[int], place: str) -> None:
    pixels = image.pixel_values
    if pixels.dtype != _UINT8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        _refuse_array(f"{place}.pixel_values", pixels, "uint8 [height, width, 3]")
    _, rows, columns = grid
    height, width = pixels.shape[:2]
    if height % rows or width % columns or height // rows != width // columns:
        raise InputError(f"{place} has {height} x {width} pixels, but a grid of {grid}")


def _refuse_array(name: str, array: npt.NDArray[np.generic], expected: str) -> NoReturn:
    raise InputError(f"{name} must be {expected}, not {array.dtype} of shape {array.shape}")


def spans_of(wire: WireContext) -> list[ImageSpan]:
    """Return the images of a request for block hashes, without reading pixels."""
    if not isinstance(wire, WireVisionContext):
        return []
    return [
        (image.start_idx, image.end_idx, image_key(image.pixel_values, image.image_hash))
        for image in wire.images
    ]


def check_hashes(wire: WireContext) -> None:
    """Raise InputError if an image's hash is not that of its pixels; about 1 GB/s.

    A worker that keys caches by hashes must check them: a wrong hash would give other requests the
    features of these pixels.
    """
    if isinstance(wire, WireVisionContext):
        for number, image in enumerate(wire.images):
            if image_hash(image.pixel_values) != image.image_hash:
                raise InputError(f"images[{number}].image_hash is not the hash of its pixels")


def committed(wire: WireContext, delta: int) -> WireContext:
    """Return the map as a decode worker gets it: with the rope delta, and without pixels."""
    if not isinstance(wire, WireVisionContext):
        return wire
    images = [msgspec.structs.replace(one, pixel_values=_NO_PIXELS) for one in wire.images]
    named = {**wire.extra_model_args, DELTA: np.array([delta], np.int32)}
    return msgspec.structs.replace(wire, images=images, extra_model_args=named)
