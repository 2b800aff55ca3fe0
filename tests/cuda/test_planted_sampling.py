"""Bugs planted in the sampler by a macro, each of which the comparison with the reference sees."""

from __future__ import annotations

import numpy as np
import pytest

from .host_device import HostDevice, LaunchFailed
from .test_sampling import Mask, draw, expected_tokens, spec_of

VOCAB = 600


def cases(rng):
    """Rows that use every part that a bug is planted in."""
    allowed = rng.random(VOCAB) < 0.3
    specs = [spec_of(position=i, top_k=2 + i % 3, temperature=5.0) for i in range(8)]
    specs += [spec_of(position=i, top_p=0.9, mask=Mask(allowed)) for i in range(4)]
    return rng.standard_normal((len(specs), VOCAB)).astype(np.float32), specs


def right(device, logits, specs):
    """Whether all tokens are the reference's in ascending order and under shuffled ones."""
    expected = expected_tokens(logits, specs)
    for seed in range(4):
        with device.order(seed):
            try:
                tokens = draw(device, logits, specs)
            except (LaunchFailed, AssertionError):
                return False
        if (tokens != expected).any():
            return False
    return True


@pytest.mark.parametrize("bug", ["BARRIER", "MASK", "STALE_ROW", "TOP_K"])
def test_each_is_caught(host_device: HostDevice, bug):
    logits, specs = cases(np.random.default_rng(4))
    assert right(host_device, logits, specs)
    assert not right(host_device.with_defines(f"BATON_PLANT_SAMPLE_{bug}"), logits, specs)
