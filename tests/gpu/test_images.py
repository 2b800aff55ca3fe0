"""Clusters with CUDA workers, executed on the CPU, answer questions about images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.benchmarks.scratch import scratch_folder
from baton.benchmarks.served import Served

from ..cluster.vision_model import vision_folder
from ..cuda.test_vision import NEAR, load, shortfall
from ..cuda.vision_model import GREEDY, IMAGE, SHAPES, picture, request, write_vision_model


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", list(SHAPES))
def test_tokens_are_the_reference_s_but_for_near_ties(
    tmp_path: Path, with_cupy: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The tower is in the prefill worker, the rope delta travels to the decode worker."""
    for variable, value in with_cupy.items():
        monkeypatch.setenv(variable, value)
    shape = SHAPES[name]
    plain = write_vision_model(tmp_path / "plain", shape, seed=5)
    (plain / "generation_config.json").write_text("{}")
    folder = vision_folder(tmp_path / "model", plain)
    side = {"patch_size": shape.patch, "merge_size": 2, "min_pixels": 64, "max_pixels": 1 << 20}
    (folder / "preprocessor_config.json").write_text(json.dumps(side))
    reference = load(folder)
    first, second = picture(shape, (6, 8), 1), picture(shape, (4, 4), 2)
    questions = [
        [5, 6, first, *range(20, 40)],
        [5, first, 7, second, 8, 9],
        [5, 6, first, *range(20, 40)],  # its prefix is cached
        [5, 6, picture(shape, (6, 8), 3), *range(20, 40)],
    ]
    flags = ("--device=cuda", "--kv-blocks=96", "--block-size=8", "--max-num-batched-tokens=24")
    # Paths of sockets are too long below tmp_path.
    with scratch_folder() as place, Served(place, folder, flags=flags) as served:
        answers, cached = [], []
        for question in questions:
            prompt = [one if isinstance(one, int) else IMAGE for one in question]
            images = [one for one in question if not isinstance(one, int)]
            outputs = list(served.client.generate(prompt, GREEDY, images=images))
            answers.append([token for output in outputs for token in output.tokens])
            cached.append(outputs[-1].cached_tokens)
    for question, answer in zip(questions, answers, strict=True):
        assert len(answer) == GREEDY.max_new_tokens
        assert shortfall(reference, request(shape, question), answer) < NEAR
    assert answers[0] == answers[2]
    assert cached == [0, 0, 32, 0]
