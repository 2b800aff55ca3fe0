"""Scenes of coloured shapes: their prompts, their pictures, and a reader that checks a picture.

A scene has one object, "a red circle", or two, "a blue square left of a red circle". Pictures are
uint8 ``[SIDE, SIDE, 3]`` on a light ground.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

SIDE = 48
GROUND = (244, 243, 238)
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 210),
    "yellow": (245, 200, 40),
    "purple": (150, 60, 170),
    "black": (30, 30, 35),
}
SHAPES = ("circle", "square", "triangle")
RELATIONS = ("left of", "right of", "above", "below")
HELD_OUT = 11

_PALETTE = np.array(list(COLOURS.values()), np.float32)
_GROUND = np.array(GROUND, np.float32)
_NEAR = 64.0
"""A pixel has a colour if the Euclidean distance in RGB is smaller."""
_LEAST_AREA = 30
"""An object has at least so many pixels of its colour; fewer are edges between other colours."""
_STRAY_SHARE = 0.02
"""Most pixels of a picture that may be neither ground nor one of the objects."""


@dataclass(slots=True, frozen=True)
class Thing:
    """A shape of a colour."""

    colour: str
    shape: str

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape}"


@dataclass(slots=True, frozen=True)
class Scene:
    """One thing, or two of different colours with the place of the first beside the second."""

    first: Thing
    relation: str = ""
    second: Thing | None = None

    @property
    def prompt(self) -> str:
        """The words from which the model draws."""
        return f"{self.first} {self.relation} {self.second}" if self.second else str(self.first)


def all_scenes() -> list[Scene]:
    """Return every scene in a fixed order: 18 of one thing, then 1,080 of two."""
    single = [Scene(Thing(*pair)) for pair in product(COLOURS, SHAPES)]
    colours, shapes = permutations(COLOURS, 2), product(SHAPES, repeat=2)
    two = product(colours, shapes, RELATIONS)
    return single + [Scene(Thing(a, s), r, Thing(b, t)) for (a, b), (s, t), r in two]


def is_held_out(index: int) -> bool:
    """Whether the training leaves out scene ``index`` of :func:`all_scenes`: one pair in eleven."""
    return index >= len(COLOURS) * len(SHAPES) and index % HELD_OUT == 0


def words() -> list[str]:
    """Return every word of the prompts once, in a fixed order."""
    return list(dict.fromkeys(word for scene in all_scenes() for word in scene.prompt.split()))


# --------------------------------------------------------------------------- pictures


def render(scene: Scene, rng: np.random.Generator) -> U8:
    """Draw a scene with random sizes and places."""
    picture = np.broadcast_to(_GROUND, (SIDE, SIDE, 3)).copy()
    for thing, (x, y, radius) in _places(scene, rng):
        covered = _coverage(thing.shape, x, y, radius)[:, :, None]
        picture += covered * (np.array(COLOURS[thing.colour], np.float32) - picture)
    return np.rint(picture).astype(np.uint8)


def _places(
    scene: Scene, rng: np.random.Generator
) -> Iterator[tuple[Thing, tuple[float, float, float]]]:
    """Yield each thing with the column and row of its middle and its radius, in pixels."""
    middle = SIDE / 2
    if scene.second is None:
        x, y = middle + rng.uniform(-7, 7, 2)
        yield scene.first, (x, y, rng.uniform(9, 13))
        return
    sign = -1 if scene.relation in ("left of", "above") else 1
    for thing, side in ((scene.first, sign), (scene.second, -sign)):
        along, across = middle + side * rng.uniform(10.5, 13), middle + rng.uniform(-5, 5)
        x, y = (along, across) if scene.relation.endswith("of") else (across, along)
        yield thing, (x, y, rng.uniform(7, 9))


def _coverage(shape: str, x: float, y: float, radius: float) -> F32:
    """Return the share of each pixel that a shape covers, with soft edges: ``[SIDE, SIDE]``."""
    at = np.arange(SIDE, dtype=np.float32) + 0.5
    dx, dy = np.meshgrid(at - x, at - y)
    if shape == "circle":
        inside = radius - np.hypot(dx, dy)
    elif shape == "square":
        inside = 0.9 * radius - np.maximum(np.abs(dx), np.abs(dy))
    else:  # isosceles, the tip above
        slope = np.float32(5**-0.5)
        sides = (dy + radius) * slope - 2 * slope * np.abs(dx)
        inside = np.minimum(sides, radius - dy)
    covered: F32 = np.clip(inside + 0.5, 0, 1).astype(np.float32)
    return covered


# --------------------------------------------------------------------------- reader


def read(picture: U8) -> Scene | None:
    """Return the scene that a picture shows, None if the picture shows no clear scene.

    Of two things the first is the left or the upper one; the relation is "left of" if the middles
    are further apart in columns than in rows, else "above".
    """
    pixels = picture.astype(np.float32)
    distance = np.linalg.norm(pixels[:, :, None, :] - _PALETTE, axis=3)
    from_ground = np.linalg.norm(pixels - _GROUND, axis=2)
    clear = (distance.min(2) < _NEAR) & (distance.min(2) < from_ground)
    areas = np.bincount(distance.argmin(2)[clear], minlength=len(COLOURS))
    present = [int(i) for i in np.argsort(-areas) if areas[i] >= _LEAST_AREA]
    if not 1 <= len(present) <= 2:
        return None
    shares, off = _mixtures(pixels, present)
    covered, nearest, loose = shares.max(2) > 0.5, off.argmin(2), off.min(2) > _NEAR
    names, found = list(COLOURS), []
    for index, colour in enumerate(present):
        # Soft edges of green resemble those of black, so an edge pixel must be near clear pixels.
        around = _box(clear & (distance.argmin(2) == colour))
        mask = around & (nearest == index) & (shares[:, :, index] > 0.5)
        loose |= covered & (nearest == index) & ~mask
        shape = _shape(mask)
        if shape is None:
            return None
        rows, columns = np.nonzero(mask)
        place = float(columns.mean()), float(rows.mean())
        found.append((place, Thing(names[colour], shape)))
    if loose.sum() > _STRAY_SHARE * loose.size:
        return None
    if len(found) == 1:
        return Scene(found[0][1])
    (one, _), (other, _) = found
    axis = 0 if abs(one[0] - other[0]) > abs(one[1] - other[1]) else 1
    (_, first), (_, second) = sorted(found, key=lambda entry: entry[0][axis])
    return Scene(first, ("left of", "above")[axis], second)


def normal_form(scene: Scene) -> Scene:
    """Return the scene as :func:`read` states it: "right of" and "below" swap the things."""
    swapped = {"right of": "left of", "below": "above"}.get(scene.relation)
    if swapped is None or scene.second is None:
        return scene
    return Scene(scene.second, swapped, scene.first)


def shows(picture: U8, scene: Scene) -> bool:
    """Whether a picture shows exactly a scene: colours, shapes and places."""
    return read(picture) == normal_form(scene)


def _box(mask: Bools) -> Bools:
    """Return the bounding box of a mask, with one pixel more on each side."""
    box = np.zeros_like(mask)
    rows, columns = np.nonzero(mask)
    top, left = max(0, rows.min() - 1), max(0, columns.min() - 1)
    box[top : rows.max() + 2, left : columns.max() + 2] = True
    return box


def _shape(mask: Bools) -> str | None:
    """Return the shape of a mask by the share of its bounding box; None for a sliver."""
    rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
    if not len(rows):
        return None
    height, width = rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1
    if not 0.7 < height / width < 1.45:
        return None
    share = mask.sum() / (height * width)
    if share < 0.4:
        return None
    return "triangle" if share < 0.66 else "circle" if share < 0.89 else "square"


def _mixtures(pixels: F32, present: list[int]) -> tuple[F32, F32]:
    """Return per pixel and colour of ``present`` the share that mixes ground and colour best.

    Both results are ``[height, width, colours]``: the share, 0 to 1, and the distance in RGB
    between the pixel and this mixture.
    """
    from_ground = pixels - _GROUND
    lines = _PALETTE[present] - _GROUND
    shares = np.clip(from_ground @ (lines / (lines * lines).sum(1, keepdims=True)).T, 0, 1)
    off = np.linalg.norm(from_ground[:, :, None] - shares[..., None] * lines, axis=3)
    return shares, off
