"""Bugs planted into the attention kernels by macros: comparison with the definition sees each."""

from __future__ import annotations

from functools import partial

import pytest

from .attention_cases import (
    assert_rounds_to,
    chunks,
    decode_case,
    expected_decode,
    expected_prefill,
    prefill_case,
    rising_case,
    run_decode,
    run_prefill,
)
from .host_device import LaunchFailed

SEEDS = range(8)
PLANTED = ["BARRIER", "ASYNC_WAIT", "BLOCK_TABLE", "WINDOW", "CAUSAL_MASK"]


def wrong_orders(device, run, expected):
    """In how many orders of threads and blocks a kernel fails or is wrong."""
    wrong = 0
    for seed in SEEDS:
        with device.order(seed):
            try:
                assert_rounds_to(run(device), expected)
            except (LaunchFailed, AssertionError):
                wrong += 1
    return wrong


@pytest.mark.parametrize("bug", PLANTED)
def test_decode(host_device, rng, bug):
    window = 90 if bug == "WINDOW" else 0
    case = decode_case(rng, [200, 75], window)
    planted = host_device.with_defines(f"BATON_PLANT_{bug}")
    expected = expected_decode(case)
    assert wrong_orders(host_device, lambda device: run_decode(device, case)[0], expected) == 0
    wrong = wrong_orders(planted, lambda device: run_decode(device, case)[0], expected)
    assert wrong >= len(SEEDS) - 2


@pytest.mark.parametrize("dim", [80, 128])
@pytest.mark.parametrize("bug", PLANTED)
def test_prefill(host_device, rng, bug, dim):
    window = 40 if bug == "WINDOW" else 0
    rows = chunks((120, 40), (0, 9))
    case = prefill_case(rng, rows, window, kv_heads=1, dim=dim)
    planted = host_device.with_defines(f"BATON_PLANT_{bug}")
    expected = expected_prefill(case, rows)
    assert wrong_orders(host_device, lambda device: run_prefill(device, case, rows), expected) == 0
    wrong = wrong_orders(planted, lambda device: run_prefill(device, case, rows), expected)
    assert wrong >= len(SEEDS) - 2


def test_splits_whose_maximum_is_not_looked_at(host_device, rng):
    """Beyond 32 splits a lane combines more than one."""
    case = rising_case(rng, 40 * 64)
    expected = expected_decode(case)
    planted = host_device.with_defines("BATON_PLANT_FIRST_SPLITS")
    assert_rounds_to(run_decode(host_device, case, 64)[0], expected)
    with pytest.raises(AssertionError):
        assert_rounds_to(run_decode(planted, case, 64)[0], expected)
    short = decode_case(rng, [200, 75])  # what the other tests see of it
    assert_rounds_to(run_decode(planted, short, 64)[0], expected_decode(short))


@pytest.mark.parametrize("bug", ["STALE_ITEM", "LAST_SPLIT", "COMBINE_BARRIER"])
def test_bugs_between_items_and_splits(host_device, rng, bug):
    """A block with several items, sequences of several splits."""
    case = decode_case(rng, [200, 75])
    planted = host_device.with_defines(f"BATON_PLANT_{bug}")
    expected = expected_decode(case)
    run = partial(run_decode, case=case, chunk=64, blocks=2)
    assert wrong_orders(host_device, lambda device: run(device)[0], expected) == 0
    assert wrong_orders(planted, lambda device: run(device)[0], expected) >= len(SEEDS) - 2


def test_blocks_that_are_looked_up_too_late(host_device, rng):
    """A look-up is for 256 positions."""
    planted = host_device.with_defines("BATON_PLANT_LOOK_AHEAD")
    for span, seen in (((0, 200), True), ((200, 150), False)):
        rows = chunks(span)
        case = prefill_case(rng, rows, kv_heads=1)
        expected = expected_prefill(case, rows)
        assert_rounds_to(run_prefill(host_device, case, rows), expected)
        if seen:
            assert_rounds_to(run_prefill(planted, case, rows), expected)
            continue
        with pytest.raises((AssertionError, LaunchFailed)):
            assert_rounds_to(run_prefill(planted, case, rows), expected)
