"""Bugs planted into the attention kernels by macros: comparison with the definition sees each."""

from __future__ import annotations

import pytest

from .attention_cases import (
    assert_rounds_to,
    chunks,
    decode_case,
    expected_decode,
    expected_prefill,
    prefill_case,
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


@pytest.mark.parametrize("bug", PLANTED)
def test_prefill(host_device, rng, bug):
    window = 40 if bug == "WINDOW" else 0
    rows = chunks((120, 40), (0, 9))
    case = prefill_case(rng, rows, window, kv_heads=1)
    planted = host_device.with_defines(f"BATON_PLANT_{bug}")
    expected = expected_prefill(case, rows)
    assert wrong_orders(host_device, lambda device: run_prefill(device, case, rows), expected) == 0
    wrong = wrong_orders(planted, lambda device: run_prefill(device, case, rows), expected)
    assert wrong >= len(SEEDS) - 2
