"""Prefill attention by wgmma: on the CPU's form of it, and on a GPU that has it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.kernels.cuda.attention import WGMMA_DIMS, box_rows
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
KINDS = {kind: Tuning(prefill=kind) for kind in ("wgmma", "bulk")}
"""Threads copy, or the bulk copy engine does where all of a tile may be read."""
SHAPES = [
    *(shape for shape in DECODE_SHAPES if shape["dim"] in WGMMA_DIMS),
    {"dim": 64, "group": 128, "kv_heads": 1, "block_size": 8},
]
SEEDS = range(8)
kinds = pytest.mark.parametrize("kind", KINDS)


def tuned(device: Device, kind: str, blocks: int = 3) -> Device:
    """A device with the kernel, and few thread blocks, so that each takes several tiles."""
    if not (isinstance(device, HostDevice) or device.name.startswith("cuda-sm_90-")):
        pytest.skip("wgmma is for sm_90 alone")
    chosen = copy.copy(device.tuned(KINDS[kind]))
    chosen.multiprocessors = blocks
    return chosen


@pytest.mark.sanitized
@kinds
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_prefill(
    device: Device, rng: np.random.Generator, shape: dict, window: int, kind: str
) -> None:
    block = shape["block_size"]
    rows = chunks((0, 5), (block - 1, 2), (150, int(rng.integers(20, 60))), (3, 0), (260, 1))
    case = prefill_case(rng, rows, window, **shape)
    assert_rounds_to(run_prefill(tuned(device, kind), case, rows), expected_prefill(case, rows))


@kinds
@pytest.mark.parametrize("dim", [64, 128])
def test_long_prompts(device: Device, rng: np.random.Generator, dim: int, kind: str) -> None:
    """Six tiles of keys; a chunk that ends at 964; a window that begins within a tile."""
    for spans, window in ((((0, 700),), 0), (((900, 64),), 0), (((900, 64), (130, 9)), 500)):
        rows = chunks(*spans)
        case = prefill_case(rng, rows, window, dim=dim, kv_heads=1, group=2)
        assert_rounds_to(run_prefill(tuned(device, kind), case, rows), expected_prefill(case, rows))


@kinds
def test_bits(device: Device, rng: np.random.Generator, schedules: Schedules, kind: str) -> None:
    """Neither the schedule, nor the grid, nor the place of blocks, nor the chunk decides a bit."""
    rows = chunks((0, 70), (200, 33), (131, 4))
    case = prefill_case(rng, rows, 0, dim=64, group=4, kv_heads=1)
    out = schedules(lambda: [run_prefill(tuned(device, kind), case, rows)])[0]
    for blocks in (1, 40):
        np.testing.assert_array_equal(run_prefill(tuned(device, kind, blocks), case, rows), out)
    np.testing.assert_array_equal(run_prefill(tuned(device, kind), case.moved(rng), rows), out)
    for s, (first, last) in enumerate(zip(rows.offsets, rows.offsets[1:], strict=False)):
        for piece in (slice(first, last), slice(first + 3, last)):
            alone = replace(
                case, q=case.q[piece], tables=case.tables[s : s + 1], seen=case.seen[s : s + 1]
            )
            part = Chunks([rows.flat[piece]])
            found = run_prefill(tuned(device, kind), alone, part)
            np.testing.assert_array_equal(found, out[piece])


@pytest.mark.parametrize(
    ("dim", "block_size"), [(64, 8), (64, 24), (128, 16), (128, 64), (64, 128), (64, 256)]
)
def test_bulk_copies_give_the_bits_of_copies_by_threads(
    device: Device, rng: np.random.Generator, dim: int, block_size: int
) -> None:
    """Boxes of 8, 16, 64 and 128 rows; windows that begin and end within a tile."""
    for spans, window in ((((300, 30), (129, 2)), 0), (((500, 20),), 300)):
        rows = chunks(*spans)
        case = prefill_case(rng, rows, window, dim=dim, kv_heads=2, group=2, block_size=block_size)
        both = [run_prefill(tuned(device, kind), case, rows) for kind in KINDS]
        np.testing.assert_array_equal(*both)
        assert_rounds_to(both[0], expected_prefill(case, rows))


def test_boxes_lie_within_blocks() -> None:
    assert [box_rows(n) for n in (8, 16, 24, 40, 48, 64, 128, 256)] == [
        8, 16, 8, 8, 16, 64, 128, 128,
    ]  # fmt: skip


def test_the_other_kernel_differs_by_rounding_alone(
    device: Device, rng: np.random.Generator
) -> None:
    rows = chunks((0, 200))
    case = prefill_case(rng, rows, kv_heads=1)
    devices = tuned(device, "wgmma"), device.tuned(Tuning())
    assert distance(*(from_bf16(run_prefill(d, case, rows)) for d in devices)) < 5e-4


PLANTED = [
    "BLOCK_TABLE", "WINDOW", "CAUSAL_MASK", "SWIZZLE", "STAGE", "PARTS", "SCORES_WAIT", "ARRIVED",
    "LOOK_AHEAD",
]  # fmt: skip
PLANTED_BULK = ["STAGE", "EXPECT", "EDGE"]


@pytest.mark.parametrize(
    ("kind", "bug"),
    [*(("wgmma", bug) for bug in PLANTED), *(("bulk", bug) for bug in PLANTED_BULK)],
)
def test_planted_bugs_are_caught(
    host_device: HostDevice, rng: np.random.Generator, kind: str, bug: str
) -> None:
    """A tile's copies or products that nobody waits for show in some orders."""
    window = 40 if bug == "WINDOW" else 0
    rows = chunks((400, 40), (120, 9)) if bug != "LOOK_AHEAD" else chunks((600, 40))
    case = prefill_case(rng, rows, window, kv_heads=1)
    expected = expected_prefill(case, rows)
    planted = host_device.with_defines(f"BATON_PLANT_{bug}")
    assert wrong_orders(host_device, kind, case, rows, expected) == 0
    assert wrong_orders(planted, kind, case, rows, expected) >= 2


def wrong_orders(device, kind, case, rows, expected):
    """In how many orders of threads the kernel fails or is wrong."""
    wrong = 0
    for seed in SEEDS:
        with device.order(seed):
            try:
                assert_rounds_to(run_prefill(tuned(device, kind), case, rows), expected)
            except (LaunchFailed, AssertionError):
                wrong += 1
    return wrong
