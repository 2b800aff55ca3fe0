"""Decode attention over an int8 pool has the bits of a bfloat16 pool with the same values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baton.engine.kernels.cuda.reference import from_bf16
from baton.engine.kernels.cuda.tuning import Tuning

from .attention_cases import (
    assert_rounds_to,
    decode_case,
    expected_decode,
    int8_twin,
    run_decode,
)
from .host_device import LaunchFailed
from .test_attention import DECODE_SHAPES, name_of


def assert_equal_bits(found, expected):
    for got, wanted in zip(found, expected, strict=True):
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.sanitized
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("shape", DECODE_SHAPES, ids=name_of)
def test_bits_are_those_of_a_bfloat16_pool(device, rng, shape, window):
    block = shape["block_size"]
    lengths = [1, block, block + 1, *rng.integers(2, 300, 3), 0]
    narrow, wide = int8_twin(decode_case(rng, lengths, window, **shape), rng)
    for chunk in (64, 1024):
        found = run_decode(device, narrow, chunk)
        assert_equal_bits(found, run_decode(device, wide, chunk))
    assert_rounds_to(found[0], expected_decode(wide))


@pytest.mark.parametrize(
    "shape", [DECODE_SHAPES[3], DECODE_SHAPES[6], DECODE_SHAPES[11]], ids=name_of
)
def test_no_order_decides_a_bit(device, rng, schedules, shape):
    narrow, wide = int8_twin(decode_case(rng, [150, 3, 97], **shape), rng)
    found = schedules(lambda: run_decode(device, narrow, 64, blocks=5)[:1])
    assert np.isfinite(from_bf16(found[0])).all()
    assert_equal_bits(found, run_decode(device, wide, 64)[:1])
    assert_equal_bits(found, run_decode(device, narrow, 64, blocks=2)[:1])


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_long_sequences(device, rng, dim):
    narrow, wide = int8_twin(decode_case(rng, [3000, 2100, 40], dim=dim, kv_heads=1), rng)
    assert_equal_bits(run_decode(device, narrow, 256), run_decode(device, wide, 256))


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_other_stages_change_no_bit(host_device, rng, dim, stages):
    narrow, wide = int8_twin(decode_case(rng, [600], dim=dim, kv_heads=1), rng)
    other = host_device.tuned(Tuning(decode_stages=stages))
    assert_equal_bits(run_decode(other, narrow), run_decode(host_device, wide))


def test_a_row_that_is_not_finite_does_not_look_like_data(device, rng):
    case, _ = int8_twin(decode_case(rng, [20], dim=64, kv_heads=1, block_size=8), rng)
    pool = case.kv_layer.copy()
    groups = pool.reshape(len(pool), 2, 1, -1)
    groups[case.tables[0, 1], 1, 0, 8 * 64 + 2 * 3 :][:2] = np.array([0x7FFF], np.uint16).view(
        np.int8
    )
    found = from_bf16(run_decode(device, replace(case, kv_layer=pool))[0])
    assert np.isnan(found).all()


# ---------------------------------------------------------------------------------- planted bugs


PLANTED = {
    "STALE_MAGNITUDE": "values with the magnitudes of the keys",
    "UNSEEN": "magnitudes of positions that no row sees",
    "ASYNC_WAIT": "codes that nobody waits for",
    "BARRIER": "sums of warps without a barrier",
    "BLOCK_TABLE": "the block before",
    "CAUSAL_MASK": "positions after the last",
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs(host_device, rng, bug):
    """Sizes differ little: of larger ones a single key may decide, perhaps not the one at fault."""
    narrow, wide = int8_twin(decode_case(rng, [203, 75], dim=64, kv_heads=1), rng, powers=1)
    expected = run_decode(host_device, wide)[0]
    planted = host_device.with_defines(f"BATON_PLANT_{bug}")
    for seed in range(4):
        with planted.order(seed), host_device.order(seed):
            assert (run_decode(host_device, narrow)[0] == expected).all()
            try:
                found = run_decode(planted, narrow)[0]
            except LaunchFailed:
                continue
            assert (found != expected).any()


def test_a_planted_missing_barrier_of_a_warp_is_seen(host_device, rng):
    """The lanes of a warp read what others copied: without their barrier this is a race."""
    narrow, _ = int8_twin(decode_case(rng, [203], dim=64, kv_heads=1), rng)
    planted = host_device.with_defines("BATON_PLANT_SYNC_WARP")
    with host_device.watching_races():
        run_decode(host_device, narrow)
    with planted.watching_races(), pytest.raises(LaunchFailed, match="race"):
        run_decode(planted, narrow)
