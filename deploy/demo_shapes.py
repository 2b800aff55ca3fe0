"""The pictures of the demo model that sees: a few coloured shapes in a frame.

Drawing needs only NumPy, so the demo runs without Pillow.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Colour = tuple[int, int, int]

SIDE = 112
"""Pixels of a picture's side: 8 patches, or 4 tokens of the model."""
COLOURS: dict[str, Colour] = {
    "red": (215, 35, 40),
    "green": (35, 150, 60),
    "blue": (40, 70, 210),
    "yellow": (245, 215, 40),
    "purple": (140, 50, 170),
    "orange": (245, 135, 25),
    "black": (25, 25, 30),
}
SHAPES = ("circle", "square", "triangle")
WHITE: Colour = (255, 255, 255)
FRAME, FRAME_WIDTH = (70, 70, 70), 4
"""The tower's positions are relative, so a patch sees its place by its distance from the frame."""
KINDS = tuple(product(COLOURS, SHAPES))
CENTRES = (25, 56, 87)
"""Middle of each third in pixels; the outer two are moved inwards, so that shapes are whole."""
JITTER = 4.0
RADII = (10.0, 14.0)


@dataclass(slots=True, frozen=True)
class Thing:
    """One shape of a picture.

    ``x``, ``y``: pixels of its centre from the left and from the top. ``radius``: pixels from the
    centre to the edge of a circle; the other shapes have about a circle's area.
    """

    colour: str
    shape: str
    x: float
    y: float
    radius: float = 13.0

    @property
    def name(self) -> str:
        """Colour and shape, as "red circle"."""
        return f"{self.colour} {self.shape}"


def random_things(rng: random.Random, count: int) -> tuple[Thing, ...]:
    """Return things of different kinds, each in one of nine fields of the picture.

    A second thing is nearer to the first one's row than to its column, or the other way round.
    """
    kinds = rng.sample(KINDS, count)
    spots = [(rng.randrange(3), rng.randrange(3))]
    while len(spots) < count:
        row, column = rng.randrange(3), rng.randrange(3)
        if abs(row - spots[0][0]) != abs(column - spots[0][1]):
            spots.append((row, column))
    return tuple(
        Thing(
            colour,
            shape,
            CENTRES[column] + rng.uniform(-JITTER, JITTER),
            CENTRES[row] + rng.uniform(-JITTER, JITTER),
            rng.uniform(*RADII),
        )
        for (colour, shape), (row, column) in zip(kinds, spots, strict=True)
    )


def draw(
    things: Sequence[Thing], ground: Colour = WHITE, paints: Sequence[Colour] | None = None
) -> U8:
    """Return the picture of ``things``, uint8 ``[SIDE, SIDE, 3]``.

    ``paints``: RGB of each thing, by default those of :data:`COLOURS`.
    """
    rows, columns = np.indices((SIDE, SIDE), np.float32) + np.float32(0.5)
    picture = np.empty((SIDE, SIDE, 3), np.float32)
    picture[:] = ground
    for index, thing in enumerate(things):
        paint = COLOURS[thing.colour] if paints is None else paints[index]
        outside = _distance(thing.shape, columns - thing.x, rows - thing.y, thing.radius)
        # A pixel on the edge is mixed by the share of it that the shape covers.
        cover = np.clip(0.5 - outside, 0, 1)[:, :, None]
        picture += cover * (np.array(paint, np.float32) - picture)
    for edge in (slice(None, FRAME_WIDTH), slice(-FRAME_WIDTH, None)):
        picture[edge] = picture[:, edge] = FRAME
    return np.rint(picture).astype(np.uint8)


def _distance(shape: str, x: F32, y: F32, radius: float) -> F32:
    """Return each pixel's distance from the shape's edge, negative inside."""
    if shape == "circle":
        distance = np.hypot(x, y) - radius
    elif shape == "square":
        distance = np.maximum(np.abs(x), np.abs(y)) - 0.89 * radius
    else:  # a triangle that stands on a side
        down = y - 0.36 * radius  # from the centre of gravity
        slope = np.sqrt(np.float32(0.75)) * np.abs(x) - 0.5 * down
        distance = np.maximum(slope, down) - 0.72 * radius
    return distance.astype(np.float32)
