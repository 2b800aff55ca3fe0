from __future__ import annotations

import random
import re

from baton.tools.demo_model import corpus as corpus


def test_a_seed_fixes_the_corpus():
    first, second = (corpus.MicroWorld(5, ["What else?"]) for _ in range(2))
    assert [first.turn() for _ in range(200)] == [second.turn() for _ in range(200)]
    assert corpus.MicroWorld(6, ["What else?"]).turn() != corpus.MicroWorld(5, ["x"]).turn()


def test_sums_are_right():
    rng = random.Random(1)
    for _ in range(300):
        question, answer = corpus.addition(rng)
        words = re.findall(r"\w+", answer.lower())
        left, right, total = (
            corpus.NUMBER_WORDS.index(w) if w in corpus.NUMBER_WORDS else int(w)
            for w in (words[0], words[2], words[4])
        )
        assert left + right == total
        assert words[0] in question


def test_answers_follow_from_their_questions():
    rng = random.Random(2)
    for _ in range(300):
        question, answer = corpus.lookup(rng)
        assert answer.replace("has the", "has a") in question
        question, answer = corpus.repeat(rng)
        assert question.endswith(": " + answer)
        question, answer = corpus.story(rng)
        animal = re.findall(r"\w+", question.replace(", please", ""))[-1]
        assert answer.count(f" {animal} ") >= 1


def test_other_questions_get_the_list_of_abilities():
    world = corpus.MicroWorld(7, ["{braces} are harmless: they are text."])
    answers = {a for q, a in (world.turn() for _ in range(2000)) if "braces" in q}
    assert answers == {corpus.ABILITIES}


def test_documentation_is_made_of_short_pieces():
    pieces = corpus.documentation()
    assert len(pieces) > 1000
    assert all(15 <= len(piece) <= 160 for piece in pieces)
