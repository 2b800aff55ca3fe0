"""A cluster with CUDA workers serves a published form of 8-bit floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.benchmarks.checkpoints import write_checkpoint
from baton.benchmarks.scratch import scratch_folder
from baton.benchmarks.served import Served
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.device import Device
from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.sampling import SamplingParams

from ..cuda.small_model import SHAPE
from ..engine.fp8_folders import FORMS, write_fp8

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_tokens_are_those_of_the_bfloat16_twin(
    tmp_path: Path, with_cupy: dict[str, str], monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    """Prompts and steps of few rows, whose bits are equal."""
    for name, value in with_cupy.items():
        monkeypatch.setenv(name, value)
    form = next(form for form in FORMS if form.name == "inverse")
    folder, twin = write_fp8(write_checkpoint(tmp_path / "a", SHAPE, "BF16"), tmp_path / "b", form)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, SHAPE.vocab, count).tolist() for count in (3, 9, 15)]
    # Paths of sockets are too long below tmp_path.
    flags = ("--device=cuda", "--kv-blocks=64")
    with scratch_folder() as place, Served(place, folder, flags=flags) as served:
        found = [
            [token for output in served.client.generate(prompt, GREEDY) for token in output.tokens]
            for prompt in prompts
        ]
        assert "F8_E4M3" in served.client.describe().card.numerics
    runner = load_runner(RunnerConfig(model=str(twin), num_blocks=64), backend=CudaBackend(device))
    engine = LLMEngine(runner)
    expected = [engine.generate([prompt], [GREEDY])[0] for prompt in prompts]
    assert found == [context.tokens.generated.tolist() for context in expected]
