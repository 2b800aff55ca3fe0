"""Clusters with CUDA workers, executed on the CPU, draw pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.benchmarks.scratch import scratch_folder
from baton.benchmarks.served import Served
from baton.engine.pictures.draw import PictureEngine

from ..cluster.picture_driver import FOLDER
from ..cuda.test_pictures import CLOSE, distance

PROMPT, NEGATIVE = "a red house by the sea", "a blue cube"


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_pictures_are_the_cpu_s_but_for_bfloat16(
    tmp_path: Path, with_cupy: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state travels through host memory; the second picture finds its prompts there."""
    for variable, value in with_cupy.items():
        monkeypatch.setenv(variable, value)
    # Paths of sockets are too long below tmp_path.
    with scratch_folder() as place, Served(place, FOLDER, flags=("--device=cuda",)) as served:
        first, second = (
            served.client.image(
                PROMPT, negative_prompt=NEGATIVE, width=32, height=48, steps=2, seed=seed
            )
            for seed in (7, 7)
        )
    engine = PictureEngine(FOLDER)
    context = engine.request(
        PROMPT, NEGATIVE, width=32, height=48, num_inference_steps=2, seed=7, true_cfg_scale=4.0
    )
    expected = engine.draw(context).astype(float)
    assert distance(first.pixels().astype(float), expected) < CLOSE
    assert np.array_equal(first.pixels(), second.pixels())
    assert expected.std() > 20
