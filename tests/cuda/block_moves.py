"""Moves of KV blocks on a device, each checked against its definition in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.engine.kernels.bfloat16 import bfloat16_bits
from baton.engine.kernels.cuda import blocks, reference_blocks
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.digest import payload_digest

Array = npt.NDArray[Any]
Schedules = Callable[[Callable[[], Sequence[Array]]], list[Array]]


@dataclass(frozen=True)
class Case:
    """A pool and a part of it; `processors` is small so that every thread block takes turns."""

    pool: tuple[int, int, int, int, int]  # L, NB, Hk, BS, D
    ids: int
    layers: int = 2
    start: int = 0
    processors: int = 1

    @property
    def pool_shape(self) -> tuple[int, ...]:
        layers, blocks_, heads, size, dim = self.pool
        return (layers, blocks_, 2, heads, size, dim)

    @property
    def part(self) -> blocks.Layers:
        return blocks.Layers(self.start, self.layers, self.processors)


CASES = {
    "whole blocks": Case((3, 9, 4, 16, 64), 5, start=1),
    "many pieces": Case((1, 4, 2, 16, 128), 3, layers=1),
    "odd sizes": Case((3, 6, 3, 12, 24), 4, layers=1, start=2),
    "small blocks": Case((3, 12, 6, 3, 8), 10, layers=3),
    "one token": Case((1, 2, 1, 1, 8), 1, layers=1),
}


def random_bf16(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Numbers of mixed sizes, and NaN, infinities and subnormal numbers among them."""
    sizes = np.exp2(rng.integers(-30, 30, shape))
    bits = bfloat16_bits((rng.standard_normal(shape) * sizes).astype(np.float32))
    special = np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x8000, 0x0001, 0x807F, 0x7F7F], np.uint16)
    return np.where(rng.random(shape) < 0.02, rng.choice(special, shape), bits).astype(np.uint16)


def random_ids(rng: np.random.Generator, case: Case) -> npt.NDArray[np.int32]:
    return rng.permutation(case.pool[1])[: case.ids].astype(np.int32)


def gather(device: Device, case: Case, pool: Array, ids: Array) -> tuple[Array, int]:
    """The payload and its digest, both of poisoned memory, from a launch on `device`."""
    placed, table = device.upload(pool), blocks.upload_ids(device, ids)
    payload = device.empty((blocks.payload_bytes(placed, case.layers, len(ids)),), np.uint8)
    digest, workspace = device.empty((1,), np.uint64), device.zeros((2,), np.uint64)
    blocks.gather_blocks(device, placed, table, case.part, payload, digest, workspace)
    assert not device.download(workspace).any(), "the next launch would start with a rest"
    return device.download(payload), int(device.download(digest)[0])


def scatter(
    device: Device, case: Case, payload: Array, pool: Array, ids: Array
) -> tuple[Array, int]:
    """`pool` with the payload in it, and the payload's digest."""
    target, table = device.upload(pool), blocks.upload_ids(device, ids)
    digest, workspace = device.empty((1,), np.uint64), device.zeros((2,), np.uint64)
    bytes_ = device.upload(payload)
    blocks.scatter_blocks(device, bytes_, case.part, table, target, digest, workspace)
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
    expected = reference_blocks.gather_blocks(pool, ids, case.start, case.layers)
    np.testing.assert_array_equal(payload, expected)
    assert int(digest[0]) == payload_digest(expected)


def check_scatter(
    device: Device, schedules: Schedules, rng: np.random.Generator, case: Case
) -> None:
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    nbytes = len(reference_blocks.gather_blocks(pool, ids, case.start, case.layers))
    payload = rng.integers(0, 256, nbytes, dtype=np.uint8)

    def run() -> list[Array]:
        target, digest = scatter(device, case, payload, pool, ids)
        return [target, np.array([digest], np.uint64)]

    target, digest = schedules(run)
    expected = pool.copy()
    reference_blocks.scatter_blocks(payload, ids, expected, case.start, case.layers)
    np.testing.assert_array_equal(target, expected)
    assert int(digest[0]) == payload_digest(payload)
