"""Decode and prefill attention against their definition, on fresh random data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.kernels.cuda.attention_plan import DecodeShape
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.reference import from_bf16

from .attention_cases import (
    Case,
    Chunks,
    assert_rounds_to,
    chunks,
    decode_case,
    distance,
    expected_decode,
    expected_prefill,
    prefill_case,
    rising_case,
    run_decode,
    run_prefill,
)

Array = npt.NDArray[np.generic]
Schedules = Callable[[Callable[[], Sequence[Array]]], list[Array]]

DECODE_SHAPES = [
    {"dim": 128, "group": 1, "kv_heads": 3, "block_size": 16},
    {"dim": 64, "group": 2, "kv_heads": 2, "block_size": 8},
    {"dim": 128, "group": 3, "kv_heads": 1, "block_size": 32},
    {"dim": 128, "group": 4, "kv_heads": 2, "block_size": 64},
    {"dim": 64, "group": 5, "kv_heads": 2, "block_size": 24},
    {"dim": 128, "group": 6, "kv_heads": 1, "block_size": 8},
    {"dim": 64, "group": 7, "kv_heads": 2, "block_size": 16},
    {"dim": 128, "group": 8, "kv_heads": 2, "block_size": 16},
    {"dim": 64, "group": 12, "kv_heads": 1, "block_size": 32},
    {"dim": 128, "group": 16, "kv_heads": 1, "block_size": 40},
    {"dim": 32, "group": 1, "kv_heads": 4, "block_size": 16},
    {"dim": 32, "group": 9, "kv_heads": 2, "block_size": 24},
]
PREFILL_SHAPES = [
    *DECODE_SHAPES,
    {"dim": 64, "group": 128, "kv_heads": 1, "block_size": 8},
    {"dim": 80, "group": 1, "kv_heads": 3, "block_size": 64},
    {"dim": 80, "group": 3, "kv_heads": 1, "block_size": 24},
]


def name_of(shape: dict[str, int]) -> str:
    return "-".join(f"{key}{value}" for key, value in shape.items())


# ------------------------------------------------------------------------------------------ decode


@pytest.mark.sanitized
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("shape", DECODE_SHAPES, ids=name_of)
def test_decode(device: Device, rng: np.random.Generator, shape: dict, window: int) -> None:
    block = shape["block_size"]
    lengths = [1, block, block + 1, *rng.integers(2, 300, 3), 0]
    case = decode_case(rng, lengths, window, **shape)
    for chunk in (64, 1024):
        assert_rounds_to(run_decode(device, case, chunk)[0], expected_decode(case))


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_partial_results_are_exact_to_float32(
    device: Device, rng: np.random.Generator, dim: int
) -> None:
    """Nothing but the weights is rounded to bf16 before the output."""
    case = decode_case(rng, [200, 129], dim=dim)
    _, partial, stats = run_decode(device, case, chunk=64)
    expected = expected_decode(case)
    for s, slots in ((0, slice(0, 4)), (1, slice(4, 7))):
        peaks, weights = np.asarray(stats[slots], np.float64).transpose(2, 0, 1)
        assert (peaks == np.round(peaks)).all()
        by = np.exp2(peaks - peaks.max(axis=0))
        total = (np.asarray(partial[slots], np.float64) * by[..., None]).sum(axis=0)
        result = total / (by * weights).sum(axis=0)[:, None]
        errors = [distance(*pair) for pair in zip(result, expected[s], strict=True)]
        assert max(errors) < 1e-3  # a heavy weight near the middle of two steps of bf16
        assert np.median(errors) < 1e-6


def test_one_key_is_its_value(device: Device, rng: np.random.Generator) -> None:
    case = decode_case(rng, [1, 1, 9], window=1)
    out = run_decode(device, case)[0]
    for s, position in enumerate((0, 0, 8)):
        value = case.kv_layer[case.tables[s, position // 16], 1, :, position % 16]
        np.testing.assert_array_equal(out[s], np.repeat(value, 4, axis=0))


def test_empty_splits(device: Device, rng: np.random.Generator) -> None:
    """A piece without positions adds nothing; a sequence of nothing but such is zeros."""
    case = decode_case(rng, [70, 40])
    shape = DecodeShape(2, 6, 1024)
    items = [(0, 0, 32, 0), (0, 32, 32, 1), (0, 32, 70, 2), (1, 5, 5, 3), (1, 0, 0, 4)]
    rows = [(5, 0, 0, 0), (0, 3, 0, 0), (3, 2, 0, 0), *items, (0, 0, 0, 0)]
    out = run_decode(device, case, plan=(shape, np.array(rows, np.int32)))[0]
    assert_rounds_to(out[:1], expected_decode(case)[:1])
    assert not out[1].any()


def test_large_scores(device: Device, rng: np.random.Generator) -> None:
    """Weights far below the peak vanish, and the peak rises many times."""
    case = decode_case(rng, [256, 100], dim=64)
    case = replace(case, scale=8.0)
    assert_rounds_to(run_decode(device, case, 64)[0], expected_decode(case))


@pytest.mark.parametrize(
    "shape", [DECODE_SHAPES[3], DECODE_SHAPES[6], DECODE_SHAPES[11]], ids=name_of
)
def test_decode_bits(
    device: Device, rng: np.random.Generator, schedules: Schedules, shape: dict
) -> None:
    """Neither the schedule, nor the grid, nor the place of blocks, nor the batch decides a bit."""
    lengths = [150, 3, 97]
    case = decode_case(rng, lengths, **shape)
    out = schedules(lambda: run_decode(device, case, 64, blocks=5)[:1])[0]
    assert np.isfinite(from_bf16(out)).all()
    for blocks in (1, 2, 40):
        np.testing.assert_array_equal(run_decode(device, case, 64, blocks)[0], out)
    np.testing.assert_array_equal(run_decode(device, case.moved(rng), 64)[0], out)
    for s in range(len(lengths)):
        alone = replace(
            case, q=case.q[s : s + 1], tables=case.tables[s : s + 1], seen=case.seen[s : s + 1]
        )
        np.testing.assert_array_equal(run_decode(device, alone, 64)[0][0], out[s])


def test_splits_change_rounding_only(device: Device, rng: np.random.Generator) -> None:
    case = decode_case(rng, [300, 64, 65])
    whole = from_bf16(run_decode(device, case, 1024)[0])
    for chunk in (64, 100, 128):
        assert distance(from_bf16(run_decode(device, case, chunk)[0]), whole) < 5e-4


@pytest.mark.parametrize("chunk", [64, 256, 1024])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_decode_of_long_sequences(
    device: Device, rng: np.random.Generator, dim: int, chunk: int
) -> None:
    """Up to 47 splits, more than the lanes that combine them; look-ups go round many times."""
    case = decode_case(rng, [3000, 2100, 40], dim=dim, kv_heads=1)
    assert_rounds_to(run_decode(device, case, chunk)[0], expected_decode(case))


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_the_largest_score_may_be_in_any_split(
    device: Device, rng: np.random.Generator, dim: int
) -> None:
    case = rising_case(rng, 40 * 64, dim=dim)
    assert_rounds_to(run_decode(device, case, 64)[0], expected_decode(case))


# ----------------------------------------------------------------------------------------- prefill


LONG_PROMPTS = [([(0, 700)], 0), ([(600, 130), (37, 300)], 0), ([(900, 64), (0, 9)], 333)]


@pytest.mark.parametrize(("spans", "window"), LONG_PROMPTS)
@pytest.mark.parametrize("dim", [32, 64, 80, 128])
def test_prefill_of_long_prompts(
    device: Device,
    rng: np.random.Generator,
    dim: int,
    spans: list[tuple[int, int]],
    window: int,
) -> None:
    """Blocks are looked up for 256 positions at once, and the next ones ahead."""
    rows = chunks(*spans)
    case = prefill_case(rng, rows, window, dim=dim, kv_heads=1)
    assert_rounds_to(run_prefill(device, case, rows), expected_prefill(case, rows))


@pytest.mark.sanitized
@pytest.mark.parametrize("window", [0, 29])
@pytest.mark.parametrize("shape", PREFILL_SHAPES, ids=name_of)
def test_prefill(device: Device, rng: np.random.Generator, shape: dict, window: int) -> None:
    tokens = max(1, 128 // shape["group"])
    spans = [(0, int(tokens + rng.integers(1, 9))), (int(rng.integers(1, 150)), 3), (64, 1), (0, 0)]
    rows = chunks(*(spans if shape["group"] < 100 else [(70, 3), (0, 2)]))
    case = prefill_case(rng, rows, window, **shape)
    assert_rounds_to(run_prefill(device, case, rows), expected_prefill(case, rows))


def test_prefill_looks_both_ways(device: Device, rng: np.random.Generator) -> None:
    """Rows see the keys up to their ``positions``, in any order."""
    rows = Chunks([np.full(40, 39, np.int32), np.array([7, 80, 0, 33], np.int32)])
    case = prefill_case(rng, rows)
    case = replace(case, scale=0.4)
    assert_rounds_to(run_prefill(device, case, rows), expected_prefill(case, rows))


@pytest.mark.parametrize("dim", [32, 64, 80])
def test_groups_of_rows_that_see_each_other(
    device: Device, rng: np.random.Generator, schedules: Schedules, dim: int
) -> None:
    """Windows of 64 patches and what is left at the edges, a row alone, and a whole image.

    Every row sees its whole group, and no key of another: the pool is NaN elsewhere.
    """
    sizes = [64, 64, 32, 1, 300, 16]
    rows = Chunks([np.full(size, size - 1, np.int32) for size in sizes])
    case = prefill_case(rng, rows, dim=dim, kv_heads=2, group=1, block_size=64)
    out = schedules(lambda: [run_prefill(device, case, rows)])[0]
    assert_rounds_to(out, expected_prefill(case, rows))
    np.testing.assert_array_equal(run_prefill(device, case.moved(rng), rows), out)
    first = 0
    for s, size in enumerate(sizes):
        alone = replace(case, q=case.q[first : first + size], tables=case.tables[s : s + 1])
        group = run_prefill(device, alone, Chunks([rows.positions[s]]))
        np.testing.assert_array_equal(group, out[first : first + size])
        first += size


@pytest.mark.parametrize("window", [0, 50])
def test_prefill_bits(
    device: Device, rng: np.random.Generator, schedules: Schedules, window: int
) -> None:
    """Neither the schedule, nor the place of blocks, nor batch and chunk decide a bit of a row."""
    rows = chunks((0, 90), (30, 11))
    case = prefill_case(rng, rows, window, dim=64, group=4, kv_heads=1)
    out = schedules(lambda: [run_prefill(device, case, rows)])[0]
    np.testing.assert_array_equal(run_prefill(device, case.moved(rng), rows), out)
    for first, last in ((0, 37), (37, 38), (38, 90)):
        part = chunks((first, last - first))
        alone = replace(case, q=case.q[first:last], tables=case.tables[:1])
        np.testing.assert_array_equal(run_prefill(device, alone, part), out[first:last])


def test_decode_agrees_with_prefill(device: Device, rng: np.random.Generator) -> None:
    """The kernels share weights and their rounding; only the order of sums differs."""
    case = decode_case(rng, [140, 21])
    decoded = from_bf16(run_decode(device, case)[0])
    filled = from_bf16(run_prefill(device, case, chunks((139, 1), (20, 1))))
    assert distance(decoded, filled) < 5e-4


# --------------------------------------------------------------------------------- wrong arguments


def spoil(case: Case, what: str) -> Case:
    """Return the case with one thing wrong."""
    pool = case.kv_layer
    wrong: dict[str, Callable[[], Case]] = {
        "dtype": lambda: replace(case, q=case.q.astype(np.float32)),
        "pool dtype": lambda: replace(case, kv_layer=pool.astype(np.float32)),
        "stride": lambda: replace(case, kv_layer=pool.transpose(0, 1, 3, 2, 4)),
        "table dtype": lambda: replace(case, tables=case.tables.astype(np.int64)),
        "head dim": lambda: replace(case, q=case.q[..., :96], kv_layer=pool[..., :96].copy()),
        "block size": lambda: replace(case, kv_layer=pool[:, :, :, :12].copy()),
        "heads": lambda: replace(case, q=case.q[:, :7]),
        "rows": lambda: replace(case, q=case.q[:-1]),
        "scale": lambda: replace(case, scale=0.0),
        "infinite scale": lambda: replace(case, scale=float("inf")),
    }
    return wrong[what]()


WRONG = [
    "dtype", "pool dtype", "stride", "table dtype", "head dim", "block size", "heads", "rows",
    "scale", "infinite scale",
]  # fmt: skip


class Refusing:
    """A device that uploads arrays and must not launch kernels."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.name = device.name
        self.empty, self.zeros, self.download = device.empty, device.zeros, device.download

    def upload(self, array: Array) -> Array:
        return array

    def synchronize(self) -> None: ...

    def launch(self, *_: object) -> None:
        pytest.fail("launched with wrong arguments")


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_refused(rng: np.random.Generator, device: Device, what: str) -> None:
    refusing = Refusing(device)
    case = decode_case(rng, [16, 16])
    plan = DecodeShape(2, 4, 64), np.zeros((7, 4), np.int32)
    with pytest.raises(ValueError, match=r"\w"):
        run_decode(refusing, spoil(case, what), plan=plan)
    with pytest.raises(ValueError, match=r"\w"):
        run_prefill(refusing, spoil(case, what), chunks((15, 1), (15, 1)))
