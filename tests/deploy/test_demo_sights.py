"""The pictures, questions and answers that the demo model that sees is trained on."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest

from baton.deploy.demo_shapes import (
    COLOURS,
    FRAME,
    FRAME_WIDTH,
    KINDS,
    SIDE,
    Thing,
    draw,
)
from baton.tools.demo_model import sights
from baton.tools.demo_model.sights import SeenWorld, Sight

RED = Thing("red", "circle", 22, 56)
BLUE = Thing("blue", "square", 90, 58)
LOWER = Thing("green", "triangle", 25, 90)


def many(seed, count=400):
    rng = random.Random(seed)
    return rng, list(islice(sights.sights(rng, new=False), count))


def test_a_seed_fixes_pictures_and_texts():
    def sample(seed):
        world = SeenWorld(seed, ["What else is there?"])
        shown = [world.sight() for _ in range(50)]
        return shown, [world.turn(sight) for sight in shown]

    (shown, turns), again = sample(5), sample(5)
    assert (shown, turns) == again
    assert all(np.array_equal(a.pixels(), b.pixels()) for a, b in zip(shown, again[0], strict=True))
    assert sample(6) != again


@pytest.mark.parametrize("shape", ["circle", "square", "triangle"])
def test_a_shape_is_painted_where_it_should_be(shape):
    picture = draw([Thing("blue", shape, 40, 70, 14)])
    painted = np.argwhere((picture == COLOURS["blue"]).all(axis=2))
    assert abs(len(painted) - np.pi * 14**2) < 0.25 * np.pi * 14**2
    middle = (painted.min(axis=0) + painted.max(axis=0)) / 2
    assert np.abs(middle - (70, 40)).max() <= 2
    assert (picture == 255).all(axis=2).sum() > (SIDE - 2 * FRAME_WIDTH) ** 2 - 1.5 * len(painted)
    assert (picture[:FRAME_WIDTH] == FRAME).all()


def test_descriptions():
    said = [sights.description(Sight(things)) for things in ((BLUE, RED), (LOWER, RED), (LOWER,))]
    assert said == [
        "A red circle left of a blue square.",
        "A red circle above a green triangle.",
        "A green triangle at the bottom left.",
    ]


def test_the_other_side_of_a_thing_is_empty():
    rng = random.Random(1)
    turns = {sights.beside(rng, Sight((RED, BLUE))) for _ in range(200)}
    assert ("What is left of the blue square?", "A red circle.") in turns
    assert ("What is right of the circle?", "A blue square.") in turns
    assert ("What is above the square?", "Nothing.") in turns
    assert ("What is right of the square?", "Nothing.") in turns


def test_answers_name_what_the_question_leaves_open():
    rng, shown = many(2)
    for sight in shown:
        names = {thing.name for thing in sight.things}
        question, answer = sights.presence(rng, sight)
        assert (answer == "Yes.") == any(f" {name}?" in question for name in names)
        question, answer = sights.colour(rng, sight)
        for thing in sight.things:
            assert (thing.shape in question) == (thing.colour in answer.lower()) or len(names) == 2
        assert sights.count(rng, sight)[1] == ("One.", "Two.")[len(names) - 1]


def test_things_do_not_overlap_and_lie_inside():
    _, shown = many(3)
    for sight in shown:
        for thing in sight.things:
            assert thing.radius <= min(thing.x, thing.y, SIDE - thing.x, SIDE - thing.y) + 1
        if len(sight.things) == 2:
            one, two = sight.things
            assert max(abs(one.x - two.x), abs(one.y - two.y)) > 22


def test_labels_are_at_the_cells_of_the_things():
    rows = sights.labels(Sight((BLUE, RED)), 4)
    red = (0, 0, 3, 1 + ("left of", "right of", "above", "below").index("left of"), 0)
    blue = (2, 1, 5, 1 + ("left of", "right of", "above", "below").index("right of"), 1)
    assert rows[0] == [(), (), (), ()]
    assert (rows[1][0], rows[2][0]) == (red, red)
    assert (rows[1][3], rows[2][3]) == (blue, blue)
    assert rows[3] == [(), (), (), ()]
    assert None in rows[1]


def test_held_out_combinations_are_never_trained_but_all_kinds_are():
    _, trained = many(4, 1500)
    new = list(islice(sights.sights(random.Random(5), new=True), 300))

    def combinations(shown):
        pairs = (tuple(sorted(t.name for t in s.things)) for s in shown if len(s.things) == 2)
        places = ((s.things[0].name, sights.place(s.things[0])) for s in shown)
        return set(pairs), {p for p, s in zip(places, shown, strict=True) if len(s.things) == 1}

    for seen, unseen in zip(combinations(trained), combinations(new), strict=True):
        assert len(unseen) > 10
        assert seen.isdisjoint(unseen)
    kinds = {(t.colour, t.shape) for sight in trained for t in sight.things}
    assert kinds == set(KINDS)
