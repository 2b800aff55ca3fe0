"""What the host execution itself promises: meaning, refusals, and bugs that it brings to light."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.engine.kernels.cuda.cupy_device import CupyDevice, cuda_source
from baton.engine.kernels.cuda.device import Kernel

from .conftest import devices, in_order
from .host_device import VARIANT, HostDevice, LaunchFailed

HERE = Path(__file__).parent / "host"
LANES = np.arange(32)
SEEDS = range(9)


def probe(name):
    return Kernel("probe.cu", name)


def probe_source(name):
    return (HERE / name).read_text().replace('#include "device.cuh"', cuda_source("device.cuh"))


@pytest.fixture(scope="module", params=devices())
def device(request, host_device, build_cache):
    """The words mean the same on the CPU and on a GPU."""
    if request.param == "cuda":
        return CupyDevice(source=probe_source)
    return HostDevice(build_cache, folder=HERE)


@pytest.fixture(scope="module")
def host(host_device, build_cache):
    """Only the CPU refuses; it waits a fifth of a second for what does not end."""
    return HostDevice(build_cache, folder=HERE, seconds=0.2)


def ints(device, n=32):
    return device.zeros((n,), np.int32)


@pytest.mark.sanitized
@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles(device, seed):
    out = device.empty((7, 32), np.int32)
    with in_order(device, seed):
        device.launch(probe("shuffles"), (1,), (32,), (out,))
    out = device.download(out)
    down, low, halves = (LANES + 4) % 8 + LANES // 8 * 8, LANES // 8 * 8 + 1, LANES.copy()
    for i in range(4):
        swapped = halves + halves[LANES ^ 1]
        halves = np.where((LANES >= 16) | (i == 0), swapped, halves)
    expected = [
        np.full(32, 50),
        np.where(LANES < 3, LANES, LANES - 3),
        np.where(LANES % 8 < 4, down, LANES),
        LANES ^ 9,
        low,
        halves[LANES ^ 16],
        63 + (LANES ^ 1),
    ]
    assert (out == np.array(expected)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_votes_and_reductions(device, seed):
    out = device.empty((7, 32), np.uint32)
    with in_order(device, seed):
        device.launch(probe("votes"), (1,), (32,), (out,))
    out = device.download(out)
    bits = 1 << LANES.astype(np.uint64)
    assert (out[0] == bits[LANES % 3 == 0].sum()).all()
    assert (out[1] == 3).all()
    assert out[2].tolist() == [int(bits[lane // 5 == LANES // 5].sum()) for lane in LANES]
    assert (out[3:5].view(np.int32) == [[np.sum(LANES - 16)], [-16]]).all()
    assert (out[5] == 2**32 - 1).all()
    odd = np.where(LANES % 2, bits[(LANES % 2 == 1) & (LANES > 16)].sum(), bits[::2].sum())
    assert (out[6] == odd).all()


@pytest.mark.sanitized
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("grid", "block"), [((3, 2, 2), (4, 3, 5)), ((2, 3), (64,))])
def test_grids_blocks_exits_and_poisoned_shared_memory(device, seed, grid, block):
    blocks, threads = int(np.prod(grid)), int(np.prod(block))
    out, poisoned = device.empty((blocks, threads), np.int32), device.upload(np.ones(1, np.int32))
    with in_order(device, seed):
        device.launch(probe("shape"), grid, block, (out, poisoned), shared_bytes=4 * threads)
    out, poisoned = device.download(out), device.download(poisoned)
    t = np.arange(threads)
    expected = threads - 1 - t + 1000 * np.arange(blocks)[:, None] + 100 * (threads // 2) + 30000
    assert (out == expected + (t <= 3)).all()
    if isinstance(device, HostDevice) and VARIANT == "plain":
        assert poisoned[0] == 1


def test_integers_and_bits(device, rng):
    x, y = (int(v) for v in rng.integers(1, 2**32, 2))
    out = device.empty((24,), np.int64)
    device.launch(probe("integers"), (1,), (1,), (device.upload(np.array([x, y], np.uint32)), out))
    i, j = (v - (v >> 31 << 32) for v in (x, y))
    wide = x << 32 | y
    signed = wide - (wide >> 63 << 64)
    both = y << 32 | x
    source = [both >> 8 * k & 255 for k in range(8)]
    expected = [
        x.bit_count(), 32 - x.bit_length(), 32, (x & -x).bit_length(), 0,
        x * y >> 32, i * j >> 32, int(f"{x:032b}"[::-1], 2),
        signed * (signed + 1) >> 64, wide.bit_count(), 64 - (signed >> 40 & 255).bit_length(),
        wide * (2**64 - 1) >> 64, (both << 7 >> 32) % 2**32, both >> 7 & 0xFFFFFFFF,
        source[2] | source[1] << 8 | source[4] << 16 | source[7] << 24,
        _perm(source, 0x8B3F),
        min(-3, i), max(3, y), 2, -2, 2**31 - 1, 0, 2**31,
        7 - 128 * 5 + 127 * 4 - 3 + 2,
    ]  # fmt: skip
    expected[11] -= (expected[11] >> 63) << 64
    assert device.download(out).tolist() == expected


def _perm(source, selector):
    result = 0
    for k in range(4):
        result |= source[selector >> 4 * k & 7] << 8 * k
    return result


@pytest.mark.sanitized
@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_and_locks(device, seed):
    sums, big = ints(device, 6), device.zeros((2,), np.uint64)
    wide = device.upload(np.array([0, 0xFFFFFFFF, 0, 0, 0], np.uint32))
    with in_order(device, seed):
        device.launch(probe("atomics"), (3,), (40,), (sums, wide, big))
    sums, wide, big = (device.download(a) for a in (sums, wide, big))
    total = 120 * 119 // 2
    assert sums.tolist() == [total, -total, 119, -119, 0, 120]
    xor = np.bitwise_xor.reduce(np.arange(120))
    assert wide.tolist() == [0xFFFFFFFF, 0xFFFFFF00, xor, 0, 360]
    assert big.tolist() == [120 << 40, 119 << 33]


def test_conversions_round_to_nearest_even(device, rng):
    """A pair is one instruction on a GPU, in which the halves are easily swapped."""
    n = 4096
    values = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    values[: n // 2] = np.exp2(rng.uniform(-14, 10, n // 2)) * rng.choice([-1, 1], n // 2)
    values[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, -1e9]
    values[100:356] = (rng.integers(128, 256, 256) + 0.5) * np.exp2(rng.integers(-9, 5, 256))
    small = (np.abs(values) < 2.0**-126) & (values != 0)
    values[small] = 0  # the contract flushes denormals
    bf, pairs = device.empty((n,), np.uint16), device.empty((n,), np.uint32)
    back = device.empty((n,), np.float32)
    args = (device.upload(values), bf, pairs, back, np.int32(n))
    device.launch(probe("conversions"), (n // 256,), (256,), args)
    bf, pairs, back = (device.download(a) for a in (bf, pairs, back))
    u = values.view(np.uint32).astype(np.uint64)
    expected = np.where(np.isnan(values), 0x7FFF, u + 0x7FFF + (u >> 16 & 1) >> 16)
    assert (bf == expected).all()
    assert (pairs == (expected | expected[::-1] << 16)).all()
    assert (back.view(np.uint32) == expected << 16).all()


def test_pairs_of_codes_become_floats(device):
    codes = np.arange(1 << 16, dtype=np.uint32)
    back = device.empty((len(codes), 2), np.float32)
    args = (device.upload(codes), back, np.int32(len(codes)))
    device.launch(probe("pairs"), (len(codes) // 256,), (256,), args)
    back = device.download(back)
    for column, each in enumerate((codes & 255, codes >> 8)):
        expected = FP8[each & 127] * np.where(each & 128, -1, 1)
        np.testing.assert_array_equal(back[:, column], expected)


def test_short_copies_are_filled_with_zeros(device, rng):
    data = rng.integers(1, 256, (64, 16), np.uint8)
    out = device.empty((64, 4), np.uint32)
    source = device.upload(data.view(np.uint32))
    device.launch(probe("fills"), (1,), (64,), (source, out))
    kept = np.arange(16) < (np.arange(64) % 17)[:, None]
    assert (device.download(out).view(np.uint8) == np.where(kept, data, 0)).all()


CODES = np.arange(128)
FP8 = np.where(CODES < 8, CODES, 8 + CODES % 8) * np.exp2(np.maximum(CODES // 8, 1) - 10.0)
FP8[127] = np.nan


@pytest.mark.sanitized
def test_fragments_of_ldmatrix_and_mma(device, rng):
    a, b = (bfloat(rng.standard_normal(shape)) for shape in ((16, 16), (8, 16)))
    arrays = [device.upload(v) for v in (a, b, np.ascontiguousarray(b.T))]
    for seed in SEEDS:
        outputs = [device.empty((16, 8), np.float32) for _ in range(2)]
        outputs += [device.empty((32,), np.uint32) for _ in range(2)]
        with in_order(device, seed):
            device.launch(probe("tensor"), (1,), (32,), (*arrays, *outputs))
        product, turned, single, across = (device.download(out) for out in outputs)
        expected = widen(a) @ widen(b).T
        assert np.abs(product - expected).max() < 1e-5
        assert np.abs(turned - expected).max() < 1e-5
        assert (single == a[:8, :8].copy().view(np.uint32).reshape(32)).all()
        assert (across == a[:8, :8].T.copy().view(np.uint32).reshape(32)).all()


def bfloat(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widen(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def run_pipeline(device, rows, seed, data, tail):
    out, rest = device.empty((64, 4), np.uint32), device.empty((64,), np.uint32)
    with in_order(device, seed):
        args = (device.upload(data[:rows]), device.upload(tail), out, rest, np.int32(rows))
        device.launch(probe("pipeline"), (1,), (64,), args)
    return device.download(out), device.download(rest)


@pytest.mark.sanitized
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_asynchronous_copies_land_when_awaited(device, rng, rows):
    data = rng.integers(0, 2**20, (9, 64, 4), np.uint32)
    tail = rng.integers(0, 2**20, (64, 2), np.uint32)
    for seed in SEEDS:
        out, rest = run_pipeline(device, rows, seed, data, tail)
        assert (out == data[:rows, ::-1].sum(axis=0)).all()
        kept = data[0].view(np.uint8).reshape(64, 16).copy()
        kept[np.arange(16) >= (np.arange(64) % 17)[:, None]] = 0
        filled = kept.view(np.uint32)
        flat = tail.reshape(-1)[np.arange(64) * 2]  # 4 bytes of each pair
        expected = filled[:, 0] + 3 * filled[:, 3] + 5 * tail[::-1, 1] + 7 * flat[::-1]
        assert (rest == expected).all()


@pytest.mark.parametrize("bug", ["BATON_PLANT_LAX_WAIT", "BATON_PLANT_NO_BARRIER"])
def test_a_lax_wait_and_a_missing_barrier_come_to_light(host, rng, bug):
    data = rng.integers(0, 2**20, (9, 64, 4), np.uint32)
    tail = rng.integers(0, 2**20, (64, 2), np.uint32)
    planted = host.with_defines(bug)
    wrong = 0
    for seed in SEEDS:
        out, _ = run_pipeline(planted, 9, seed, data, tail)
        wrong += bool((out != data[:, ::-1].sum(axis=0)).any())
    assert wrong == len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_memory_of_template_instances(device, seed):
    out = device.empty((32,), np.int32)
    with in_order(device, seed):
        device.launch(probe("templates"), (1,), (32,), (out,))
    out = device.download(out)
    first, eighth = (LANES + 1) % 32, (LANES + 1) % 8
    assert (out == first + 100 * eighth).all()


REFUSED = [
    ("divergent_barrier", 64, "divergent barrier"),
    ("barrier_after_exit", 64, "thread 40 has ended"),
    ("shuffle_with_exited", 32, "names lane 3, which has ended"),
    ("shuffle_with_absent", 20, "names lane 20, which the block does not have"),
    ("shuffle_outside_mask", 32, "lane 0 reads lane 20, which is not in the mask 0000ffff"),
    ("shuffle_without_self", 32, "is not in its own mask 0000ffff"),
    ("warps_wait_for_each_other", 32, "waits for lane 16, which waits in __syncthreads"),
    ("endless", 32, "does not end"),
]


@pytest.mark.sanitized
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize(("name", "threads", "message"), REFUSED)
def test_what_a_gpu_leaves_undefined_is_refused(host, name, threads, message, seed):
    with host.order(seed), pytest.raises(LaunchFailed, match=message) as caught:
        host.launch(probe(name), (1,), (threads,), (ints(host, 64),))
    assert str(caught.value).startswith(f"{name}, block (0, 0, 0)")
    test_shared_memory_of_template_instances(host, seed)  # the next launch starts clean


def test_waiting_for_a_block_that_comes_later_ends(host):
    with pytest.raises(LaunchFailed, match="does not end"):
        host.launch(probe("spins_on_another_block"), (2,), (1,), (ints(host),))


@pytest.mark.parametrize(
    ("name", "args", "shared", "message"),
    [
        ("beside", (np.int32(1),), 0, "writes behind the array of argument 0"),
        ("beside", (np.int32(-1),), 0, "writes before the array of argument 0"),
        ("behind_shared", (), 128, "writes behind its 128 bytes of dynamic shared"),
        ("deep", (np.int32(100),), 0, "needs more than 131072 bytes of stack"),
        ("divides", (np.int32(0),), 0, "divides by zero"),
        ("wild", (), 0, "touches the address"),
    ],
)
def test_memory_that_is_not_the_kernels(host, name, args, shared, message):
    with pytest.raises(LaunchFailed, match=message):
        host.launch(probe(name), (1,), (32,), (ints(host), *args), shared_bytes=shared)


def test_an_asynchronous_copy_must_be_aligned(host):
    with pytest.raises(LaunchFailed, match="not aligned to 16 bytes"):
        host.launch(probe("misaligned_copy"), (1,), (1,), (ints(host),))


GOOD = (np.int64(1), np.float32(1), np.uint32(1), None)


@pytest.mark.parametrize(
    ("block", "args", "message"),
    [
        ((65,), GOOD, "65 threads, bounds 64"),
        ((32, 0), GOOD, "not 1 to 3 positive"),
        ((32,), GOOD[:3], "takes 4 arguments, got 3"),
        ((32,), (np.int32(1), *GOOD[1:]), "argument 0 is int32, not of type i8"),
        ((32,), (GOOD[0], 1.0, *GOOD[2:]), "argument 1 is float, not of type f4"),
        ((32,), (*GOOD[:2], np.int32(1), None), "argument 2 is int32, not of type u4"),
    ],
)
def test_arguments_must_have_the_declared_types(host, block, args, message):
    with pytest.raises(LaunchFailed, match=message):
        host.launch(probe("bounded"), (1,), block, args)


def test_arguments_must_be_aligned_for_their_loads(host):
    array = host.zeros((64,), np.uint8)[1:]
    with pytest.raises(LaunchFailed, match="argument 3 is not aligned to 16 bytes"):
        host.launch(probe("bounded"), (1,), (32,), (*GOOD[:3], array))
    host.launch(probe("bounded"), (1,), (32,), GOOD)
    with pytest.raises(LaunchFailed, match="has no kernel missing"):
        host.launch(probe("missing"), (1,), (1,), ())


RACES = [
    "read_before_write",
    "write_before_read",
    "warps_without_barrier",
    "lanes_outside_the_mask",
    "matrix_before_write",
    "copy_before_read",
    "plain_beside_atomic",
]


@pytest.mark.skipif(VARIANT == "sanitized", reason="the sanitizers watch other things")
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("name", RACES)
def test_races_in_shared_memory_are_refused_in_any_order(host, name, seed):
    out = host.zeros((64,), np.int32)
    with host.watching_races(), in_order(host, seed):
        host.launch(probe("ordered"), (2,), (64,), (out,), shared_bytes=512)
        with pytest.raises(LaunchFailed, match=r"race in shared memory: a .*probe\.cu:\d+ and the"):
            host.launch(probe(name), (2,), (64,), (out,), shared_bytes=512)
    with in_order(host, seed):
        host.launch(probe(name), (2,), (64,), (out,), shared_bytes=512)
