"""Moves of KV blocks on a device, each checked against its definition in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.engine.kernels.cuda import blocks, reference_blocks
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.payload import PayloadLayout
from baton.engine.kernels.digest import payload_digest

Array = npt.NDArray[Any]
Schedules = Callable[[Callable[[], Sequence[Array]]], list[Array]]


@dataclass(frozen=True)
class Case:
    """A pool and a part of it; `processors` is small so that every thread block takes turns."""

    pool: tuple[int, int, int, int, int]  # L, NB, Hk, BS, D
    ids: int
    blocks: int  # of the payload
    block_size: int
    heads: int
    layers: int = 2
    layer_start: int = 0
    head_start: int = 0
    processors: int = 1
    encoding: str = "bf16"

    @property
    def pool_shape(self) -> tuple[int, ...]:
        layers, blocks_, heads, size, dim = self.pool
        return (layers, blocks_, 2, heads, size, dim)

    @property
    def layout(self) -> PayloadLayout:
        return PayloadLayout(
            self.layers, self.blocks, self.heads, self.block_size, self.pool[4], self.encoding
        )

    @property
    def part(self) -> dict[str, int]:
        return {"layer_start": self.layer_start, "head_start": self.head_start}

    def encoded(self, encoding: str) -> Case:
        return replace(self, encoding=encoding)


CASES = {
    "whole blocks": Case((3, 9, 4, 16, 64), 5, 5, 16, 4, layer_start=1),
    "many pieces": Case((1, 4, 2, 16, 128), 3, 3, 16, 2, layers=1),
    "a shard": Case((2, 7, 6, 16, 32), 4, 4, 16, 2, head_start=3),
    "larger blocks": Case((2, 8, 2, 8, 40), 5, 2, 32, 2),
    "smaller blocks": Case((2, 5, 3, 32, 16), 3, 9, 8, 2, head_start=1),
    "odd sizes": Case((3, 6, 3, 12, 24), 4, 11, 4, 1, layers=1, layer_start=2, head_start=2),
    "large tiles": Case((1, 3, 2, 32, 128), 2, 2, 32, 2, layers=1),
    "small tiles": Case((3, 12, 6, 3, 8), 10, 10, 3, 6, layers=3),
    "one token": Case((1, 2, 1, 1, 8), 1, 1, 1, 1, layers=1),
}


def random_bf16(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Numbers of mixed sizes `[..., tokens, D]`; heads of zeros or tiny numbers; infinities."""
    sizes = np.exp2(rng.integers(-30, 30, (*shape[:-2], 1, 1)) + rng.normal(0, 2, (*shape[:-1], 1)))
    sizes = np.where(rng.random(sizes.shape) < 0.1, 0, sizes)
    sizes = np.where(rng.random((*shape[:-2], 1, 1)) < 0.1, 2.0**-110, sizes)
    bits = reference_blocks.rounded((rng.standard_normal(shape) * sizes).astype(np.float32))
    special = np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x8000, 0x0001, 0x807F, 0x7F7F], np.uint16)
    spoiled = (rng.random((*shape[:-2], 1, 1)) < 0.3) & (rng.random(shape) < 0.02)
    return np.where(spoiled, rng.choice(special, shape), bits).astype(np.uint16)


def random_ids(rng: np.random.Generator, case: Case) -> npt.NDArray[np.int32]:
    return rng.permutation(case.pool[1])[: case.ids].astype(np.int32)


def gather(device: Device, case: Case, pool: Array, ids: Array) -> tuple[Array, int]:
    """The payload and its digest, both of poisoned memory, from a launch on `device`."""
    payload = device.empty((case.layout.nbytes,), np.uint8)
    digest, workspace = device.empty((1,), np.uint64), device.zeros((2,), np.uint64)
    table = blocks.upload_ids(device, ids)
    blocks.gather_blocks(
        device, device.upload(pool), table, case.layout, payload, digest, workspace,
        processors=case.processors, **case.part,
    )  # fmt: skip
    assert not device.download(workspace).any(), "the next launch would start with a rest"
    return device.download(payload), int(device.download(digest)[0])


def scatter(
    device: Device, case: Case, payload: Array, pool: Array, ids: Array
) -> tuple[Array, int]:
    """`pool` with the payload in it, and the payload's digest."""
    target = device.upload(pool)
    digest, workspace = device.empty((1,), np.uint64), device.zeros((2,), np.uint64)
    table = blocks.upload_ids(device, ids)
    blocks.scatter_blocks(
        device, device.upload(payload), case.layout, table, target, digest, workspace,
        processors=case.processors, **case.part,
    )  # fmt: skip
    assert not device.download(workspace).any(), "the next launch would start with a rest"
    return device.download(target), int(device.download(digest)[0])


def check_gather(
    device: Device, schedules: Schedules, rng: np.random.Generator, case: Case
) -> None:
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)

    def run() -> list[Array]:
        payload, digest = gather(device, case, pool, ids)
        return [payload, np.array([digest], np.uint64)]

    payload, digest = schedules(run)
    expected = reference_blocks.gather_blocks(pool, ids, case.layout, **case.part)
    np.testing.assert_array_equal(payload, expected)
    assert int(digest[0]) == payload_digest(expected)


def check_scatter(
    device: Device, schedules: Schedules, rng: np.random.Generator, case: Case
) -> None:
    """Any bytes are a payload: all codes of a type come, in scales of any size."""
    payload = rng.integers(0, 256, case.layout.nbytes, dtype=np.uint8)
    scales = case.layout.scale_table(payload)
    scales[...] = np.exp2(rng.uniform(-90, 90, scales.shape)) * (rng.random(scales.shape) > 0.1)
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)

    def run() -> list[Array]:
        target, digest = scatter(device, case, payload, pool, ids)
        return [target, np.array([digest], np.uint64)]

    target, digest = schedules(run)
    expected = pool.copy()
    reference_blocks.scatter_blocks(payload, case.layout, ids, expected, **case.part)
    np.testing.assert_array_equal(target, expected)
    assert int(digest[0]) == payload_digest(payload)


RESLICES = {
    # (heads, block size) of both pools, the heads moved and where they begin, blocks of the source
    "heads of a shard": ((4, 16), (2, 16), 2, 2, 0, 3),
    "into larger blocks": ((3, 4), (5, 16), 2, 1, 3, 6),
    "into smaller blocks": ((2, 12), (2, 4), 2, 0, 0, 3),
    "many pieces": ((2, 32), (1, 64), 1, 1, 0, 3),
}


def check_reslice(
    device: Device, schedules: Schedules, rng: np.random.Generator, name: str, dim: int = 40
) -> None:
    """Against the definition, and in digest against the payload there is not."""
    (heads, size), (other_heads, other_size), moved, start, into, count = RESLICES[name]
    other_count = -(-count * size // other_size)
    shapes = (
        (3, count + 4, 2, heads, size, dim),
        (3, other_count + 2, 2, other_heads, other_size, dim),
    )
    source, blank = (random_bf16(rng, shape) for shape in shapes)
    here = rng.permutation(shapes[0][1])[:count].astype(np.int32)
    there = rng.permutation(shapes[1][1])[:other_count].astype(np.int32)
    part = {
        "heads": moved, "source_head": start, "target_head": into, "layer_start": 1,
        "layer_count": 2,
    }  # fmt: skip

    def run() -> list[Array]:
        target, digest = device.upload(blank), device.empty((1,), np.uint64)
        workspace = device.zeros((2,), np.uint64)
        blocks.reslice_blocks(
            device, device.upload(source), blocks.upload_ids(device, here), target,
            blocks.upload_ids(device, there), digest, workspace, processors=1, **part,
        )  # fmt: skip
        assert not device.download(workspace).any(), "the next launch would start with a rest"
        return [device.download(target), device.download(digest)]

    target, digest = schedules(run)
    expected = blank.copy()
    reference_blocks.reslice_blocks(source, here, expected, there, **part)
    np.testing.assert_array_equal(target, expected)
    layout = PayloadLayout(2, other_count, moved, other_size, dim)
    payload = reference_blocks.gather_blocks(source, here, layout, layer_start=1, head_start=start)
    assert int(digest[0]) == payload_digest(payload)
