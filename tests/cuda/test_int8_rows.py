"""Rows of an int8 pool: written, read and widened as the NumPy definition has them, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernels import kv_rows
from baton.engine.kernels.bfloat16 import bfloat16_bits
from baton.engine.kernels.cuda import elementwise
from baton.engine.kernels.cuda.reference import from_bf16, to_bf16
from baton.engine.kernels.cuda.reference_int8 import laid_out, rows_of

EPS = 1e-5
DIMS = (32, 64, 128)


def still(dim, count=4):
    """Angles of zero: every position leaves a head as it is."""
    table = np.zeros((count, dim), np.float32)
    table[:, : dim // 2] = 1
    return table


def append(device, qkv, slots, pool, heads, norms=(None, None), table=None):
    """Run the kernel; return the queries and the pool."""
    dim = pool.shape[-1] - 2
    there, q = device.upload(pool), device.empty((len(qkv), heads, dim), np.uint16)
    arrays = [
        qkv,
        np.arange(len(qkv), dtype=np.int32) % 4,
        slots,
        still(dim) if table is None else table,
    ]
    weights = [None if norm is None else device.upload(norm) for norm in norms]
    uploaded = [device.upload(array) for array in arrays]
    elementwise.qk_norm_rope_append(device, *uploaded, *weights, EPS, there, q)
    return [device.download(q), device.download(there)]


def expected_append(qkv, slots, pool, heads):
    """The definition, for heads that are neither normed nor rotated."""
    rows = rows_of(pool)
    _, _, kv_heads, size, length = pool.shape
    x = from_bf16(qkv).astype(np.float32).reshape(len(qkv), -1, length - 2)
    q, k, v = np.split(x, [heads, heads + kv_heads], axis=1)
    block, offset = np.divmod(slots, size)
    rows[block, 0, :, offset] = kv_rows.stored(kv_rows.spread(k), "int8")
    rows[block, 1, :, offset] = kv_rows.stored(v, "int8")
    return to_bf16(kv_rows.spread(q)), laid_out(rows)


def random_pool(rng, blocks, kv_heads, size, dim):
    return rng.integers(-128, 128, (blocks, 2, kv_heads, size, dim + 2)).astype(np.int8)


def random_qkv(rng, rows, heads, dim):
    """Rows of many sizes: large channels, zeros, tiny numbers, numbers that are not finite."""
    x = rng.standard_normal((rows, heads, dim)) * np.exp2(rng.integers(-20, 20, (rows, heads, 1)))
    x[:, :, 3] *= 50
    bits = to_bf16(x)
    bits[0], bits[1, :, 1:] = 0, 0x0D80  # 2^-100
    bits[2, :, 1:], bits[2, :, 0] = 0, 0x0D7F  # the number before it
    bits[3, :, 5], bits[4, :, 6] = 0x7F80, 0xFFC1
    return bits.reshape(rows, heads * dim)


def test_the_layout_of_a_pool_has_the_bytes_of_its_rows(rng):
    rows = random_pool(rng, 3, 2, 24, 64)
    pool = laid_out(rows)
    np.testing.assert_array_equal(rows_of(pool), rows)
    block = pool[1, 0, 1].reshape(3, 8 * 66)
    wanted = rows[1, 0, 1, 13, 16 * 2 + np.array([0, 1, 8, 9, 2, 3])] ^ np.int8(-128)
    np.testing.assert_array_equal(block[1, 5 * 64 + 32 :][:6], wanted)
    np.testing.assert_array_equal(block[1, 8 * 64 + 5 * 2 :][:2], rows[1, 0, 1, 13, 64:])


@pytest.mark.sanitized
@pytest.mark.parametrize("dim", DIMS)
def test_appended_rows_are_those_of_the_definition(device, schedules, rng, dim):
    heads, kv_heads, size = 3, 2, 16
    qkv = random_qkv(rng, 11, heads + 2 * kv_heads, dim)
    pool = random_pool(rng, 3, kv_heads, size, dim)
    slots = rng.permutation(3 * size)[:11].astype(np.int64)
    expected = expected_append(qkv, slots, pool, heads)
    found = schedules(lambda: append(device, qkv, slots, pool, heads))
    assert (found[1] == expected[1]).all()
    finite = np.isfinite(from_bf16(expected[0]))
    assert (found[0][finite] == expected[0][finite]).all()
    assert not np.isfinite(from_bf16(found[0][~finite])).any()


@pytest.mark.parametrize("dim", DIMS)
def test_norm_and_rotation_come_before_the_transform(device, rng, dim):
    """Within a step of the codes: float32 rounds a number near the middle of two to either."""
    heads, kv_heads, size, rows = 2, 1, 8, 9
    qkv = to_bf16(rng.standard_normal((rows, 4 * dim)) * 3)
    angle = rng.standard_normal((4, dim // 2))
    table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    norms = [to_bf16(rng.standard_normal(dim)) for _ in range(2)]
    slots = rng.permutation(16)[:rows].astype(np.int64)
    pool = random_pool(rng, 2, kv_heads, size, dim)
    q, found = append(device, qkv, slots, pool, heads, norms, table)
    x = from_bf16(qkv).reshape(rows, 4, dim)
    for part, norm in ((slice(0, 2), norms[0]), (slice(2, 3), norms[1])):
        scale = 1 / np.sqrt((x[:, part] ** 2).mean(-1, keepdims=True) + EPS)
        x[:, part] *= scale * from_bf16(norm)
    a, b = np.split(x[:, :3], 2, axis=2)
    cos, sin = np.split(table[np.arange(rows) % 4].astype(np.float64)[:, None], 2, axis=2)
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2).astype(np.float32)
    turned = kv_rows.spread(turned)
    block, offset = np.divmod(slots, size)
    keys = kv_rows.opened(rows_of(found)[block, 0, :, offset])
    largest = np.abs(turned[:, 2:]).max(-1, keepdims=True)
    assert (np.abs(keys - turned[:, 2:]) < largest * (0.6 / 127 + 2.0**-8)).all()
    assert (np.abs(from_bf16(q) - turned[:, :2]) <= np.abs(turned[:, :2]) * 2.0**-8 + 1e-5).all()


def test_rows_without_a_slot_leave_the_pool_alone(device, rng):
    qkv = random_qkv(rng, 6, 3, 64)
    pool = random_pool(rng, 1, 1, 8, 64)
    slots = np.array([-1, 8, 2, 1 << 40, -(1 << 40), 7], np.int64)
    found = append(device, qkv, slots, pool, 1)[1]
    kept = [2, 5]
    expected = expected_append(qkv[kept], slots[kept], pool, 1)[1]
    assert (found == expected).all()


def every_code(binade):
    """Rows with all codes and all magnitudes of a binade, from 2^binade on."""
    magnitudes = np.arange(128, dtype=np.uint16) + np.uint16((binade + 127) << 7)
    codes = np.resize(np.arange(-127, 128), (2, 128)).astype(np.int8)
    codes[1] = np.arange(0, -128, -1)
    rows = np.empty((128, 2, 130), np.int8)
    rows[..., :128] = codes
    rows[..., 128:] = magnitudes.view(np.int8).reshape(128, 1, 2)
    return rows.reshape(2, 2, 4, 16, 130)


@pytest.mark.parametrize("binade", [-100, -1, 0, 3, 111])
def test_every_code_has_its_value(device, schedules, binade):
    rows = every_code(binade)
    pool = laid_out(rows)
    tables = np.array([[7, 1], [0, 9]], np.int32)
    entries = np.array([2, 1, 2], np.int32)

    def run():
        out = device.empty((3, 2, 4, 16, 128), np.uint16)
        arrays = [device.upload(array) for array in (pool, tables, entries)]
        elementwise.widen_kv(device, *arrays, out)
        return [device.download(out)]

    expected = bfloat16_bits(kv_rows.opened(rows))
    (found,) = schedules(run)
    assert (found == expected[[0, 1, 0]]).all()


@pytest.mark.sanitized
@pytest.mark.parametrize("dim", DIMS)
def test_widened_blocks(device, rng, dim):
    rows = kv_rows.stored(rng.standard_normal((5, 2, 3, 24, dim)).astype(np.float32), "int8")
    rows[1, 0, 1, 5, -2:] = np.array([0x7FFF], np.uint16).view(np.int8)
    rows[1, 1, 1, 6, -2:] = 0
    tables, entries = np.array([[4, 1, 0]], np.int32), np.array([1, 0, 2], np.int32)
    out = device.empty((3, 2, 3, 24, dim), np.uint16)
    arrays = [device.upload(array) for array in (laid_out(rows), tables, entries)]
    elementwise.widen_kv(device, *arrays, out)
    found = from_bf16(device.download(out))
    np.testing.assert_array_equal(found, kv_rows.opened(rows)[[1, 4, 0]].astype(np.float64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 12}, "the block size is 12, not a multiple of 8"),
        ({"dim": 80}, r"head size 80 is not one of \(32, 64, 128\)"),
    ],
)
def test_pools_that_no_kernel_has_are_refused(device, rng, change, message):
    sizes = {"size": 16, "dim": 64, **change}
    pool = random_pool(rng, 1, 1, sizes["size"], sizes["dim"])
    qkv = np.zeros((1, 3 * sizes["dim"]), np.uint16)
    with pytest.raises(ValueError, match=message):
        append(device, qkv, np.zeros(1, np.int64), pool, 1)


PLANTED = {
    "HADAMARD": "queries without the transform",
    "NEIGHBOUR": "the magnitude of the neighbour row",
    "TRUNCATE": "codes that are cut off instead of rounded",
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_of_the_append(host_device, rng, bug):
    qkv = random_qkv(rng, 8, 4, 64)
    pool = random_pool(rng, 1, 1, 16, 64)
    slots = rng.permutation(16)[:8].astype(np.int64)
    planted = host_device.with_defines(f"BATON_PLANT_{bug}")
    expected = expected_append(qkv, slots, pool, 2)
    index = 0 if bug == "HADAMARD" else 1
    rows = slice(5, None) if index == 0 else slice(None)  # those of finite numbers
    assert (append(host_device, qkv, slots, pool, 2)[index][rows] == expected[index][rows]).all()
    assert (append(planted, qkv, slots, pool, 2)[index][rows] != expected[index][rows]).any()


def test_planted_steps_of_fewer_bits(host_device):
    rows = every_code(0)
    expected = bfloat16_bits(kv_rows.opened(rows))
    planted = host_device.with_defines("BATON_PLANT_STEP_BITS")
    for device, is_right in ((host_device, True), (planted, False)):
        out = device.empty((2, 2, 4, 16, 128), np.uint16)
        tables = np.array([[0, 1]], np.int32)
        arrays = [device.upload(a) for a in (laid_out(rows), tables, np.arange(2, dtype=np.int32))]
        elementwise.widen_kv(device, *arrays, out)
        assert (device.download(out) == expected).all() == is_right
