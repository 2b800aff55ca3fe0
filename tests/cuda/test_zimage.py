"""Z-Image on the CUDA kernels: a whole picture beside the NumPy reference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.pictures import CudaPictures
from baton.engine.kernels.load import load_backend
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.pictures.loading import load_encoder
from baton.proto.errors import ConfigError

from ..engine.test_zimage import CASES, FOLDER, context_of
from .test_pictures import CLOSE, Halves, distance


@pytest.fixture(scope="module")
def exact() -> Halves:
    return Halves(FOLDER, load_backend("numpy"))


@pytest.mark.parametrize("case", CASES)
def test_a_picture_is_the_cpu_s_but_for_bfloat16(device: Device, exact: Halves, case: str) -> None:
    halves, context = Halves(FOLDER, CudaPictures(device)), context_of(case)
    expected, state = exact.encoder.encode(context), halves.encoder.encode(context)
    errors = {name: distance(state[name], expected[name]) for name in expected}
    drawing, right = halves.draw(context), exact.draw(context)
    latents = halves.denoiser._backend.download(drawing.latents)
    errors["latents"] = distance(latents, right.latents)
    pixels, wanted = halves.denoiser.finish(drawing), exact.denoiser.finish(right)
    errors["pixels"] = distance(pixels.astype(float), wanted.astype(float))
    assert max(errors.values()) < CLOSE, errors


def test_a_text_encoder_that_the_kernels_do_not_support_is_refused(
    device: Device, tmp_path: Path
) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    config = folder / "text_encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"head_dim": 12}))
    with pytest.raises(ConfigError, match="this model has 12"):
        load_encoder(RunnerConfig(model=str(folder), num_blocks=64), backend=CudaPictures(device))
