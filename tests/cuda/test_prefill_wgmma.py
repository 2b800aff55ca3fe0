"""Prefill attention by wgmma: on the CPU's form of it, and on a GPU that has it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.kernels.cuda.attention import WGMMA_DIMS
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.reference import from_bf16
from baton.engine.kernels.cuda.tuning import Tuning

from .attention_cases import (
    Chunks,
    assert_rounds_to,
    chunks,
    distance,
    expected_prefill,
    prefill_case,
    run_prefill,
)
from .host_device import HostDevice, LaunchFailed
from .test_attention import DECODE_SHAPES, name_of

Array = npt.NDArray[np.generic]
Schedules = Callable[[Callable[[], Sequence[Array]]], list[Array]]
WGMMA = Tuning(prefill="wgmma")
SHAPES = [
    *(shape for shape in DECODE_SHAPES if shape["dim"] in WGMMA_DIMS),
    {"dim": 64, "group": 128, "kv_heads": 1, "block_size": 8},
]
SEEDS = range(8)


def tuned(device: Device, blocks: int = 3) -> Device:
    """A device with the kernel, and few thread blocks, so that each takes several tiles."""
    if not (isinstance(device, HostDevice) or device.name.startswith("cuda-sm_90-")):
        pytest.skip("wgmma is for sm_90 alone")
    chosen = copy.copy(device.tuned(WGMMA))
    chosen.multiprocessors = blocks
    return chosen


@pytest.mark.sanitized
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_prefill(device: Device, rng: np.random.Generator, shape: dict, window: int) -> None:
    block = shape["block_size"]
    rows = chunks((0, 5), (block - 1, 2), (150, int(rng.integers(20, 60))), (3, 0), (260, 1))
    case = prefill_case(rng, rows, window, **shape)
    assert_rounds_to(run_prefill(tuned(device), case, rows), expected_prefill(case, rows))


@pytest.mark.parametrize("dim", [64, 128])
def test_long_prompts(device: Device, rng: np.random.Generator, dim: int) -> None:
    """Six tiles of keys; a chunk that ends at 964; a window that begins within a tile."""
    for spans, window in ((((0, 700),), 0), (((900, 64),), 0), (((900, 64), (130, 9)), 500)):
        rows = chunks(*spans)
        case = prefill_case(rng, rows, window, dim=dim, kv_heads=1, group=2)
        assert_rounds_to(run_prefill(tuned(device), case, rows), expected_prefill(case, rows))


def test_bits(device: Device, rng: np.random.Generator, schedules: Schedules) -> None:
    """Neither the schedule, nor the grid, nor the place of blocks, nor the chunk decides a bit."""
    rows = chunks((0, 70), (200, 33), (131, 4))
    case = prefill_case(rng, rows, 0, dim=64, group=4, kv_heads=1)
    out = schedules(lambda: [run_prefill(tuned(device), case, rows)])[0]
    for blocks in (1, 40):
        np.testing.assert_array_equal(run_prefill(tuned(device, blocks), case, rows), out)
    np.testing.assert_array_equal(run_prefill(tuned(device), case.moved(rng), rows), out)
    for s, (first, last) in enumerate(zip(rows.offsets, rows.offsets[1:], strict=False)):
        for piece in (slice(first, last), slice(first + 3, last)):
            alone = replace(
                case, q=case.q[piece], tables=case.tables[s : s + 1], seen=case.seen[s : s + 1]
            )
            part = Chunks([rows.flat[piece]])
            np.testing.assert_array_equal(run_prefill(tuned(device), alone, part), out[piece])


def test_the_other_kernel_differs_by_rounding_alone(
    device: Device, rng: np.random.Generator
) -> None:
    rows = chunks((0, 200))
    case = prefill_case(rng, rows, kv_heads=1)
    both = [from_bf16(run_prefill(d, case, rows)) for d in (tuned(device), device.tuned(Tuning()))]
    assert distance(*both) < 5e-4


PLANTED = [
    "BLOCK_TABLE", "WINDOW", "CAUSAL_MASK", "SWIZZLE", "STAGE", "PARTS", "SCORES_WAIT", "ARRIVED",
    "LOOK_AHEAD",
]  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(
    host_device: HostDevice, rng: np.random.Generator, bug: str
) -> None:
    """A tile's copies or products that nobody waits for show in some orders."""
    window = 40 if bug == "WINDOW" else 0
    rows = chunks((400, 40), (120, 9)) if bug != "LOOK_AHEAD" else chunks((600, 40))
    case = prefill_case(rng, rows, window, kv_heads=1)
    expected = expected_prefill(case, rows)
    planted = host_device.with_defines(f"BATON_PLANT_{bug}")
    assert wrong_orders(host_device, case, rows, expected) == 0
    assert wrong_orders(planted, case, rows, expected) >= 2


def wrong_orders(device, case, rows, expected):
    """In how many orders of threads the kernel fails or is wrong."""
    wrong = 0
    for seed in SEEDS:
        with device.order(seed):
            try:
                assert_rounds_to(run_prefill(tuned(device), case, rows), expected)
            except (LaunchFailed, AssertionError):
                wrong += 1
    return wrong
