"""Bugs planted in the kernels that move KV blocks: the suite finds each, in every order."""

from __future__ import annotations

import pytest

from .block_moves import CASES, RESLICES, check_gather, check_reslice, check_scatter
from .host_device import LaunchFailed

PLANTED = [
    ("BATON_PLANT_TABLE", check_gather, CASES["whole blocks"]),
    ("BATON_PLANT_TABLE", check_scatter, CASES["smaller blocks"].encoded("fp8_token")),
    ("BATON_PLANT_STALE_SCALE", check_gather, CASES["small tiles"].encoded("int8_head")),
    ("BATON_PLANT_STALE_SCALE", check_gather, CASES["small tiles"].encoded("fp8_token")),
    ("BATON_PLANT_NO_BARRIER", check_gather, CASES["large tiles"].encoded("fp8_head")),
]


@pytest.mark.parametrize(("bug", "check", "case"), PLANTED)
def test_a_planted_bug_is_found(host_device, rng, bug, check, case):
    planted = host_device.with_defines(bug)
    for seed in range(9):
        with (
            planted.order(seed),
            planted.watching_races(),
            pytest.raises((AssertionError, LaunchFailed)),
        ):
            check(planted, lambda run: run(), rng, case)


def test_a_wrong_block_of_a_reslice_is_found(host_device, rng):
    planted = host_device.with_defines("BATON_PLANT_TABLE")
    for name in RESLICES:
        with pytest.raises((AssertionError, LaunchFailed)):
            check_reslice(planted, lambda run: run(), rng, name)
