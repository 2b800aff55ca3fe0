"""Bugs planted in the kernels that move KV blocks: the suite finds each, in every order."""

from __future__ import annotations

import pytest

from .block_moves import CASES, check_gather, check_scatter
from .host_device import LaunchFailed

PLANTED = [
    ("BATON_PLANT_TABLE", check_gather, CASES["whole blocks"]),
    ("BATON_PLANT_TABLE", check_scatter, CASES["odd sizes"]),
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
