"""The shipped demo model that sees: it answers as transformers does, nearly always right."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from baton.deploy.config import demo_vision_model_folder
from baton.deploy.demo_shapes import Thing
from baton.proto.contexts.images import ImageMetadata
from baton.proto.contexts.vision import TextAndVisionContext
from baton.tools.demo_model.sight_accuracy import GREEDY, SeeingModel
from baton.tools.demo_model.sights import Sight, count, describe, shape, sights

FOLDER = demo_vision_model_folder()
REFERENCE = Path(__file__).parents[1] / "data" / "vision" / "demo.npz"
CLOSE = 1e-3
"""Gap between the two best logits below which rounding may decide."""


@pytest.fixture(scope="module")
def model() -> SeeingModel:
    return SeeingModel(FOLDER)


def context_of(prompt, pixels, new: int) -> TextAndVisionContext:
    placeholder = json.loads((FOLDER / "config.json").read_text())["image_token_id"]
    (holders,) = np.nonzero(prompt == placeholder)
    rows, columns = (size // 14 for size in pixels.shape[:2])
    return TextAndVisionContext(
        max_length=len(prompt) + new,
        tokens=prompt.astype(np.int64),
        sampling_params=GREEDY,
        ignore_eos=True,
        vision_token_ids=[placeholder],
        images=[
            ImageMetadata(
                start_idx=int(holders[0]), end_idx=int(holders[-1]) + 1, pixel_values=pixels
            )
        ],
        extra_model_args={"image_grid_thw": np.array([[1, rows, columns]], np.int32)},
    )


def test_greedy_tokens_are_those_of_transformers(model):
    arrays = np.load(REFERENCE)
    cases = range(len([name for name in arrays if name.startswith("prompt_")]))
    contexts = [
        context_of(arrays[f"prompt_{i}"], arrays[f"pixels_{i}"], len(arrays[f"greedy_{i}"]))
        for i in cases
    ]
    for context in contexts:
        model.engine.add(context)
    while model.engine.has_work:
        model.engine.step()
    compared = 0
    for i, context in zip(cases, contexts, strict=True):
        found = context.tokens.all[context.prompt_length :].tolist()
        (close,) = np.nonzero(arrays[f"margins_{i}"] < CLOSE)
        sure = int(close[0]) if len(close) else len(found)
        assert found[:sure] == arrays[f"greedy_{i}"].tolist()[:sure]
        compared += sure
    assert compared > 0.9 * sum(len(arrays[f"greedy_{i}"]) for i in cases)


@pytest.mark.parametrize("task", [describe, count, shape], ids=lambda task: task.__name__)
def test_answers_about_new_combinations_are_right(model, task):
    rng = random.Random(20)
    asked = [(sight, *task(rng, sight)) for sight in islice(sights(rng, new=True), 50)]
    answers = model.answers([(sight, question) for sight, question, _ in asked])
    wrong = [
        (question, right, answer)
        for (_, question, right), answer in zip(asked, answers, strict=True)
        if answer != right
    ]
    assert len(wrong) <= 5, wrong


def test_some_answers(model):
    sight = Sight((Thing("red", "circle", 24, 56), Thing("blue", "square", 88, 58)))
    expected = {
        "What is in the picture?": "A red circle left of a blue square.",
        "What shape is the red object?": "A circle.",
        "How many objects are there?": "Two.",
        "Thank you!": "You are welcome!",
    }
    assert model.answers([(sight, question) for question in expected]) == [*expected.values()]


def test_the_files_are_small_and_agree():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sizes["model.safetensors"] < 3 << 20
    assert sum(sizes.values()) < 3 << 20
    config = json.loads((FOLDER / "config.json").read_text())
    tokenizer = json.loads((FOLDER / "tokenizer.json").read_text())
    ids = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    assert config["image_token_id"] == ids["<|image_pad|>"]
    assert config["eos_token_id"] == ids["<|im_end|>"]
    assert config["text_config"]["vocab_size"] >= len(tokenizer["model"]["vocab"])
