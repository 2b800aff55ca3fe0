"""Images of cross-attention models (mllama): positions before the text, and which text sees them.

Such a model reads an image as keys and values of its cross-attention layers. They are kept in KV
blocks, so the prompt begins with positions that hold them:

    [a0 P P P .. P] [a1 P P P .. P]  text  IMAGE  text  IMAGE  text
     blocks of image 0, of image 1    the text, with one token per image

Every image has the same number of whole blocks. The first token of an image's blocks is its aspect
ratio id, so that block keys depend on it; placeholder tokens ``P`` follow, the image's range. The
text attends to its own positions only, and its rope positions begin at 0, so the rope delta is
minus the number of positions before the text.

The text from an image's token on sees the image, until the next image's token. Images whose tokens
follow each other directly are a group and are seen together. Client, router and workers use these
functions. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..errors import InputError

Int32 = npt.NDArray[np.int32]

IDS = "aspect_ratio_ids"
"""Name in ``extra_model_args``: int32 ``[1, images]``, aspect ratio of each image, from 1 on."""
MASK = "aspect_ratio_mask"
"""Name in ``extra_model_args``: int32 ``[1, images, tiles]``, 1 for the tiles that an image has."""
MAX_TILES = 64
"""Maximum tiles of an image."""


@lru_cache(maxsize=16)
def aspect_ratios(max_tiles: int) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) in tiles of the aspect ratio ids 1, 2, ... in this order."""
    return tuple(
        (rows, columns)
        for rows in range(1, max_tiles + 1)
        for columns in range(1, max_tiles // rows + 1)
    )


def block_count(positions: int, block_size: int) -> int:
    """Return the blocks of an image whose keys and values need ``positions``; at least 2 tokens."""
    return -(-max(positions, 2) // block_size)


def image_row(
    ratio_ids: Sequence[int], positions: int, block_size: int, placeholder: int
) -> tuple[Int32, list[tuple[int, int]]]:
    """Return the tokens before the text, int32 ``[n]``, and the range of each image in them."""
    length = block_count(positions, block_size) * block_size
    row = np.full(length * len(ratio_ids), placeholder, np.int32)
    row[::length] = ratio_ids
    starts = range(0, len(row), length)
    return row, [(start + 1, start + length) for start in starts]


def ratio_args(ratio_ids: Sequence[int], max_tiles: int) -> dict[str, Int32]:
    """Return the ``extra_model_args`` of images with these aspect ratios."""
    ratios = aspect_ratios(max_tiles)
    tiles = [ratios[one - 1][0] * ratios[one - 1][1] for one in ratio_ids]
    mask = np.arange(max_tiles) < np.array(tiles, np.int64)[:, None]
    return {IDS: np.array([ratio_ids], np.int32), MASK: mask.astype(np.int32)[None]}


def canvases_of(
    ids: npt.NDArray[np.generic], mask: npt.NDArray[np.generic], images: int
) -> list[tuple[int, int]]:
    """Return rows and columns in tiles of each of so many images.

    Raises InputError for contradictions.
    """
    whole = ids.dtype.kind in "iu" and mask.dtype.kind in "iu"
    if not whole or ids.shape != (1, images) or mask.shape[:-1] != (1, images):
        raise InputError(
            f"{IDS} and {MASK} must be integers [1, {images}] and [1, {images}, tiles], not "
            f"{ids.dtype} of {ids.shape} and {mask.dtype} of {mask.shape}"
        )
    tiles = mask.shape[-1]
    if not 1 <= tiles <= MAX_TILES:
        raise InputError(f"{MASK} has {tiles} tiles, limit {MAX_TILES}")
    ratios = aspect_ratios(tiles)
    found = []
    for number, one in enumerate(ids[0].tolist()):
        if not 1 <= one <= len(ratios):
            raise InputError(f"{IDS} has {one} for image {number}; 1 to {len(ratios)} is valid")
        found.append(ratios[one - 1])
        expected = [1] * (found[-1][0] * found[-1][1])
        if mask[0, number].tolist() != expected + [0] * (tiles - len(expected)):
            raise InputError(f"{MASK} of image {number} does not fit the aspect ratio id {one}")
    return found


@dataclass(slots=True, frozen=True)
class SeenImages:
    """The images of a prompt, and which rows of its text see which of them; never modified.

    ``end``: positions before the text. ``ranges``: positions of each image, whole blocks.
    ``canvases``: rows and columns in tiles. ``places``: position of each image's token in the text.
    """

    end: int
    ranges: tuple[tuple[int, int], ...]
    canvases: tuple[tuple[int, int], ...]
    places: tuple[int, ...]

    def visible(self, position: int) -> tuple[int, int]:
        """Return the images ``[first, last)`` that a row of the text sees; equal: none.

        Rows before the first image's token see no image.
        """
        last = first = bisect_right(self.places, position)
        while first and (first == last or self.places[first - 1] + 1 == self.places[first]):
            first -= 1
        return first, last


def check_row(
    tokens: npt.NDArray[np.integer],
    spans: Sequence[tuple[int, int]],
    ratio_ids: Sequence[int],
    placeholder: int,
) -> list[int]:
    """Return the position of each image's token in the text.

    Raises InputError unless the images begin the prompt, one after the other and equally long, each
    after its aspect ratio id, and the text has one token per image.
    """
    length = spans[0][1]
    for number, (start, end) in enumerate(spans):
        if (start - 1, end) != (number * length, (number + 1) * length) or end > len(tokens):
            raise InputError(
                f"image {number} has the tokens {start} to {end}; the images of this model are "
                "equally long and begin the prompt, each after its aspect ratio id"
            )
        if tokens[start - 1] != ratio_ids[number]:
            raise InputError(f"the token before image {number} is not its aspect ratio id")
    row = len(spans) * length
    places: list[int] = (np.flatnonzero(tokens[row:] == placeholder) + row).tolist()
    if len(places) != len(spans):
        raise InputError(f"the text has {len(places)} image tokens for {len(spans)} images")
    return places
