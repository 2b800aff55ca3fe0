"""Requests with images: make their map, check it without reading pixels, drop the pixels.

In the map, an image is its resized pixels (uint8 ``[height, width, 3]``), the range of its
placeholder tokens and a 64-bit hash of its content. ``extra_model_args`` has ``image_grid_thw``
(int32 ``[images, 3]``: 1, rows and columns in patches), and after prefill ``rope_delta`` (int32
``[1]``), the rope position of a generated token minus its position in the sequence.

A model that reads images in cross-attention layers has ``aspect_ratio_ids`` and
``aspect_ratio_mask`` instead of grids, and the images' tokens before the text; see
:mod:`.contexts.tiled_images`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from .contexts.images import image_hash, image_key
from .contexts.rope_positions import DELTA, GRIDS
from .contexts.tiled_images import IDS, MASK, block_count, canvases_of, check_row
from .errors import InputError
from .hashing import ImageSpan
from .layout import ModelCard
from .limits import MAX_PIXEL_BYTES, MAX_REQUEST_IMAGES
from .wire.wire_context import WireContext, WireImage, WireVisionContext

Int32 = npt.NDArray[np.int32]

_NO_PIXELS = np.zeros((0, 0, 3), np.uint8)
_UINT8, _INT32 = np.dtype(np.uint8), np.dtype(np.int32)


def with_images(
    wire: WireContext, images: Sequence[WireImage], named: Mapping[str, Int32], placeholder: int
) -> WireVisionContext:
    """Return a request for text with images in it.

    ``named``: int32 arrays for ``extra_model_args``. ``placeholder``: the id of an image's tokens.
    Raises InputError as :func:`check_images`.
    """
    fields = {name: getattr(wire, name) for name in WireContext.__struct_fields__}
    made = WireVisionContext(
        **fields,
        vision_token_ids=[placeholder],
        images=list(images),
        extra_model_args=dict(named),
    )
    check_images(made)
    return made


def complete_images(wire: WireContext) -> WireContext:
    """Return a user's own context with the hashes of its images, and with arrays of int32."""
    if not isinstance(wire, WireVisionContext):
        return wire
    shapes = (GRIDS, IDS, MASK)
    named = {
        name: array.astype(np.int32) if name in shapes and array.dtype.kind in "iu" else array
        for name, array in wire.extra_model_args.items()
    }
    images = [
        msgspec.structs.replace(one, image_hash=image_hash(one.pixel_values)) for one in wire.images
    ]
    return msgspec.structs.replace(wire, images=images, extra_model_args=named)


def check_images(
    wire: WireVisionContext, *, committed: bool = False, card: ModelCard | None = None
) -> None:
    """Raise InputError unless images, their shapes and placeholder tokens agree.

    Reads shapes, the arrays of shapes and the placeholder tokens, but no pixel. ``committed``: the
    images were computed, so their pixels are gone and ``rope_delta`` is there. ``card``: of the
    model, if it is known, which decides where the images are.
    """
    images, named = wire.images, wire.extra_model_args
    tiled = IDS in named
    if len(images) > MAX_REQUEST_IMAGES:
        raise InputError(f"{len(images)} images, at most {MAX_REQUEST_IMAGES} are allowed")
    if wire.pixel_values or (wire._pixels_encoded and not committed):
        raise InputError("pixel_values without a range of tokens are not served; use images")
    if len(wire.vision_token_ids) != 1:
        raise InputError(f"{len(wire.vision_token_ids)} vision_token_ids; exactly one is needed")
    if card is not None and images and tiled != bool(card.image_positions):
        raise InputError(f"images of {card.name!r} need {GRIDS if tiled else IDS}")
    wanted = ({IDS, MASK} if tiled else {GRIDS}) | ({DELTA} if committed else set())
    if named.keys() != wanted:
        raise InputError(f"extra_model_args must be {', '.join(sorted(wanted))}")
    if committed:
        delta = named[DELTA]
        if delta.dtype != _INT32 or delta.shape != (1,):
            _refuse_array(DELTA, delta, "int32 [1]")
    _check_bytes(images)
    if tiled:
        _check_tiled(wire, committed=committed, card=card)
    else:
        _check_grids(wire, committed=committed)


def _check_grids(wire: WireVisionContext, *, committed: bool) -> None:
    """Check images in the place of their tokens."""
    images, grids = wire.images, wire.extra_model_args[GRIDS]
    if grids.dtype != _INT32 or grids.shape != (len(images), 3):
        _refuse_array(GRIDS, grids, f"int32 [{len(images)}, 3]")
    position = 0
    for number, (image, grid) in enumerate(zip(images, grids.tolist(), strict=True)):
        place = f"images[{number}]"
        _check_range(image, wire, position, place)
        _check_grid(image, grid, place)
        if not (committed and not image.pixel_values.size):
            _check_pixels(image, grid, place)
        position = image.end_idx + 1  # at least one token is between two images


def _check_tiled(wire: WireVisionContext, *, committed: bool, card: ModelCard | None) -> None:
    """Check images of tiles, which are before the text."""
    images, named = wire.images, wire.extra_model_args
    if not images:
        raise InputError(f"{IDS} without images")
    for name in (IDS, MASK):
        if named[name].dtype != _INT32:
            _refuse_array(name, named[name], "int32")
    canvases_of(named[IDS], named[MASK], len(images))
    position = 1
    for number, image in enumerate(images):
        place = f"images[{number}]"
        _check_range(image, wire, position, place)
        _check_hash(image, place)
        if not (committed and not image.pixel_values.size):
            _check_rgb(image, place)
        position = image.end_idx + 1
    spans = [(image.start_idx, image.end_idx) for image in images]
    prompt = wire.tokens.array[: wire.prompt_length]
    check_row(prompt, spans, named[IDS][0].tolist(), wire.vision_token_ids[0])
    if card is not None:
        tiles = named[MASK].shape[-1]
        if card.image_tiles not in (0, tiles):
            # With other tiles an id is another canvas, but the keys of blocks would be the same.
            raise InputError(f"{MASK} has {tiles} tiles, the model {card.image_tiles}")
        size = card.layout.block_size
        length = block_count(card.image_positions, size) * size
        if spans[0][1] != length:
            raise InputError(f"images[0] has {spans[0][1] - 1} tokens, not {length - 1}")


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
    _check_hash(image, place)


def _check_hash(image: WireImage, place: str) -> None:
    if image.image_hash is None or not 0 <= image.image_hash < 1 << 64:
        raise InputError(f"{place} has no image_hash of 64 bits")


def _check_rgb(image: WireImage, place: str) -> None:
    pixels = image.pixel_values
    if pixels.dtype != _UINT8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        _refuse_array(f"{place}.pixel_values", pixels, "uint8 [height, width, 3]")


def _check_pixels(image: WireImage, grid: list[int], place: str) -> None:
    _check_rgb(image, place)
    pixels = image.pixel_values
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
