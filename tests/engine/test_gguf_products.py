"""Whole GGUF models computed with their integers, and with the floats that these stand for."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernels.load import compiled_kernels_problem
from baton.engine.loading import gguf_folder
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig

from .gguf_cases import gguf, random_tensor, write
from .gguf_models import demo_tokenizer, quantized, sizes, write_file, write_reference
from .test_models import logits_of

pytestmark = pytest.mark.skipif(bool(compiled_kernels_problem()), reason="no compiled kernels")
PROMPT = np.random.default_rng(5).integers(3, 1024, 90).astype(np.int32)
ROWS = np.array([20, 50, 89])


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf_folder._made.cache_clear()
    yield
    gguf_folder._made.cache_clear()


def run(model, backend="cpu", budget=1 << 20):
    """The runner and its logits."""
    # Keys and values in float32 on both sides: only the products differ.
    runner = load_runner(
        RunnerConfig(model=str(model), backend=backend, num_blocks=64, kv_type="float32")
    )
    return runner, logits_of(runner, PROMPT, ROWS, budget)


def test_floats_give_the_logits_of_the_values(tmp_path):
    _, expected = run(write_reference(tmp_path / "reference", dtype="F32"))
    runner, logits = run(write_file(tmp_path), "cpu-floats")
    np.testing.assert_allclose(logits, expected, atol=1e-3, rtol=0)
    assert "int8" not in runner.card.numerics


def test_integers_give_nearly_the_logits_of_floats(tmp_path):
    file = write_file(tmp_path)
    (runner, logits), (floats, expected) = run(file), run(file, "cpu-floats")
    error = np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2))
    assert 0 < error < 0.05
    assert runner.card.numerics.endswith("/int8-1")
    assert runner.card.mismatch(floats.card)
    assert np.array_equal(run(file, "cpu", 7)[1], logits)


def test_quantized_weights_stay_as_small_as_the_file(tmp_path):
    tensors = quantized(1)
    rng = np.random.default_rng(2)
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = random_tensor("Q6_K", (1024, 256), rng, 4e-5)
    file = write(tmp_path, gguf({**sizes(), **demo_tokenizer()}, tensors))
    runner, logits = run(file)
    assert runner.pipeline.model.weights_bytes <= 1.1 * file.stat().st_size
    _, expected = run(file, "cpu-floats")
    assert np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2)) < 0.05
