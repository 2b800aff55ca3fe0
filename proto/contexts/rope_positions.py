"""Rope positions of a prompt with images: three per token, for time, row and column (mrope).

A token of text has three equal positions, one after the token before it. All tokens of an image
have the time of its first token; row and column count up in the image's grid. The token after an
image has the position after the largest one of the image. So after the last image the rope
position is the token's position plus a constant, the *rope delta* (0 or negative).

Client, prefill worker and decode worker use these functions. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt

import numpy as np
import numpy.typing as npt

from ..errors import InputError

Int32 = npt.NDArray[np.int32]
Span = tuple[int, int]
"""Placeholder tokens ``[start, end)`` of an image."""

GRIDS = "image_grid_thw"
"""Name in ``extra_model_args``: int32 ``[images, 3]``, time, rows and columns in patches."""
DELTA = "rope_delta"
"""Name in ``extra_model_args``: int32 ``[1]``, the rope delta that the prefill worker used."""


def merged_grids(spans: Sequence[Span], grids: npt.ArrayLike) -> list[tuple[int, int]]:
    """Return rows and columns of each image in tokens.

    ``grids``: integers ``[images, 3]``, time, rows and columns in patches, of which a square of
    patches becomes one token. Raises InputError if grids and spans contradict each other.
    """
    array = np.asarray(grids)
    if array.shape != (len(spans), 3) or array.dtype.kind not in "iu":
        raise InputError(
            f"{GRIDS} must be integers of shape ({len(spans)}, 3), "
            f"not {array.dtype} of shape {array.shape}"
        )
    merged = []
    for (start, end), grid in zip(spans, array.tolist(), strict=True):
        time, rows, columns = grid
        if time != 1 or rows < 1 or columns < 1:
            raise InputError(f"{GRIDS} has {grid}; an image has time 1 and at least one patch")
        side = isqrt(rows * columns // (end - start))
        if (
            not side
            or rows % side
            or columns % side
            or rows * columns != (end - start) * side * side
        ):
            raise InputError(f"an image of {rows} x {columns} patches has not {end - start} tokens")
        merged.append((rows // side, columns // side))
    return merged


def rope_delta(spans: Sequence[Span], merged: Sequence[tuple[int, int]]) -> int:
    """Return rope position minus position of the tokens after the last image."""
    return sum(max(g) - (end - start) for (start, end), g in zip(spans, merged, strict=True))


def rope_positions(
    spans: Sequence[Span], merged: Sequence[tuple[int, int]], start: int, end: int
) -> Int32:
    """Return the rope positions of the tokens ``[start, end)``, int32 ``[3, end - start]``.

    ``merged``: rows and columns of each image in tokens; see :func:`merged_grids`.
    """
    positions = np.empty((3, end - start), np.int32)
    for first, last, delta, columns in _runs(spans, merged, end):
        low, high = max(first, start), min(last, end)
        if low >= high:
            continue
        place = positions[:, low - start : high - start]
        if not columns:
            place[:] = np.arange(low, high) + delta
            continue
        index = np.arange(low - first, high - first)
        place[0] = first + delta
        place[1] = first + delta + index // columns
        place[2] = first + delta + index % columns
    return positions


def _runs(
    spans: Sequence[Span], merged: Sequence[tuple[int, int]], end: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield runs of text and images: first and last token, delta, columns of an image or 0."""
    at = delta = 0
    for (first, last), (rows, columns) in zip(spans, merged, strict=True):
        yield at, first, delta, 0
        yield first, last, delta, columns
        delta += max(rows, columns) - (last - first)
        at = last
    yield at, max(at, end), delta, 0
