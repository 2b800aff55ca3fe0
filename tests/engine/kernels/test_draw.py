"""The compiled choice of a weight against the sampler's NumPy form, which it must equal."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.sampling import sampler as module
from baton.engine.sampling.sampler import _choose
from baton.proto.sampling import SamplingParams


@pytest.fixture
def compiled_draw(compiled):
    """``draw`` on one instruction set."""
    from baton.engine.kernels import _cpu

    index = next(i for i, name, *_ in _cpu.instruction_sets() if compiled.numerics.endswith(name))
    return lambda *arguments: _cpu.draw(index, *arguments)


def make_weights(rng, size, scale, rounded):
    logits = (scale * rng.standard_normal(size)).astype(np.float32)
    logits = np.round(logits) if rounded else logits
    return np.exp(logits - logits.max())


@pytest.mark.parametrize("size", [1, 2, 5, 63, 127, 128, 129, 1000, 2048, 9000])
@pytest.mark.parametrize("rounded", [False, True])
def test_equals_the_numpy_form(compiled_draw, rng, size, rounded):
    decided = 0
    cases = [(p, m) for p in (0.0, 0.3, 0.9, 0.999, 1 - 1e-16, 1.0) for m in (0.0, 0.05, 0.7, 1.0)]
    for top_p, min_p in cases:
        params = SamplingParams(top_p=top_p, min_p=min_p)
        for scale in (0.0, 0.1, 1.0, 5.0, 40.0):
            weights = make_weights(rng, size, scale, rounded)
            share = rng.choice([0.0, 1 - 2**-53, rng.random()])
            index = compiled_draw(weights, top_p, min_p, share)
            assert index in (-1, _choose(weights, params, share)), (top_p, min_p, scale, share)
            decided += index >= 0
    assert decided > (20 if rounded else 60)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_ordinary_rows_are_decided(compiled_draw, rng, top_p, scale):
    for _ in range(5):
        weights, share = make_weights(rng, 32_000, scale, rounded=False), rng.random()
        index = compiled_draw(weights, top_p, 0.0, share)
        assert index == _choose(weights, SamplingParams(top_p=top_p), share)


@pytest.mark.parametrize("copies", [10, 100, 5000])
def test_equal_weights_at_the_cut_stay_from_the_lowest_index(compiled_draw, copies):
    weights = np.full(copies + 3, 0.25, np.float32)
    weights[[0, copies // 2, -1]] = 1.0
    total = float(weights.sum(dtype=np.float64))
    for share in np.linspace(0, 0.999, 40):
        top_p = (
            3 + 0.25 * (copies // 3) + 0.1
        ) / total  # inside the range of equal weights, not at its ends
        index = compiled_draw(weights, top_p, 0.0, share)
        assert index in (-1, _choose(weights, SamplingParams(top_p=top_p), share))
        assert index >= 0 or copies > 60


def test_bad_arguments_raise(compiled_draw):
    for weights in (np.empty(0, np.float32), np.ones(4), np.ones((2, 2), np.float32)):
        with pytest.raises(ValueError):
            compiled_draw(weights, 0.9, 0.0, 0.5)


def test_without_compiled_kernels_the_answer_is_none(monkeypatch):
    monkeypatch.setattr(module, "_compiled", None)
    assert module.compiled_draw(np.ones(4, np.float32), 1.0, 0.0, 0.5) is None
