"""The generated pictures and questions of the demo model that sees; independent of torch.

A :class:`Sight` has one or two shapes. Every example is a ``(question, answer)`` pair that a
function of :data:`TASKS` makes for a sight, so a seed determines all pictures and texts. Some
combinations of shapes are held out of the training, to measure the answers about new ones.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from baton.deploy.demo_shapes import (
    COLOURS,
    SHAPES,
    SIDE,
    U8,
    WHITE,
    Colour,
    Thing,
    draw,
    random_things,
)

from .corpus import OTHER_QUESTIONS, SYSTEM_MESSAGES, Turn

PLACES = (
    "at the top left", "at the top", "at the top right",
    "on the left", "in the middle", "on the right",
    "at the bottom left", "at the bottom", "at the bottom right",
)  # fmt: skip
"""The nine thirds by thirds of a picture, in rows."""
COLOUR_NAMES = tuple(COLOURS)
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

ABILITIES = (
    "I am a very small model. I can name colours, shapes and places of one or two objects in a "
    "small picture."
)
NO_PICTURE = "I see no picture."
AGAIN = "Describe the picture again and again."
DESCRIBE = (
    "What is in the picture?",
    "What is in this picture?",
    "What is in the image?",
    "What is in this image?",
    "What do you see?",
    "What is this?",
    "Describe the picture.",
    "Describe the image.",
)
COUNT = ("How many objects are there?", "How many objects are in the picture?", "How many?")
FIXED = {
    "I am the demo model of Baton that sees pictures.": ("Who are you?", "What are you?"),
    ABILITIES: ("What can you do?", "Help!", "How can you help me?"),
    "Hello! Send me a picture.": ("Hello!", "Hi!", "Good morning!"),
    "You are welcome!": ("Thank you!", "Thanks!"),
}


@dataclass(slots=True, frozen=True)
class Sight:
    """What a picture has, and how it is painted.

    ``paints``: RGB of each thing. ``noise``: standard deviation of a pixel; ``seed``: of the noise.
    """

    things: tuple[Thing, ...]
    ground: Colour = WHITE
    paints: tuple[Colour, ...] | None = None
    noise: float = 0.0
    seed: int = 0

    def pixels(self) -> U8:
        """Return the picture, uint8 ``[SIDE, SIDE, 3]``."""
        picture = draw(self.things, self.ground, self.paints)
        if not self.noise:
            return picture
        noise = np.random.default_rng(self.seed).normal(0, self.noise, picture.shape)
        return np.clip(np.rint(picture + noise), 0, 255).astype(np.uint8)


def article(name: str) -> str:
    """Return ``name`` with "a" or "an"."""
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def sentence(text: str) -> str:
    """Return ``text`` with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def place(thing: Thing) -> int:
    """Return the index in :data:`PLACES`."""
    return int(thing.y * 3 // SIDE) * 3 + int(thing.x * 3 // SIDE)


def relation(one: Thing, other: Thing) -> str:
    """Return where ``one`` is from ``other``, along the axis on which they are further apart."""
    right, down = one.x - other.x, one.y - other.y
    if abs(right) > abs(down):
        return "right of" if right > 0 else "left of"
    return "below" if down > 0 else "above"


def ordered(sight: Sight) -> tuple[Thing, ...]:
    """Return the things in the order of a description: the left or the upper one is first."""
    if len(sight.things) == 2 and relation(*sight.things) in ("right of", "below"):
        return sight.things[::-1]
    return sight.things


def description(sight: Sight) -> str:
    """Return the answer to :data:`DESCRIBE`."""
    first, *others = ordered(sight)
    if not others:
        return sentence(f"{article(first.name)} {PLACES[place(first)]}")
    (other,) = others
    return sentence(f"{article(first.name)} {relation(first, other)} {article(other.name)}")


def labels(sight: Sight, cells: int) -> list[list[tuple[int, ...] | None]]:
    """Return what the tower should see in each cell of a ``cells`` by ``cells`` grid, in rows.

    For a thing in the cell: the indices of its colour, shape and place, of its relation to the
    other thing (0: there is none), and of its order in a description. ``()``: the cell is empty.
    None: a thing covers only an edge of the cell.
    """
    size, rows = SIDE / cells, []
    relations = tuple(OPPOSITE)
    things = ordered(sight)
    for row in range(cells):
        line: list[tuple[int, ...] | None] = []
        for column in range(cells):
            x, y = (column + 0.5) * size, (row + 0.5) * size
            far = [max(abs(x - thing.x), abs(y - thing.y)) for thing in things]
            nearest = far.index(min(far))
            thing = things[nearest]
            if far[nearest] > size / 2 + thing.radius + 1:
                line.append(())
            elif far[nearest] > size / 2 + 5:
                line.append(None)
            else:
                side = 0
                if len(things) == 2:
                    side = 1 + relations.index(relation(thing, things[1 - nearest]))
                kind = COLOUR_NAMES.index(thing.colour), SHAPES.index(thing.shape)
                line.append((*kind, place(thing), side, nearest))
        rows.append(line)
    return rows


def held_out(sight: Sight) -> bool:
    """Return True for a combination that no training picture has.

    One in nine kinds of a single thing at a place, and one in seven pairs of kinds.
    """
    names = sorted(thing.name for thing in sight.things)
    if len(names) == 1:
        return zlib.crc32(f"{names[0]} {place(sight.things[0])}".encode()) % 9 == 0
    return zlib.crc32(" and ".join(names).encode()) % 7 == 0


def random_sight(rng: random.Random) -> Sight:
    """Return one or two things, on white in two of five sights, and how they are painted."""
    count = 1 if rng.random() < 0.3 else 2
    things = random_things(rng, count)
    plain = rng.random() < 0.4
    ground = WHITE
    if not plain:
        grey = rng.randint(205, 255)
        ground = _shade(rng, (grey, grey, grey), 12)
    paints = tuple(_shade(rng, COLOURS[thing.colour], 12) for thing in things)
    noise = rng.uniform(0, 4) if rng.random() < 0.5 else 0.0
    return Sight(things, ground, paints, noise, rng.getrandbits(32))


def _shade(rng: random.Random, colour: Colour, spread: int) -> Colour:
    red, green, blue = (min(255, max(0, c + rng.randint(-spread, spread))) for c in colour)
    return red, green, blue


def sights(rng: random.Random, *, new: bool) -> Iterator[Sight]:
    """Yield sights forever. ``new``: only combinations held out of the training, or only others."""
    while True:
        sight = random_sight(rng)
        if held_out(sight) == new:
            yield sight


# ------------------------------------------------------------------------------ questions


def describe(rng: random.Random, sight: Sight) -> Turn:
    """All things."""
    return rng.choice(DESCRIBE), description(sight)


def count(rng: random.Random, sight: Sight) -> Turn:
    """How many things there are."""
    return rng.choice(COUNT), ("One.", "Two.")[len(sight.things) - 1]


def colour(rng: random.Random, sight: Sight) -> Turn:
    """The colour of a shape, or of all things if they have one shape."""
    thing = rng.choice(sight.things)
    word = rng.choice(("colour", "color"))
    same = [one for one in ordered(sight) if one.shape == thing.shape]
    if len(same) == 1:
        return f"What {word} is the {thing.shape}?", sentence(thing.colour)
    return f"What {word} are the {thing.shape}s?", sentence(" and ".join(t.colour for t in same))


def shape(rng: random.Random, sight: Sight) -> Turn:
    """The shape of a thing of one colour."""
    thing = rng.choice(sight.things)
    same = [one for one in ordered(sight) if one.colour == thing.colour]
    names = " and ".join(article(one.shape) for one in same)
    verb = "is the {} object" if len(same) == 1 else "are the {} objects"
    return f"What shape {verb.format(thing.colour)}?", sentence(names)


def where(rng: random.Random, sight: Sight) -> Turn:
    """Where a thing is in the picture."""
    thing = rng.choice(sight.things)
    names = [thing.name]
    if sum(one.shape == thing.shape for one in sight.things) == 1:
        names.append(thing.shape)
    if sum(one.colour == thing.colour for one in sight.things) == 1:
        names.append(f"{thing.colour} object")
    return f"Where is the {rng.choice(names)}?", sentence(PLACES[place(thing)])


def beside(rng: random.Random, sight: Sight) -> Turn:
    """Ask for the thing on one side of a thing: the other thing or nothing."""
    thing = rng.choice(sight.things)
    side = rng.choice(tuple(OPPOSITE))
    found = [one for one in sight.things if one != thing and relation(one, thing) == side]
    if len(sight.things) == 2 and not found and rng.random() < 0.5:
        (other,) = (one for one in sight.things if one != thing)
        side, found = relation(other, thing), [other]
    same = sum(one.shape == thing.shape for one in sight.things)
    name = thing.shape if same == 1 and rng.random() < 0.5 else thing.name
    answer = article(found[0].name) if found else "nothing"
    return f"What is {side} the {name}?", sentence(answer)


def presence(rng: random.Random, sight: Sight) -> Turn:
    """Whether the picture has a kind of thing; half of those asked for are in it."""
    names = {thing.name for thing in sight.things}
    thing = rng.choice(sight.things)
    name = thing.name
    if rng.random() < 0.5:
        other_colour, other_shape = rng.choice(tuple(COLOURS)), rng.choice(SHAPES)
        name = rng.choice((f"{other_colour} {thing.shape}", f"{thing.colour} {other_shape}"))
    return f"Is there {article(name)}?", "Yes." if name in names else "No."


TASKS: tuple[tuple[float, Callable[[random.Random, Sight], Turn]], ...] = (
    (0.34, describe),
    (0.04, count),
    (0.12, colour),
    (0.10, shape),
    (0.14, where),
    (0.16, beside),
    (0.10, presence),
)


def turn(rng: random.Random, sight: Sight, describing: float = TASKS[0][0]) -> Turn:
    """Return a question about the picture and its answer.

    ``describing``: weight of :func:`describe` beside the weights of the other tasks.
    """
    weights = [describing, *(weight for weight, _ in TASKS[1:])]
    (task,) = rng.choices([task for _, task in TASKS], weights)
    return task(rng, sight)


class SeenWorld:
    """An endless, seeded source of conversations about training pictures.

    ``other_questions``: sentences that the model learns to decline. ``describe``: weight of
    questions for descriptions.
    """

    def __init__(self, seed: int, other_questions: list[str]) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - a corpus, not a secret
        self._sights = sights(self.rng, new=False)
        self._other = other_questions
        self.describe = TASKS[0][0]

    def sight(self) -> Sight:
        """Return the next picture."""
        return next(self._sights)

    def turn(self, sight: Sight) -> Turn:
        """Return a question and its answer; 4 % of the questions are not about the picture."""
        if self.rng.random() < 0.04:
            return self.plain_turn(None)
        return turn(self.rng, sight, self.describe)

    def plain_turn(self, needing: Sight | None) -> Turn:
        """Return a turn that needs no picture, or with ``needing`` sometimes one without it."""
        chance = self.rng.random()
        if needing is not None and chance < 0.6:
            return turn(self.rng, needing)[0], NO_PICTURE
        if chance < 0.8:
            answer = self.rng.choice(tuple(FIXED))
            return self.rng.choice(FIXED[answer]), answer
        other = self.rng.choice(self._other)
        if self.rng.random() < 0.5:
            words = other.rstrip(".:").split()
            at = self.rng.randrange(len(words))
            other = self.rng.choice(OTHER_QUESTIONS).format(" ".join(words[at : at + 3]))
        return other, ABILITIES

    def system_message(self) -> str | None:
        """Return a system message for one conversation in eight, else None."""
        return self.rng.choice(SYSTEM_MESSAGES) if self.rng.random() < 0.125 else None
