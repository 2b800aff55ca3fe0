"""KV blocks between pool and payload: every kernel against NumPy, and what must always hold."""

from __future__ import annotations

import math
import mmap
from dataclasses import replace

import numpy as np
import pytest

from baton.engine.kernels.cuda import blocks, reference_blocks
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.payload import ENCODINGS
from baton.engine.kernels.digest import payload_digest

from .block_moves import (
    CASES,
    RESLICES,
    Array,
    Case,
    Schedules,
    check_gather,
    check_reslice,
    check_scatter,
    gather,
    random_bf16,
    random_ids,
    scatter,
)
from .host_device import HostDevice

SCALED = [name for name, encoding in ENCODINGS.items() if encoding.largest]


@pytest.mark.sanitized
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", CASES)
def test_gather_is_its_definition_in_every_order(
    device: Device, schedules: Schedules, rng: np.random.Generator, name: str, encoding: str
) -> None:
    check_gather(device, schedules, rng, CASES[name].encoded(encoding))


@pytest.mark.sanitized
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", CASES)
def test_scatter_is_its_definition_in_every_order(
    device: Device, schedules: Schedules, rng: np.random.Generator, name: str, encoding: str
) -> None:
    check_scatter(device, schedules, rng, CASES[name].encoded(encoding))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_grid_does_not_matter(device: Device, rng: np.random.Generator, encoding: str) -> None:
    case = CASES["a shard"].encoded(encoding)
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    first = gather(device, case, pool, ids)
    for processors in (2, 3, 132):
        payload, digest = gather(device, replace(case, processors=processors), pool, ids)
        assert payload.tobytes() == first[0].tobytes()
        assert digest == first[1]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_where_blocks_lie_does_not_matter(
    device: Device, rng: np.random.Generator, encoding: str
) -> None:
    case = CASES["larger blocks"].encoded(encoding)
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    order = rng.permutation(case.pool[1])
    moved = np.empty_like(pool)
    moved[:, order] = pool
    here, there = gather(device, case, pool, ids), gather(device, case, moved, order[ids])
    assert here[0].tobytes() == there[0].tobytes()
    assert here[1] == there[1]


@pytest.mark.parametrize("name", ["whole blocks", "a shard", "smaller blocks", "odd sizes"])
def test_what_was_gathered_comes_back(device: Device, rng: np.random.Generator, name: str) -> None:
    case = CASES[name]
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    payload, sent = gather(device, case, pool, ids)
    blank, elsewhere = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    target, received = scatter(device, case, payload, blank, elsewhere)
    assert sent == received
    layers = slice(case.layer_start, case.layer_start + case.layers)
    heads = slice(case.head_start, case.head_start + case.heads)
    tokens = case.blocks * case.block_size
    for i, (source, place) in enumerate(zip(ids, elsewhere, strict=True)):
        n = max(0, tokens - i * case.pool[3])
        got, wanted = target[layers, place, :, heads, :n], pool[layers, source, :, heads, :n]
        np.testing.assert_array_equal(got, wanted)


class Shards:
    """A request's KV in the pools of a model whose heads are split over some workers."""

    def __init__(self, device: Device, case: Case, shards: int, block_size: int) -> None:
        self.device, self.block_size = device, block_size
        layers, _, heads, size, dim = case.pool
        self.heads, self.tokens = heads // shards, case.ids * size
        self.count = -(-self.tokens // block_size)
        shape = (layers, self.count + 3, 2, self.heads, block_size, dim)
        self.pools = [np.full(shape, 0xABAB, np.uint16) for _ in range(shards)]
        self.ids = [
            np.random.default_rng(s).permutation(shape[1])[: self.count] for s in range(shards)
        ]

    def reslice(self, sender: Shards, i: int, j: int, start: int, heads: int) -> None:
        """From shard j of the sender into shard i, in one kernel."""
        device, pool = self.device, self.pools[i]
        target = device.upload(pool)
        digest, workspace = device.empty((1,), np.uint64), device.zeros((2,), np.uint64)
        blocks.reslice_blocks(
            device, device.upload(sender.pools[j]), blocks.upload_ids(device, sender.ids[j]),
            target, blocks.upload_ids(device, self.ids[i]), digest, workspace, heads=heads,
            source_head=start - j * sender.heads, target_head=start - i * self.heads,
            layer_count=pool.shape[0],
        )  # fmt: skip
        pool[...] = device.download(target)

    def receive(self, sender: Shards, *, at_once: bool) -> None:
        """From each of the sender's shards the heads that it shares with each of these."""
        for i, pool in enumerate(self.pools):
            for j, source in enumerate(sender.pools):
                start = max(i * self.heads, j * sender.heads)
                heads = min((i + 1) * self.heads, (j + 1) * sender.heads) - start
                if heads <= 0:
                    continue
                if at_once:
                    self.reslice(sender, i, j, start, heads)
                    continue
                layers, dim = pool.shape[0], pool.shape[5]
                move = Case(
                    (layers, source.shape[1], sender.heads, sender.block_size, dim),
                    sender.count, self.count, self.block_size, heads, layers,
                    head_start=start - j * sender.heads,
                )  # fmt: skip
                payload, sent = gather(self.device, move, source, sender.ids[j])
                place = Case(
                    (layers, pool.shape[1], self.heads, self.block_size, dim),
                    self.count, self.count, self.block_size, heads, layers,
                    head_start=start - i * self.heads,
                )  # fmt: skip
                pool[...], received = scatter(self.device, place, payload, pool, self.ids[i])
                assert sent == received


@pytest.mark.sanitized
@pytest.mark.parametrize("name", RESLICES)
def test_reslice_is_its_definition_in_every_order(
    device: Device, schedules: Schedules, rng: np.random.Generator, name: str
) -> None:
    check_reslice(device, schedules, rng, name)


@pytest.mark.parametrize("at_once", [False, True], ids=["by payloads", "in one kernel"])
@pytest.mark.parametrize("sizes", [(16, 16, 16), (8, 32, 16), (32, 4, 8)])
def test_one_two_four_shards_and_back_to_one(
    device: Device, rng: np.random.Generator, sizes: tuple[int, int, int], at_once: bool
) -> None:
    case = Case((2, 9, 4, 16, 24), 6, 6, 16, 4)
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    one = Shards(device, case, 1, 16)
    one.pools, one.ids = [pool], [ids]
    for shards, size in zip((2, 4, 1), sizes, strict=True):
        following = Shards(device, case, shards, size)
        following.receive(one, at_once=at_once)
        one = following
    last = one.pools[0][:, one.ids[0]].transpose(0, 2, 3, 1, 4, 5)
    tokens = last.reshape(2, 2, 4, -1, 24)[:, :, :, : 6 * 16]
    first = pool[:, ids].transpose(0, 2, 3, 1, 4, 5).reshape(tokens.shape)
    np.testing.assert_array_equal(tokens, first)


def test_heads_of_a_shard_follow_their_owner(device: Device, rng: np.random.Generator) -> None:
    """Two of the four heads arrive in the pool of a worker that has but those two."""
    sender = Case((2, 5, 4, 8, 16), 3, 3, 8, 2, head_start=2)
    receiver = Case((2, 6, 2, 8, 16), 3, 3, 8, 2)
    pool, ids = random_bf16(rng, sender.pool_shape), random_ids(rng, sender)
    payload, _ = gather(device, sender, pool, ids)
    place = random_ids(rng, receiver)
    blank = np.zeros(receiver.pool_shape, np.uint16)
    target, _ = scatter(device, receiver, payload, blank, place)
    np.testing.assert_array_equal(target[:, place], pool[:, ids, :, 2:4])


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
        part = {"layer_start": start, "layer_count": layers, "processors": 1}
        blocks.copy_blocks(device, pool, ids, target, places, digests[0], workspace, **part)
        blocks.sum_blocks(device, pool, ids, digests[1], workspace, **part)
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


@pytest.mark.parametrize("encoding", ["bf16", "fp8_head"])
def test_pools_may_have_more_than_2_32_vectors(
    host_device: HostDevice, rng: np.random.Generator, encoding: str
) -> None:
    case = Case((2, 9_000_000, 1, 16, 128), 2, 2, 16, 1, layers=1, layer_start=1, encoding=encoding)
    pool = _vast_pool(case.pool_shape)
    ids = np.array([8_999_999, 3], np.int32)
    pool[1, ids] = random_bf16(rng, (2, 2, 1, 16, 128))
    table = blocks.upload_ids(host_device, ids)
    payload = host_device.empty((case.layout.nbytes,), np.uint8)
    digest, workspace = host_device.empty((1,), np.uint64), host_device.zeros((2,), np.uint64)
    blocks.gather_blocks(
        host_device, pool, table, case.layout, payload, digest, workspace, layer_start=1
    )
    small = pool[1:, ids]
    expected = reference_blocks.gather_blocks(small, np.arange(2, dtype=np.int32), case.layout)
    np.testing.assert_array_equal(payload, expected)
    pool[1, ids] = 0
    blocks.scatter_blocks(
        host_device, payload, case.layout, table, pool, digest, workspace, layer_start=1
    )
    again = np.zeros_like(small)
    reference_blocks.scatter_blocks(expected, case.layout, np.arange(2, dtype=np.int32), again)
    np.testing.assert_array_equal(pool[1:, ids], again)


# ---------------------------------------------------------------- conversions


def _there_and_back(device: Device, case: Case, pool: Array, ids: Array) -> tuple[Array, Array]:
    """The content of the blocks before and after, as float64."""
    payload, _ = gather(device, case, pool, ids)
    target, _ = scatter(device, case, payload, np.zeros_like(pool), ids)
    with np.errstate(invalid="ignore"):  # signalling NaN among them
        found = [reference_blocks.widened(a[:, ids]).astype(np.float64) for a in (pool, target)]
    return found[0], found[1]


def _bound(encoding: str, x: Array, largest: Array) -> Array:
    """The error that reference_blocks states."""
    tiny, u = 2.0**-20, 2.0**-8
    if encoding.startswith("fp8"):
        return (2**-4 + u + 2**-11) * abs(x) + (1 + 2**-7) * 2**-10 * largest / 448
    return (1 + 2**-7) * largest / 254 * (1 + tiny) + u * abs(x)


@pytest.mark.parametrize("encoding", SCALED)
def test_quantised_numbers_stay_within_the_stated_error(
    device: Device, rng: np.random.Generator, encoding: str
) -> None:
    case = CASES["whole blocks"].encoded(encoding)
    case = replace(case, layers=3, layer_start=0)
    spread = np.exp2(rng.uniform(-12, 12, (*case.pool_shape[:-1], 1)))
    pool = reference_blocks.rounded(
        (rng.standard_normal(case.pool_shape) * spread).astype(np.float32)
    )
    x, back = _there_and_back(device, case, pool, random_ids(rng, case))
    axes = -1 if case.layout.how.per_token else (-2, -1)
    largest = abs(x).max(axes, keepdims=True)
    error = abs(back - x)
    bound = _bound(encoding, x, largest)
    assert (error <= bound).all()
    assert (error > bound / 2).any(), "the stated error is much larger than the true one"


def test_fp16_keeps_what_bf16_has_of_it(device: Device) -> None:
    """All 65,536 numbers: bits in the range, 2^-25 below, 65504 beyond."""
    case = Case((1, 8, 2, 32, 64), 8, 8, 32, 2, layers=1, encoding="fp16")
    pool = np.arange(2**16, dtype=np.uint16).reshape(case.pool_shape)
    x, back = _there_and_back(device, case, pool, np.arange(8, dtype=np.int32))
    size = abs(x)
    exact = (size >= 2.0**-14) & (size <= 65504)
    np.testing.assert_array_equal(back[exact], x[exact])
    small = size < 2.0**-14
    assert (abs(back - x)[small] <= 2.0**-25).all()
    large = size > 65504
    closest = reference_blocks.rounded(np.array([65504], np.float32))
    np.testing.assert_array_equal(abs(back[large]), reference_blocks.widened(closest)[0])
    assert np.isnan(back[np.isnan(x)]).all()
    assert (np.signbit(back) == np.signbit(x))[~np.isnan(x)].all()


@pytest.mark.parametrize("encoding", SCALED)
def test_what_is_no_number(device: Device, encoding: str) -> None:
    """Zeros have scale zero, infinities become their tile's largest, tiny tiles are zeros."""
    case = Case((1, 1, 5, 4, 8), 1, 1, 4, 5, layers=1, encoding=encoding)
    values = np.zeros(case.pool_shape, np.float32)
    values[0, 0, 0, 1] = 2.0**-101
    values[0, 0, 0, 2, :, :3] = np.inf, -np.inf, 3.0
    values[0, 0, 0, 3, :, :4] = np.nan, 1.0, -0.0, 3.3895314e38
    values[0, 0, 0, 4, :, 0] = np.inf
    pool = reference_blocks.rounded(values)
    payload, _ = gather(device, case, pool, np.zeros(1, np.int32))
    scales = case.layout.scale_table(payload)[:, : case.layout.scales].reshape(2, 5, -1)
    assert not scales[0, [0, 1, 4]].any()
    assert not scales[1].any()
    assert (scales[0, 2:4] > 0).all()
    target, _ = scatter(device, case, payload, np.full_like(pool, 1), np.zeros(1, np.int32))
    back = reference_blocks.widened(target)[0, 0, 0]
    assert not back[[0, 1, 4]].any()
    np.testing.assert_allclose(back[2, :, :3], [[3, -3, 3]] * 4, rtol=2**-8)
    assert np.isnan(back[3, :, 0]).all() if encoding.startswith("fp8") else not back[3, :, 0].any()
    np.testing.assert_allclose(back[3, :, 3], 3.3895314e38, rtol=2**-8)


# ---------------------------------------------------------------- digests


@pytest.mark.parametrize("encoding", ["bf16", "int8_token"])
def test_scatter_tells_damage(device: Device, rng: np.random.Generator, encoding: str) -> None:
    case = CASES["odd sizes"].encoded(encoding)
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    payload, sent = gather(device, case, pool, ids)
    assert sent == payload_digest(payload)
    for place in (0, case.layout.nbytes - 1, *rng.integers(0, case.layout.nbytes, 3)):
        damaged = payload.copy()
        damaged[place] ^= 1 << rng.integers(8)
        _, received = scatter(device, case, damaged, pool, ids)
        assert received != sent
        assert received == payload_digest(damaged)
