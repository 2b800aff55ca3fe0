"""Bugs planted in the sampler by a macro, each of which the comparison with the reference sees."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from .host_device import HostDevice, LaunchFailed
from .test_sampling import Batch, Mask, draw, expected_tokens, spec_of

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


def test_chunks_beyond_the_first_32_are_looked_at(host_device: HostDevice):
    """Vocabularies above 131,072 tokens have more chunks than a warp has lanes."""
    planted = host_device.with_defines("BATON_PLANT_SAMPLE_CHUNKS")
    specs = [spec_of(temperature=0.5), spec_of(top_k=1)]
    for chunks, is_seen in ((32, False), (33, True)):
        logits = np.zeros((len(specs), chunks * 4096), np.float32)
        logits[:, -7] = 30
        expected = expected_tokens(logits, specs)
        assert (draw(host_device, logits, specs) == expected).all()
        assert right(planted, logits, specs) != is_seen


@pytest.mark.parametrize(
    ("bug", "decimals", "filters"),
    [
        ("ABOVE", 2, {"top_p": 0.9}),  # what larger weights than a range's sum to
        ("EQUAL", 1, {"top_p": 0.5}),  # equal weights of earlier chunks, where the cut is
    ],
)
def test_bugs_in_the_passes_for_wide_rows(host_device: HostDevice, bug, decimals, filters):
    """Kept entries of a flat row, too many for a list, over three chunks."""
    planted = host_device.with_defines(f"BATON_PLANT_WIDE_{bug}")
    rng = np.random.default_rng(6)
    logits = np.round(0.3 * rng.standard_normal((6, 2048 * 4 + 77)), decimals)
    logits = logits.astype(np.float32)
    specs = [spec_of(position=i, **filters) for i in range(len(logits))]
    assert right(host_device, logits, specs)
    assert not right(planted, logits, specs)
    assert right(planted, logits[:, :600], specs)  # what short rows see of it


def test_ranges_are_read_after_a_barrier(host_device: HostDevice):
    """The watch on races sees it, in any order of the threads."""
    planted = host_device.with_defines("BATON_PLANT_WIDE_BARRIER")
    logits = np.random.default_rng(9).standard_normal((1, 4100)).astype(np.float32)
    specs = [spec_of(top_p=0.95)]
    with host_device.watching_races():
        Batch(host_device, logits, specs).run()
    with planted.watching_races(), pytest.raises(LaunchFailed, match="race"):
        Batch(planted, logits, specs).run()


def test_raw_and_adjusted_maxima_do_not_share_memory_at_once(host_device: HostDevice):
    """Only a row with log-probabilities and a ban writes both."""
    logits = np.random.default_rng(7).standard_normal((1, VOCAB)).astype(np.float32)
    planted = host_device.with_defines("BATON_PLANT_SAMPLE_MAXIMA")
    for spec, is_seen in ((spec_of(logprobs=1, banned=(3,)), True), (spec_of(logprobs=1), False)):
        with host_device.watching_races():
            Batch(host_device, logits, [spec]).run()
        with planted.watching_races(), ExitStack() as stack:
            if is_seen:
                stack.enter_context(pytest.raises(LaunchFailed, match="race"))
            Batch(planted, logits, [spec]).run()


def test_the_last_lane_of_a_block_of_sums_counts(host_device: HostDevice):
    """A block of 128 weights is summed by a warp; a bug that loses a weight shifts most draws."""
    planted = host_device.with_defines("BATON_PLANT_SAMPLE_LANE")
    logits = np.random.default_rng(8).standard_normal((8, VOCAB)).astype(np.float32)
    for filters in ({}, {"top_p": 0.9}, {"min_p": 0.05}):
        specs = [spec_of(position=i, **filters) for i in range(len(logits))]
        assert right(host_device, logits, specs)
        assert not right(planted, logits, specs)


def test_sums_of_blocks_are_read_after_a_barrier(host_device: HostDevice):
    """The watch on races sees it, in any order of the threads."""
    planted = host_device.with_defines("BATON_PLANT_SAMPLE_SUM_BARRIER")
    logits = np.random.default_rng(9).standard_normal((6, VOCAB)).astype(np.float32)
    specs = [spec_of(position=i, min_p=0.01) for i in range(len(logits))]
    with host_device.watching_races():
        Batch(host_device, logits, specs).run()
    with planted.watching_races(), pytest.raises(LaunchFailed, match="race"):
        Batch(planted, logits, specs).run()
