"""A cluster of CUDA workers with int8 keys and values gives the tokens of one worker alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.device import Device
from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig

from ..cuda.small_model import SHAPE
from .failing_cluster import GREEDY, failing_cluster, generated


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("handoff", "kernel"), [("auto", "decode_attention_int8"), ("zmq", "widen_kv")]
)
def test_tokens_are_those_of_one_worker_also_after_a_failure(
    tmp_path: Path,
    with_cupy: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    handoff: str,
    kernel: str,
) -> None:
    """By mapped memory and by frames of the host; the worker that runs the kernel ends once."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, SHAPE.vocab, count).tolist() for count in (3, 9, 16)]
    prompts.append(prompts[2] + prompts[1])  # begins with a block that the prefix cache has
    flags = ("--kv-type=int8", f"--handoff={handoff}")
    with failing_cluster(tmp_path, with_cupy, monkeypatch, kernel, *flags) as cluster:
        served, folder, order = cluster
        found = [generated(served.client, prompts)]
        card = served.client.describe().card
        assert card.numerics.endswith("/kv-int8") and card.layout.dtype == "int8"
        if with_cupy:  # a real GPU does not fail on demand
            order.touch()
        found.append(generated(served.client, prompts))
        assert not order.exists()
        assert ("device lost: CUDARuntimeError" in served.log.read_text()) == bool(with_cupy)
    config = RunnerConfig(model=str(folder), num_blocks=64, kv_type="int8")
    engine = LLMEngine(load_runner(config, backend=CudaBackend(device)))
    alone = [engine.generate([prompt], [GREEDY])[0].tokens.generated.tolist() for prompt in prompts]
    assert found == [alone, alone]
