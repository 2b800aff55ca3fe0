"""KV blocks between pool and payload: every kernel against NumPy, and what must always hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.engine.kernels.cuda import blocks, reference_blocks
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.geometry import divisor
from baton.engine.kernels.cuda.payload import ENCODINGS, PayloadLayout
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

    def receive(self, sender: Shards) -> None:
        """From each of the sender's shards the heads that it shares with each of these."""
        for i, pool in enumerate(self.pools):
            for j, source in enumerate(sender.pools):
                start = max(i * self.heads, j * sender.heads)
                heads = min((i + 1) * self.heads, (j + 1) * sender.heads) - start
                if heads <= 0:
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


@pytest.mark.parametrize("sizes", [(16, 16, 16), (8, 32, 16), (32, 4, 8)])
def test_one_two_four_shards_and_back_to_one(
    device: Device, rng: np.random.Generator, sizes: tuple[int, int, int]
) -> None:
    case = Case((2, 9, 4, 16, 24), 6, 6, 16, 4)
    pool, ids = random_bf16(rng, case.pool_shape), random_ids(rng, case)
    one = Shards(device, case, 1, 16)
    one.pools, one.ids = [pool], [ids]
    for shards, size in zip((2, 4, 1), sizes, strict=True):
        following = Shards(device, case, shards, size)
        following.receive(one)
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


# ---------------------------------------------------------------- conversions


def _there_and_back(device: Device, case: Case, pool: Array, ids: Array) -> tuple[Array, Array]:
    """What was in the blocks and what comes out of them, as float64."""
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


# ---------------------------------------------------------------- refusals


def _arguments(device: Device, encoding: str = "bf16") -> dict[str, Any]:
    layout = PayloadLayout(2, 3, 2, 8, 16, encoding)
    return {
        "pool": device.zeros((4, 6, 2, 3, 8, 16), np.uint16),
        "ids": blocks.upload_ids(device, [5, 0, 2]),
        "layout": layout,
        "payload": device.zeros((layout.nbytes,), np.uint8),
        "digest": device.zeros((1,), np.uint64),
        "workspace": device.zeros((2,), np.uint64),
    }


def _refusals(device: Device) -> dict[str, tuple[str, dict[str, Any]]]:
    pool, payload = (4, 6, 2, 3, 8, 16), PayloadLayout(2, 3, 2, 8, 16).nbytes
    strided = device.zeros((4, 6, 2, 3, 16, 16), np.uint16)[:, :, :, :, ::2]  # type: ignore[index]
    sizes = {"layers": 2, "blocks": 3, "heads": 2, "block_size": 8, "head_dim": 16}

    def other(**changes: int) -> dict[str, Any]:
        layout = PayloadLayout(**{**sizes, **changes})
        return {"layout": layout, "payload": device.zeros((layout.nbytes,), np.uint8)}

    return {
        "pool dtype": ("uint16", {"pool": device.zeros(pool, np.float32)}),
        "pool strides": ("contiguous", {"pool": strided}),
        "pool axes": ("shape", {"pool": device.zeros(pool[1:], np.uint16)}),
        "pool sides": ("shape", {"pool": device.zeros((4, 6, 1, 3, 8, 16), np.uint16)}),
        "id": ("block 6", {"ids": blocks.upload_ids(device, [5, 6, 2])}),
        "number of ids": ("same request", {"ids": blocks.upload_ids(device, [5, 2])}),
        "more ids": ("same request", {"ids": blocks.upload_ids(device, [5, 2, 0, 1])}),
        "payload dtype": ("uint8", {"payload": device.zeros((payload,), np.int8)}),
        "payload size": ("shape", {"payload": device.zeros((payload + 8,), np.uint8)}),
        "payload strides": ("contiguous", {"payload": device.zeros((2 * payload,), np.uint8)[::2]}),  # type: ignore[index]
        "layers": ("layers 3 to 5", {"layer_start": 3}),
        "no layers": ("layers", {"layer_start": -1}),
        "heads": ("heads 2 to 4", {"head_start": 2}),
        "head size": ("head_dim", other(head_dim=24)),
        "block size": ("divide", other(block_size=12)),
        "digest": ("digest", {"digest": device.zeros((1,), np.int64)}),
        "digest size": ("digest", {"digest": device.zeros((2,), np.uint64)}),
        "workspace": ("workspace", {"workspace": device.zeros((1,), np.uint64)}),
    }


class NoLaunch:
    """A device on which a launch is a failure."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if name == "launch":
            pytest.fail("launched")
        return getattr(self._device, name)


@pytest.mark.parametrize("move", [blocks.gather_blocks, blocks.scatter_blocks])
def test_wrong_arguments_never_reach_a_kernel(device: Device, move: Any) -> None:
    for name, (words, change) in _refusals(device).items():
        arguments = {**_arguments(device), **change}
        with pytest.raises(ValueError, match=words):
            move(NoLaunch(device), **arguments)
            pytest.fail(name)
    move(device, **_arguments(device))


def test_a_block_is_not_written_twice(device: Device) -> None:
    arguments = {**_arguments(device), "ids": blocks.upload_ids(device, [5, 2, 5])}
    with pytest.raises(ValueError, match="twice"):
        blocks.scatter_blocks(NoLaunch(device), **arguments)  # type: ignore[arg-type]
    blocks.gather_blocks(device, **arguments)


@pytest.mark.parametrize("ids", [[], [[1]], [-1], [2**31], [0.5], np.array([3, 2**40])], ids=str)
def test_ids_are_checked_before_they_travel(device: Device, ids: Any) -> None:
    with pytest.raises(ValueError, match="ids"):
        blocks.upload_ids(device, ids)


def test_a_tile_too_large_for_a_thread_block_is_refused(device: Device) -> None:
    layout = PayloadLayout(1, 1, 1, 256, 136, "int8_head")
    arguments = {
        **_arguments(device),
        "pool": device.zeros((1, 1, 2, 1, 256, 136), np.uint16),
        "ids": blocks.upload_ids(device, [0]),
        "layout": layout,
        "payload": device.zeros((layout.nbytes,), np.uint8),
    }
    with pytest.raises(ValueError, match="share a scale"):
        blocks.gather_blocks(NoLaunch(device), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"heads": 0}, "nothing"), ({"head_dim": 12}, "multiple"), ({"encoding": "fp4"}, "none of")],
)
def test_layouts_are_checked(change: dict[str, Any], words: str) -> None:
    sizes = {"layers": 1, "blocks": 1, "heads": 1, "block_size": 8, "head_dim": 16}
    with pytest.raises(ValueError, match=words):
        PayloadLayout(**{**sizes, **change})


def test_divisions_are_exact(rng: np.random.Generator) -> None:
    """At the borders of each quotient, where a factor rounded the wrong way would show."""
    for by in [*range(2, 200), *rng.integers(200, 2**31, 200).tolist(), 2**31 - 1]:
        _, factor, shift = divisor(by)
        assert factor < 2**32
        borders = [by * q + r for q in (1, 2, (2**31 - 1) // by) for r in (-1, 0, 1)]
        numbers = [0, 2**31 - 1, *borders, *rng.integers(0, 2**31, 20).tolist()]
        for n in (n for n in numbers if 0 <= n < 2**31):
            assert (n * factor >> 32) >> shift == n // by, (n, by)
