"""Keys and values in bfloat16 and int8: rounding, attention, and conversions between pools.

The oracle decodes rows by itself, from the bytes that docs/protocol.md describes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest

from baton.engine.kernels import kv_rows
from baton.engine.kernels.kv_rows import opened, spread, stored
from baton.engine.kernels.load import load_backend
from baton.proto.layout import ELEMENTS, KV_TYPES

from .conftest import ROUNDING, or_skipped

SIZES = [(6, 2, 64, 16), (12, 2, 128, 16), (3, 1, 20, 5), (4, 4, 80, 8), (8, 1, 16, 1)]
PAIRS = [(kind, rounding) for i, kind in enumerate(KV_TYPES) for rounding in KV_TYPES[i:]]


@pytest.fixture
def rng(request):
    """Other numbers in each run, except that a failed run can be repeated with its seed."""
    seed = int(np.random.SeedSequence().entropy) % 2**32
    request.node.add_report_section("setup", "seed", str(seed))
    return np.random.default_rng(seed)


def half(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def eight_bits(x: float) -> float:
    """The nearest number of 8 significant bits, ties away from zero."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.unpack("<f", struct.pack("<I", (bits + 0x8000) & 0xFFFF0000))[0]


def decoded(row: np.ndarray) -> list[float]:
    """The numbers of one stored row, from its bytes."""
    data = row.tobytes()
    if row.dtype == np.float32:
        return list(struct.unpack(f"<{len(data) // 4}f", data))
    if row.dtype == np.uint16:
        return [half(bits) for bits in struct.unpack(f"<{len(data) // 2}H", data)]
    codes, (largest,) = (
        struct.unpack(f"<{len(data) - 2}b", data[:-2]),
        struct.unpack("<H", data[-2:]),
    )
    step = np.float32(half(largest)) / np.float32(127)
    return [eight_bits(float(np.float32(code) * step)) for code in codes]


def random_rows(rng, shape) -> np.ndarray:
    """Rows whose sizes differ by some powers of two.

    Draws of a float32 can be -0, whose sign a rotation by no angle may lose: x * 1 - y * 0.
    """
    x = rng.standard_normal(shape, dtype=np.float32) + np.float32(0)
    return x * np.exp2(rng.integers(-4, 5, (*shape[:-1], 1))).astype(np.float32)


# ------------------------------------------------------------------ rounding


def test_rounding_to_int8_twice_changes_nothing():
    """All magnitudes of one binade, with all codes that a row may have beside the largest."""
    for largest in range(0x3F80, 0x4000):
        m = half(largest)
        codes = np.arange(-127, 128, dtype=np.int8)
        row = np.concatenate([codes, np.array([largest], np.uint16).view(np.int8)])
        values = opened(row)
        assert values.tolist() == decoded(row)
        assert values.max() == m
        assert np.array_equal(stored(values, "int8"), row)
        assert np.array_equal(opened(stored(values, "bfloat16")), values)


def test_int8_is_within_its_bound(rng):
    x = random_rows(rng, (5000, 48))
    for scale in (1.0, 1e-25, 1e30):
        rows = x * np.float32(scale)
        top = np.abs(rows).max(axis=-1, keepdims=True)
        error = np.abs(opened(stored(rows, "int8")) - rows) / top
        assert (error <= 0.5 / 127 * (1 + 2**-8) + 2**-8).all()
        # The mean error is that of 255 steps and of 8 significant bits.
        assert 1 < (error**2).mean() / (1 / 127**2 / 12) < 1.3


def test_rows_without_a_usable_scale():
    rows = np.array(
        [[0, 0], [1e-38, -1e-39], [np.nan, 1], [np.inf, 1], [-np.inf, 0], [3.4e38, 1]], np.float32
    )
    values = opened(stored(rows, "int8"))
    assert not values[:2].any()
    assert np.isnan(values[2:]).all(), "rows with numbers that int8 lacks must not pass as others"


@pytest.mark.parametrize(("kind", "rounding"), PAIRS)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_appended_rows_equal_the_reference(compiled, rng, shape, kind, rounding):
    heads, kv_heads, dim, size = shape
    blocks, rows = 9, 5 * size
    qkv = random_rows(rng, (rows, heads + 2 * kv_heads, dim)).reshape(rows, -1)
    qkv[0] = 0
    slots = rng.permutation(blocks * size)[:rows].astype(np.int64)
    unrotated = np.concatenate([np.ones(dim // 2), np.zeros(dim - dim // 2)])[None]
    at, table = np.zeros(rows, np.int32), unrotated.astype(np.float32)
    q = np.empty((rows, heads, dim), np.float32)
    extra = kv_rows.SCALE_BYTES if kind == "int8" else 0
    pool = np.zeros((blocks, 2, kv_heads, size, dim + extra), ELEMENTS[kind])
    compiled.qk_norm_rope_append(qkv, at, slots, table, None, None, 0.0, pool, q, rounding)
    found = pool.transpose(0, 3, 1, 2, 4).reshape(blocks * size, 2, kv_heads, -1)[slots]
    given = qkv.reshape(rows, -1, dim)[:, heads:].reshape(rows, 2, kv_heads, dim).copy()
    queries = qkv.reshape(rows, -1, dim)[:, :heads]
    if rounding == "int8":
        given[:, 0], queries = spread(given[:, 0]), spread(queries)
    assert np.array_equal(q, queries)
    wanted = stored(opened(stored(given, rounding)), kind)
    assert np.array_equal(found, wanted)
    others = np.delete(np.arange(blocks * size), slots)
    assert not pool.transpose(0, 3, 1, 2, 4).reshape(blocks * size, -1)[others].any()


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 20])
def test_spread_rows_are_products_with_an_orthonormal_matrix(rng, dim):
    block = dim & -dim
    bits = np.arange(block)[:, None] & np.arange(block)
    signs = np.array([[(-1.0) ** int(each).bit_count() for each in row] for row in bits])
    matrix = np.kron(np.eye(dim // block), signs / np.sqrt(block))
    rows = random_rows(rng, (5, 3, dim))
    kept = rows.copy()
    assert np.allclose(spread(rows), rows @ matrix, rtol=0, atol=1e-6 * np.abs(rows).max())
    assert np.array_equal(rows, kept)
    assert np.allclose(matrix @ matrix.T, np.eye(dim))


def test_keys_with_large_channels_keep_their_scores_in_int8(backend, rng):
    """As Qwen2.5 has them. Without the transform the error is five times as large."""
    heads, rows, dim = 4, 64, 128
    qkv = rng.standard_normal((rows, heads + 2, dim), dtype=np.float32)
    qkv[:, heads, 5] += 80.0
    qkv[:, heads, 70] -= 60.0
    at, slots = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int64)
    unrotated = np.concatenate([np.ones(dim // 2), np.zeros(dim // 2)])[None].astype(np.float32)
    q = np.empty((rows, heads, dim), np.float32)
    pool = np.zeros((rows // 16, 2, 1, 16, dim + kv_rows.SCALE_BYTES), np.int8)
    given = qkv.reshape(rows, -1)
    backend.qk_norm_rope_append(given, at, slots, unrotated, None, None, 0.0, pool, q)
    keys = opened(pool)[:, 0, 0].reshape(rows, dim).astype(np.float64)
    wanted = qkv[:, :heads].astype(np.float64) @ qkv[:, heads].T.astype(np.float64)

    def error(queries: np.ndarray, keys: np.ndarray) -> float:
        return float(np.abs(queries.astype(np.float64) @ keys.T - wanted).mean())

    plain = opened(stored(qkv[:, heads], "int8")).astype(np.float64)
    assert error(q, keys) < error(qkv[:, :heads], plain) / 4


@pytest.mark.parametrize(("kind", "rounding"), [("bfloat16", "float32"), ("int8", "bfloat16")])
def test_a_type_cannot_hold_a_wider_one(backend, kind, rounding):
    extra = kv_rows.SCALE_BYTES if kind == "int8" else 0
    pool = np.zeros((1, 2, 1, 4, 8 + extra), ELEMENTS[kind])
    at, slots = np.zeros(1, np.int32), np.zeros(1, np.int64)
    qkv, table, q = np.ones((1, 24), np.float32), np.ones((1, 8), np.float32), np.ones((1, 1, 8))
    with pytest.raises(ValueError, match=r"rounded to this type|cannot hold"):
        backend.qk_norm_rope_append(
            qkv, at, slots, table, None, None, 0.0, pool, q.astype(np.float32), rounding
        )


# ------------------------------------------------------------------ attention


class Scene:
    """Random queries, and keys and values of three sequences in a pool of a type."""

    def __init__(self, rng, shape, kind: str) -> None:
        heads, kv_heads, self.dim, size = shape
        self.shape, self.lengths, self.rows = shape, [1, 70, 150], [1, 3, 20]
        counts = [-(-n // size) for n in self.lengths]
        blocks = sum(counts) + 2
        ids = rng.permutation(blocks)[: sum(counts)].astype(np.int32)
        self.tables = np.zeros((3, max(counts)), np.int32)
        for row, count in zip(self.tables, counts, strict=True):
            row[:count], ids = ids[:count], ids[count:]
        rows = random_rows(rng, (blocks, 2, kv_heads, size, self.dim))
        self.pool = np.ascontiguousarray(stored(rows, kind))
        self.q = rng.standard_normal((sum(self.rows), heads, self.dim), dtype=np.float32)
        self.offsets = np.cumsum([0, *self.rows]).astype(np.int32)
        ends = zip(self.lengths, self.rows, strict=True)
        self.positions = np.concatenate([np.arange(n - r, n) for n, r in ends]).astype(np.int32)

    def attention(self, backend, window: int = 0, *, halves: bool = False) -> np.ndarray:
        out = np.full((len(self.q), self.q[0].size), np.nan, np.float32)
        backend.attention(
            self.q,
            self.pool,
            self.tables,
            self.offsets,
            self.positions,
            self.dim**-0.5,
            window,
            out,
            halves=halves,
        )
        return out

    def rows_alone(self, backend, *, halves: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        """Each row with its attention, computed in a call of its own."""
        offsets = np.array([0, 1], np.int32)
        for row in range(len(self.q)):
            sequence = int(np.searchsorted(self.offsets, row, side="right")) - 1
            out = np.full((1, self.q[0].size), np.nan, np.float32)
            backend.attention(
                self.q[row : row + 1], self.pool, self.tables[sequence : sequence + 1], offsets,
                self.positions[row : row + 1], self.dim**-0.5, 0, out, halves=halves,
            )  # fmt: skip
            yield row, out[0]

    def oracle(self, window: int = 0, *, halves: bool = False) -> np.ndarray:
        """Softmax attention in float64, row by row, from the pool's bytes.

        ``halves``: queries are rounded to bfloat16 after they were scaled, as tiles need them.
        """
        heads, kv_heads, dim, size = self.shape
        values = np.array([decoded(row) for row in self.pool.reshape(-1, self.pool.shape[-1])])
        values = values.reshape(*self.pool.shape[:-1], dim)
        out = np.empty((len(self.q), heads, dim))
        queries = self.q * np.float32(dim**-0.5)
        if halves:
            queries = opened(stored(queries, "bfloat16"))
        for sequence, table in enumerate(self.tables):
            for row in range(self.offsets[sequence], self.offsets[sequence + 1]):
                last = self.positions[row]
                first = max(0, last - window + 1) if window else 0
                seen = np.arange(first, last + 1)
                for head in range(heads):
                    at = table[seen // size], slice(None), head * kv_heads // heads, seen % size
                    keys, mine = np.moveaxis(values[at], 1, 0)
                    scores = keys @ queries[row, head].astype(np.float64)
                    weights = np.exp(scores - scores.max())
                    out[row, head] = weights @ mine / weights.sum()
        return out.reshape(len(self.q), -1)


def agrees(found: np.ndarray, wanted: np.ndarray) -> bool:
    scale = np.abs(wanted).max()
    return bool((np.abs(found - wanted) <= 2e-5 * scale).all())


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("window", [0, 9, 100])
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_attention_equals_an_oracle_that_decodes_the_rows(backend, rng, shape, window, kind):
    scene = Scene(rng, shape, kind)
    assert agrees(scene.attention(backend, window), scene.oracle(window))


def _another_rows_scale(pool):
    pool[..., -2:] = np.roll(pool[..., -2:], 1, axis=3)


def _keys_for_values(pool):
    pool[:] = pool[:, ::-1].copy()


def _next_block(pool):
    pool[:] = np.roll(pool, 1, axis=0)


def _next_token(pool):
    pool[:] = np.roll(pool, 1, axis=3)


def _other_head(pool):
    pool[:] = np.roll(pool, 1, axis=2)


def _swapped_bytes_of_the_scale(pool):
    pool[..., -2:] = pool[..., :-3:-1].copy()


@pytest.mark.parametrize(
    "bug",
    [
        _another_rows_scale,
        _keys_for_values,
        _next_block,
        _next_token,
        _other_head,
        _swapped_bytes_of_the_scale,
    ],
    ids=lambda bug: bug.__name__,
)
def test_the_oracle_notices_planted_bugs(compiled, rng, bug):
    scene = Scene(rng, SIZES[0], "int8")
    wanted = scene.oracle()
    bug(scene.pool)
    assert not agrees(scene.attention(compiled), wanted)


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_attention_has_the_same_bits_in_every_type_that_holds_the_rows(compiled, rng, shape):
    scene = Scene(rng, shape, "int8")
    narrow, values = scene.attention(compiled), opened(scene.pool)
    for kind in ("bfloat16", "float32"):
        scene.pool = np.ascontiguousarray(stored(values, kind))
        assert np.array_equal(scene.attention(compiled), narrow)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_bits_depend_on_neither_threads_nor_other_rows(rng, kind):
    scene = Scene(rng, SIZES[1], kind)
    alone = load_backend("cpu")
    together = scene.attention(alone)
    for threads in (2, 3):
        assert np.array_equal(scene.attention(load_backend("cpu", threads=threads)), together)
    for row, found in scene.rows_alone(alone):
        assert np.array_equal(found, together[row])


# ------------------------------------------------------------------ attention in bfloat16


@pytest.fixture(params=or_skipped(ROUNDING))
def halves(request):
    """Backends whose attention rounds its operands to bfloat16."""
    return load_backend("cpu", isa=request.param)


ROUNDED = [size for size in SIZES if size[2] % 32 == 0]


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("window", [0, 9, 100])
@pytest.mark.parametrize("shape", ROUNDED, ids=str)
def test_only_the_weights_of_bfloat16_rows_are_rounded(halves, rng, shape, window, kind):
    """The softmax's weights are rounded by at most 2^-9 of their size, powers are exact to 3e-6."""
    scene = Scene(rng, shape, kind)
    scene.pool = stored(opened(stored(opened(scene.pool), "bfloat16")), kind)
    wanted = scene.oracle(window, halves=True)
    distance = np.abs(scene.attention(halves, window, halves=True) - wanted)
    largest = np.abs(opened(scene.pool)[..., 1, :, :, :]).max()
    assert 2e-5 * np.abs(wanted).max() < distance.max() < 2.0**-8 * largest
    assert distance.mean() < 2.0**-10 * np.abs(wanted).mean()


@pytest.mark.parametrize("shape", ROUNDED, ids=str)
def test_rounded_attention_has_the_same_bits_in_every_type(halves, rng, shape):
    scene = Scene(rng, shape, "int8")
    narrow, values = scene.attention(halves, halves=True), opened(scene.pool)
    for kind in ("bfloat16", "float32"):
        scene.pool = np.ascontiguousarray(stored(values, kind))
        assert np.array_equal(scene.attention(halves, halves=True), narrow)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_bits_of_rounded_attention_depend_on_the_row_alone(halves, rng, kind):
    scene = Scene(rng, SIZES[1], kind)
    together = scene.attention(halves, halves=True)
    for threads in (2, 3):
        isa = halves.numerics.rpartition("-")[2]
        several = load_backend("cpu", isa=isa, threads=threads)
        assert np.array_equal(scene.attention(several, halves=True), together)
    for row, alone in scene.rows_alone(halves, halves=True):
        assert np.array_equal(alone, together[row])


# ------------------------------------------------------------------ conversions


def pool_of(rng, blocks: int, size: int, kind: str, dim: int = 12) -> np.ndarray:
    """A pool of three layers, whose rows every type holds."""
    rows = opened(stored(random_rows(rng, (3, blocks, 2, 2, size, dim)), "int8"))
    return np.ascontiguousarray(stored(rows, kind))


def tokens_of(pool: np.ndarray, layer: int, ids, token: int) -> list[list[float]]:
    """The keys and values of a token of a block table, decoded one by one."""
    block, offset = ids[token // pool.shape[4]], token % pool.shape[4]
    return [decoded(pool[layer, block, side, head, offset]) for side in (0, 1) for head in (0, 1)]


@pytest.mark.parametrize("sizes", [(4, 4), (4, 6), (16, 3), (5, 16), (1, 4)], ids=str)
@pytest.mark.parametrize("source_kind", KV_TYPES)
@pytest.mark.parametrize("target_kind", KV_TYPES)
def test_conversions_keep_each_token(backend, rng, sizes, source_kind, target_kind):
    source = pool_of(rng, 11, sizes[0], source_kind)
    target = pool_of(rng, 9, sizes[1], target_kind)
    before = target.copy()
    ids = rng.permutation(11)[:5].astype(np.int32)
    to = rng.permutation(9)[: max(1, 4 * sizes[0] // sizes[1])].astype(np.int32)
    first = int(rng.integers(0, sizes[0]))
    backend.convert_blocks(source, target, (1, 0, 2), ids, to, first)
    known = len(ids) * sizes[0]
    for layer in range(2):
        for token in range(len(to) * sizes[1]):
            found = tokens_of(target, layer, to, token)
            if first + token < known:
                assert found == tokens_of(source, layer + 1, ids, first + token)
            else:
                assert not np.any(found)
    others = np.delete(np.arange(9), to)
    assert np.array_equal(target[:, others], before[:, others])
    assert np.array_equal(target[2], before[2])


def test_tokens_after_the_last_one_are_zeros(backend, rng):
    source, target = pool_of(rng, 2, 4, "bfloat16"), pool_of(rng, 3, 4, "int8")
    backend.convert_blocks(
        source, target, (0, 0, 3), np.array([1], np.int32), np.array([0, 2], np.int32), 1
    )
    assert not opened(target[:, 2]).any()
    assert not opened(target[:, 0, :, :, 3]).any()
    assert np.array_equal(opened(target[:, 0, :, :, :3]), opened(source[:, 1, :, :, 1:]))


def test_conversions_read_a_payload_at_any_address(backend, rng):
    source, target = pool_of(rng, 3, 4, "float32"), pool_of(rng, 3, 4, "int8")
    memory = np.zeros(source.nbytes + 1, np.uint8)
    memory[1:] = source.reshape(-1).view(np.uint8)
    payload = np.frombuffer(memory.tobytes(), np.uint8)[1:].view(np.float32).reshape(source.shape)
    ids = np.arange(3, dtype=np.int32)
    backend.convert_blocks(payload, target, (0, 0, 3), ids, ids, 0)
    assert np.array_equal(opened(target), source)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": (1, 0, 3)},
        {"layers": (0, 1, 3)},
        {"layers": (-1, 0, 1)},
        {"source_ids": np.array([3], np.int32)},
        {"target_ids": np.array([-1], np.int32)},
        {"first": -1},
        {"target": np.zeros((3, 3, 2, 1, 4, 14), np.int8)},
        {"target": np.zeros((3, 3, 2, 2, 4, 15), np.int8)},
    ],
    ids=str,
)
def test_wrong_conversions_are_refused_before_anything_is_written(backend, rng, changes):
    arguments = {
        "source": pool_of(rng, 3, 4, "bfloat16"),
        "target": np.zeros((3, 3, 2, 2, 4, 14), np.int8),
        "layers": (0, 0, 3),
        "source_ids": np.array([2], np.int32),
        "target_ids": np.array([1], np.int32),
        "first": 0,
        **changes,
    }
    with pytest.raises(ValueError, match=r"."):
        backend.convert_blocks(**arguments)
    assert not arguments["target"].any()
