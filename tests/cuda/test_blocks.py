"""KV blocks between pool and payload: every kernel against NumPy, and what must always hold."""

from __future__ import annotations

import math
import mmap
from dataclasses import replace

import numpy as np
import pytest

from baton.engine.kernels.cuda import blocks
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.digest import payload_digest

from .block_moves import (
    CASES,
    Array,
    Case,
    Schedules,
    check_gather,
    check_scatter,
    gather,
    random_bf16,
    random_ids,
    scatter,
)
from .host_device import HostDevice


@pytest.mark.sanitized
@pytest.mark.parametrize("name", CASES)
def test_gather_is_its_definition_in_every_order(
    device: Device, schedules: Schedules, rng: np.random.Generator, name: str
) -> None:
    check_gather(device, schedules, rng, CASES[name])


@pytest.mark.sanitized
@pytest.mark.parametrize("name", CASES)
def test_scatter_is_its_definition_in_every_order(
    device: Device, schedules: Schedules, rng: np.random.Generator, name: str
) -> None:
    check_scatter(device, schedules, rng, CASES[name])


def test_the_grid_does_not_matter(device: Device, rng: np.random.Generator) -> None:
    case = CASES["whole blocks"]
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    first = gather(device, case, pool, ids)
    for processors in (2, 3, 132):
        payload, digest = gather(device, replace(case, processors=processors), pool, ids)
        assert payload.tobytes() == first[0].tobytes()
        assert digest == first[1]


def test_where_blocks_lie_does_not_matter(device: Device, rng: np.random.Generator) -> None:
    case = CASES["odd sizes"]
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    order = rng.permutation(case.pool[1])
    moved = np.empty_like(pool)
    moved[:, order] = pool
    here, there = gather(device, case, pool, ids), gather(device, case, moved, order[ids])
    assert here[0].tobytes() == there[0].tobytes()
    assert here[1] == there[1]


@pytest.mark.parametrize("name", CASES)
def test_what_was_gathered_comes_back(device: Device, rng: np.random.Generator, name: str) -> None:
    case = CASES[name]
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    payload, sent = gather(device, case, pool, ids)
    blank, elsewhere = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    target, received = scatter(device, case, payload, blank, elsewhere)
    assert sent == received
    layers = slice(case.start, case.start + case.layers)
    np.testing.assert_array_equal(target[layers, elsewhere], pool[layers, ids])


# ---------------------------------------------------------------- pool to pool


@pytest.mark.sanitized
@pytest.mark.parametrize("shape", [(3, 7, 2, 4, 16, 64), (1, 9, 2, 3, 5, 24)])
def test_blocks_are_copied_and_summed_in_every_order(
    device: Device, schedules: Schedules, rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    layers, start = max(1, shape[0] - 1), shape[0] // 3
    other = (shape[0], shape[1] + 4, *shape[2:])
    source, blank = random_bf16(rng, shape), random_bf16(rng, other)
    here, there = (rng.permutation(n)[:5].astype(np.int32) for n in (shape[1], other[1]))

    def run() -> list[Array]:
        target = device.upload(blank)
        digests = [device.empty((1,), np.uint64) for _ in range(2)]
        workspace, pool = device.zeros((2,), np.uint64), device.upload(source)
        ids, places = blocks.upload_ids(device, here), blocks.upload_ids(device, there)
        part = blocks.Layers(start, layers, processors=1)
        blocks.copy_blocks(device, pool, ids, target, places, part, digests[0], workspace)
        blocks.sum_blocks(device, pool, ids, part, digests[1], workspace)
        assert not device.download(workspace).any()
        return [device.download(array) for array in (target, *digests)]

    target, copied, summed = schedules(run)
    expected = blank.copy()
    taken = source[start : start + layers, here]
    expected[start : start + layers, there] = taken
    np.testing.assert_array_equal(target, expected)
    digest = payload_digest(np.ascontiguousarray(taken).reshape(-1).view(np.uint8))
    assert [int(copied[0]), int(summed[0])] == [digest, digest]


NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which mmap names from Python 3.13 on


def _vast_pool(shape: tuple[int, ...]) -> Array:
    """Zeros that take memory only where they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    try:
        memory = mmap.mmap(-1, 2 * math.prod(shape), flags=flags)
    except OSError:
        pytest.skip("this machine does not promise more memory than it has")
    return np.frombuffer(memory, np.uint16).reshape(shape)


def test_pools_may_have_more_than_2_32_vectors(
    host_device: HostDevice, rng: np.random.Generator
) -> None:
    case = Case((2, 9_000_000, 1, 16, 128), 2, layers=1, start=1)
    pool, part = _vast_pool(case.pool_shape), blocks.Layers(1, 1)
    ids = np.array([8_999_999, 3], np.int32)
    pool[1, ids] = random_bf16(rng, (2, 2, 1, 16, 128))
    table = blocks.upload_ids(host_device, ids)
    payload = host_device.empty((blocks.payload_bytes(pool, 1, 2),), np.uint8)
    digest, workspace = host_device.empty((1,), np.uint64), host_device.zeros((2,), np.uint64)
    blocks.gather_blocks(host_device, pool, table, part, payload, digest, workspace)
    expected = pool[1, ids]
    np.testing.assert_array_equal(payload, expected.reshape(-1).view(np.uint8))
    pool[1, ids] = 0
    blocks.scatter_blocks(host_device, payload, part, table, pool, digest, workspace)
    np.testing.assert_array_equal(pool[1, ids], expected)


# ---------------------------------------------------------------- digests


def test_scatter_tells_damage(device: Device, rng: np.random.Generator) -> None:
    case = CASES["odd sizes"]
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    payload, sent = gather(device, case, pool, ids)
    assert sent == payload_digest(payload)
    for place in (0, payload.nbytes - 1, *rng.integers(0, payload.nbytes, 3)):
        damaged = payload.copy()
        damaged[place] ^= 1 << rng.integers(8)
        _, received = scatter(device, case, damaged, pool, ids)
        assert received != sent
        assert received == payload_digest(damaged)
