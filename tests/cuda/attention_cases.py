"""Random paged caches and runs of the attention kernels over them, for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from baton.engine.kernels import kv_rows
from baton.engine.kernels.bfloat16 import bfloat16_bits
from baton.engine.kernels.cuda import attention as launchers
from baton.engine.kernels.cuda import reference_attention
from baton.engine.kernels.cuda.attention_plan import (
    DecodeShape,
    plan_decode,
    plan_prefill,
)
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.reference import from_bf16, to_bf16
from baton.engine.kernels.cuda.reference_int8 import laid_out

Array = npt.NDArray[np.generic]
NAN = np.uint16(0x7FC1)
NOWHERE = 1 << 28
"""A block id that no pool has: reading it is a fault."""


@dataclass(frozen=True)
class Case:
    """Sequences in a pool that holds NaN wherever no row may look, tables that lead nowhere there.

    ``seen[s]`` are the positions that some row of sequence ``s`` sees.
    """

    q: Array
    kv_layer: Array
    tables: Array
    seen: Sequence[tuple[int, int]]
    window: int
    scale: float

    def moved(self, rng: np.random.Generator) -> Case:
        """Return the same content in other blocks."""
        to = rng.permutation(len(self.kv_layer)).astype(np.int32)
        pool = np.empty_like(self.kv_layer)
        pool[to] = self.kv_layer
        named = self.tables < len(pool)
        tables = np.where(named, to[np.where(named, self.tables, 0)], NOWHERE).astype(np.int32)
        return replace(self, kv_layer=pool, tables=tables)


def make_case(
    rng: np.random.Generator,
    rows: int,
    seen: Sequence[tuple[int, int]],
    dim: int = 128,
    kv_heads: int = 2,
    group: int = 4,
    block_size: int = 16,
    window: int = 0,
) -> Case:
    """Draw queries for ``rows`` and a cache of which exactly the ``seen`` positions are filled."""
    width = max(1, max(-(-end // block_size) for _, end in seen)) + 1
    count = sum(-(-end // block_size) for _, end in seen) + 2
    pool = np.full((count, 2, kv_heads, block_size, dim), NAN, np.uint16)
    tables = np.full((len(seen), width), NOWHERE, np.int32)
    free = list(rng.permutation(count))
    for s, (begin, end) in enumerate(seen):
        for position in range(begin, end):
            block = position // block_size
            if tables[s, block] == NOWHERE:
                tables[s, block] = free.pop()
            drawn = rng.standard_normal((2, kv_heads, dim), np.float32)
            pool[tables[s, block], :, :, position % block_size] = to_bf16(drawn)
    q = to_bf16(rng.standard_normal((rows, kv_heads * group, dim), np.float32) * 2)
    return Case(q, pool, tables, seen, window, 1.2 / dim**0.5)


def int8_twin(case: Case, rng: np.random.Generator, powers: int = 6) -> tuple[Case, Case]:
    """Return a case over an int8 pool, and one over a bfloat16 pool with the same values.

    What no row may see has random codes, and NaN for a magnitude. The sizes of rows differ by up
    to ``powers`` powers of two in each direction.
    """
    nowhere = from_bf16(case.kv_layer).astype(np.float32)
    sizes = np.exp2(rng.integers(-powers, powers + 1, nowhere.shape[:4])).astype(np.float32)
    rows = kv_rows.stored(nowhere * sizes[..., None], "int8")
    unseen = (case.kv_layer == NAN).all(axis=-1)
    rows[unseen] = rng.integers(-128, 128, (int(unseen.sum()), rows.shape[-1]))
    rows[unseen, -2:] = np.array([NAN], np.uint16).view(np.int8)
    wide = np.where(unseen[..., None], NAN, bfloat16_bits(kv_rows.opened(rows)))
    return replace(case, kv_layer=laid_out(rows)), replace(case, kv_layer=wide)


# ------------------------------------------------------------------------------------------ decode


def decode_case(
    rng: np.random.Generator, lengths: Sequence[int], window: int = 0, **shape: int
) -> Case:
    """One query row per sequence, at its last position."""
    seen = [(max(0, n - window) if window else 0, n) for n in lengths]
    return make_case(rng, len(lengths), seen, window=window, **shape)


def lengths_of(case: Case) -> npt.NDArray[np.int32]:
    """Return the length of each sequence."""
    return np.array([end for _, end in case.seen], np.int32)


def decode_plan(case: Case, chunk: int) -> tuple[DecodeShape, npt.NDArray[np.int32]]:
    """Return the plan of a case, in a buffer with room to spare."""
    lengths = lengths_of(case)
    shape = DecodeShape.longest(len(lengths), int(lengths.max()) + 1, chunk, case.window)
    plan = np.full((shape.rows, 4), -7, np.int32)
    plan_decode(shape, lengths, plan)
    return shape, plan


def run_decode(
    device: Device,
    case: Case,
    chunk: int = 1024,
    blocks: int = 3,
    plan: tuple[DecodeShape, npt.NDArray[np.int32]] | None = None,
) -> list[Array]:
    """Return ``out`` and, undivided, the partial results and their statistics."""
    shape, rows = plan or decode_plan(case, chunk)
    heads, dim = case.q.shape[1:]
    out = device.empty(case.q.shape, np.uint16)
    partial = device.empty((shape.items, heads, dim), np.float32)
    stats = device.empty((shape.items, heads, 2), np.float32)
    launchers.decode_attention(
        device, device.upload(case.q), device.upload(case.kv_layer), device.upload(case.tables),
        device.upload(rows), shape, case.scale, partial, stats, out, blocks,
    )  # fmt: skip
    return [device.download(array) for array in (out, partial, stats)]


def expected_decode(case: Case) -> npt.NDArray[np.float64]:
    """Return the result of the definition, not rounded."""
    return reference_attention.decode_attention(
        case.q, case.kv_layer, case.tables, lengths_of(case), case.scale, case.window
    )


def rising_case(rng: np.random.Generator, length: int, **shape: int) -> Case:
    """The last key outweighs all others by a factor of 2^250.

    The kernel shifts exponents of its 2^(score - maximum). With a maximum that omits this key the
    exponent, 127 + 250, runs into the sign, and the weight is negative.
    """
    case = decode_case(rng, [length], kv_heads=1, **shape)
    block_size = case.kv_layer.shape[3]
    used = case.tables[0, : -(-length // block_size)]
    keys = from_bf16(case.kv_layer[used, 0, 0]).reshape(-1, case.q.shape[2])
    query = from_bf16(case.q[0, 0]).astype(np.float64)
    margin = query @ query - float((keys[: length - 1] @ query).max())
    at = (case.tables[0, (length - 1) // block_size], 0, 0, (length - 1) % block_size)
    case.kv_layer[at] = case.q[0, 0]
    return replace(case, scale=250 / (margin * np.log2(np.e)))


# ----------------------------------------------------------------------------------------- prefill


@dataclass(frozen=True)
class Chunks:
    """The rows of a prefill call: per sequence the positions up to which its rows see."""

    positions: Sequence[npt.NDArray[np.int32]]

    @property
    def flat(self) -> npt.NDArray[np.int32]:
        """The positions of all rows."""
        return np.concatenate(self.positions).astype(np.int32)

    @property
    def offsets(self) -> npt.NDArray[np.int32]:
        """First row of each sequence, and the number of rows."""
        return np.cumsum([0, *map(len, self.positions)]).astype(np.int32)


def chunks(*spans: tuple[int, int]) -> Chunks:
    """Rows at positions ``start .. start + count - 1`` of a sequence each, for (start, count)."""
    return Chunks([np.arange(start, start + count) for start, count in spans])


def prefill_case(rng: np.random.Generator, rows: Chunks, window: int = 0, **shape: int) -> Case:
    """Draw a cache for these rows."""
    seen = []
    for positions in rows.positions:
        first = int(positions.min(initial=0 if not len(positions) else 1 << 30))
        end = int(positions.max(initial=-1)) + 1
        seen.append((max(0, first + 1 - window) if window else 0, end))
    return make_case(rng, len(rows.flat), seen, window=window, **shape)


def run_prefill(device: Device, case: Case, rows: Chunks) -> Array:
    """Return ``out``."""
    group = case.q.shape[1] // case.kv_layer.shape[2]
    plan = plan_prefill(rows.offsets, rows.flat, group, case.window)
    out = device.empty(case.q.shape, np.uint16)
    launchers.prefill_attention(
        device, device.upload(case.q), device.upload(case.kv_layer), device.upload(case.tables),
        device.upload(rows.flat), device.upload(plan), case.scale, case.window, out,
    )  # fmt: skip
    return device.download(out)


def expected_prefill(case: Case, rows: Chunks) -> npt.NDArray[np.float64]:
    """Return the result of the definition, not rounded."""
    return reference_attention.attention(
        case.q, case.kv_layer, case.tables, rows.offsets, rows.flat, case.scale, case.window
    )


# -------------------------------------------------------------------------------------- comparison


def distance(got: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    """Relative error over the whole array; NaN where something is NaN."""
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def assert_rounds_to(got: Array, expected: npt.NDArray[np.float64]) -> None:
    """Nearly all elements are the correctly rounded result.

    The rest: sums near the middle of two steps, and rows ``[D]`` with a heavy weight near the
    middle of its steps, which float32 and float64 round to different sides. Such a weight moves
    its row by less than a step of bfloat16; one row in a hundred may have one, or a single row.
    """
    wide, exact = from_bf16(got), from_bf16(to_bf16(expected))
    assert np.isfinite(wide).all()
    assert (np.abs(wide - expected) <= 2.0**-7 * np.abs(expected) + 0.01).all()
    wide, exact = wide.reshape(-1, got.shape[-1]), exact.reshape(-1, got.shape[-1])
    norms = np.maximum(np.linalg.norm(exact, axis=1), np.finfo(np.float32).tiny)
    errors = np.linalg.norm(wide - exact, axis=1) / norms
    order = np.argsort(errors)
    split = len(order) - max(1, len(order) // 100)
    assert (errors[order[split:]] < 2.0**-7).all()
    if split:
        even = order[:split]
        assert distance(wide[even], exact[even]) < 1e-3
        assert (wide[even] == exact[even]).mean() > 0.95
