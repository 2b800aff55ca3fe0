"""Paged attention: accuracy, and bits that depend on the row alone.

A row must not change with other rows, chunks, sequences, block order or block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from baton.engine.kernels.load import load_backend

from .conftest import COMPILED, ROUNDING, or_skipped

EPS = 2.0**-24
# heads, KV heads, dim, block size
SHAPES = [
    (4, 2, 64, 16),
    (2, 2, 24, 5),
    (3, 1, 20, 128),
    (8, 2, 32, 8),
    (1, 1, 128, 32),
    (6, 2, 80, 1),
    (8, 1, 16, 8),
    (7, 1, 48, 16),
    (10, 2, 144, 16),
]
WINDOWS = [0, 1, 7, 100]


class Halves:
    """A backend whose attention may round its operands to bfloat16."""

    def __init__(self, backend):
        self._backend = backend

    def attention(self, *arguments, **named):
        self._backend.attention(*arguments, **named, halves=True)


@pytest.fixture(params=or_skipped(ROUNDING))
def halves(request):
    """Backends whose attention rounds its operands to bfloat16."""
    return Halves(load_backend("cpu", isa=request.param))


@pytest.fixture(params=[*COMPILED, *or_skipped(ROUNDING, "-halves")])
def compiled(request):
    """Backends that promise row independence, also those that round."""
    isa, _, rounded = request.param.partition("-")
    backend = load_backend("cpu", isa=isa)
    return Halves(backend) if rounded else backend


@dataclass
class Paged:
    """One sequence of random queries and KV in a pool whose other slots are NaN."""

    q: np.ndarray
    kv: np.ndarray
    table: np.ndarray


def paged(seed: int, shape, length: int, block_size: int | None = None) -> Paged:
    heads, kv_heads, dim, default = shape
    size = block_size or default
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((length, heads, dim), dtype=np.float32)
    values = rng.standard_normal((length, 2, kv_heads, dim), dtype=np.float32)
    count = -(-length // size)
    kv = np.full((count + 3, 2, kv_heads, size, dim), np.nan, np.float32)
    table = rng.permutation(count + 3)[:count].astype(np.int32)
    at = np.arange(length)
    kv[table[at // size], :, :, at % size] = values
    return Paged(q, kv, table)


def attend(backend, p: Paged, rows: slice, window=0, out=None):
    """Attention of some rows of one sequence, as one call."""
    positions = np.arange(len(p.q), dtype=np.int32)[rows]
    q = np.ascontiguousarray(p.q[rows])
    out = np.empty((len(q), q.shape[1] * q.shape[2]), q.dtype) if out is None else out
    offsets = np.array([0, len(q)], np.int32)
    scale = q.shape[2] ** -0.5
    backend.attention(q, p.kv, p.table[None], offsets, positions, scale, window, out)
    return out


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_oracle(backend, oracle, poisoned, shape, window):
    p = paged(1, shape, 150)
    exact = attend(
        oracle, Paged(p.q.astype(float), p.kv.astype(float), p.table), slice(None), window
    )
    out = attend(backend, p, slice(None), window, poisoned(150, shape[0] * shape[2]))
    # Outputs are averages of values of size 1; scores of size 1 carry errors of dim products.
    assert np.abs(out - exact).max() < EPS * 100
    assert np.abs(out - exact).mean() < EPS * 5


def test_far_apart_scores_neither_overflow_nor_lose_the_largest(backend, oracle):
    p = paged(2, (2, 1, 16, 16), 90)
    p.q *= 1000
    exact = attend(oracle, Paged(p.q.astype(float), p.kv.astype(float), p.table), slice(None))
    np.testing.assert_allclose(attend(backend, p, slice(None)), exact, atol=2e-3)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_one_row_gives_the_bits_of_the_prefill(compiled, shape, window):
    p = paged(3, shape, 140)
    whole = attend(compiled, p, slice(None), window)
    for row in range(140):
        alone = attend(compiled, p, slice(row, row + 1), window)
        assert np.array_equal(alone[0], whole[row]), row


@pytest.mark.parametrize("seed", range(6))
def test_any_split_into_chunks_gives_the_same_bits(compiled, seed):
    p = paged(4, (4, 2, 64, 16), 300)
    whole = attend(compiled, p, slice(None))
    rng = np.random.default_rng(seed)
    cuts = [0, *sorted(rng.choice(np.arange(1, 300), 9, replace=False).tolist()), 300]
    for start, stop in pairwise(cuts):
        assert np.array_equal(attend(compiled, p, slice(start, stop)), whole[start:stop])


def test_block_order_and_block_size_do_not_matter(compiled):
    p = paged(5, (4, 2, 32, 16), 130)
    whole = attend(compiled, p, slice(None), 50)
    flat = p.kv[p.table].transpose(0, 3, 1, 2, 4).reshape(-1, 2, 2, 32)[:130]
    for size, seed in [(1, 0), (3, 1), (8, 2), (16, 3), (64, 4), (130, 5), (256, 6)]:
        other = paged(seed, (4, 2, 32, 16), 130, size)
        at = np.arange(130)
        other.kv[other.table[at // size], :, :, at % size] = flat
        again = attend(compiled, Paged(p.q, other.kv, other.table), slice(None), 50)
        assert np.array_equal(again, whole), size


def test_sequences_of_a_batch_do_not_see_each_other(backend):
    shape = (4, 2, 64, 16)
    parts = [
        (paged(s, shape, n), slice(a, n)) for s, n, a in [(6, 70, 69), (7, 33, 0), (8, 90, 50)]
    ]
    pool = np.concatenate([p.kv for p, _ in parts])
    bases = np.cumsum([0, *[len(p.kv) for p, _ in parts]])[:-1]
    tables = np.full((4, 8), -1, np.int32)  # unused entries are never read
    for row, (p, _), base in zip((0, 1, 3), parts, bases, strict=True):
        tables[row, : len(p.table)] = p.table + base
    q = np.concatenate([p.q[rows] for p, rows in parts])
    positions = np.concatenate([np.arange(len(p.q))[rows] for p, rows in parts]).astype(np.int32)
    offsets = np.array([0, 1, 34, 34, 74], np.int32)
    out = np.full((len(q), 256), np.nan, np.float32)
    backend.attention(q, pool, tables, offsets, positions, 0.125, 0, out)
    expected = np.concatenate([attend(backend, p, rows) for p, rows in parts])
    if backend.row_independent:
        assert np.array_equal(out, expected)
    else:
        np.testing.assert_allclose(out, expected, atol=1e-5)


def test_blocks_behind_the_window_are_not_read(backend):
    p = paged(9, (4, 2, 64, 16), 140)
    before = attend(backend, p, slice(130, 140), 20)
    p.kv[p.table[:6]] = np.nan
    p.table[:6] = -1
    assert np.array_equal(attend(backend, p, slice(130, 140), 20), before)


def _call(backend, **changes):
    p = paged(10, (4, 2, 16, 8), 20)
    arguments = {
        "q": p.q,
        "kv_layer": p.kv,
        "block_tables": p.table[None],
        "row_offsets": np.array([0, 20], np.int32),
        "positions": np.arange(20, dtype=np.int32),
        "scale": 0.25,
        "window": 0,
        "out": np.full((20, 64), np.nan, np.float32),
    }
    arguments.update(changes)
    try:
        backend.attention(**arguments)
    finally:
        if "out" not in changes and changes:
            assert np.isnan(arguments["out"]).all(), "written before the arguments were checked"


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": np.arange(20, dtype=np.int32) + 5},
        {"positions": np.arange(20, dtype=np.int32) - 1},
        {"positions": np.arange(19, dtype=np.int32)},
        {"block_tables": np.array([[0, 1, 6]], np.int32)},
        {"block_tables": np.array([[0, -1, 2]], np.int32)},
        {"block_tables": np.array([[0, 1, 2], [0, 1, 2]], np.int32)},
        {"row_offsets": np.array([0, 21], np.int32)},
        {"row_offsets": np.array([1, 20], np.int32)},
        {"row_offsets": np.array([0, 19], np.int32)},
        {"q": np.zeros((20, 3, 16), np.float32)},
        {"q": np.zeros((20, 4, 8), np.float32)},
        {"out": np.zeros((20, 63), np.float32)},
    ],
    ids=lambda c: next(iter(c)),
)
def test_bad_arguments_raise_before_any_write(backend, changes):
    with pytest.raises(ValueError):
        _call(backend, **changes)


def test_good_arguments_pass(backend):
    _call(backend)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_asked_for_at_the_end_see_the_whole_sequence(backend, oracle, shape):
    """Bidirectional attention: a row sees the tokens up to its position, wherever its key is."""
    p = paged(9, shape, 130)
    heads, kv_heads, dim, size = shape
    positions = np.full(130, 129, np.int32)
    out = np.empty((130, heads * dim), np.float32)
    offsets = np.array([0, 130], np.int32)
    backend.attention(p.q, p.kv, p.table[None], offsets, positions, dim**-0.5, 0, out)
    at = np.arange(130)
    keys, values = (
        np.repeat(p.kv[p.table[at // size], kind, :, at % size].astype(float), heads // kv_heads, 1)
        for kind in (0, 1)
    )
    scores = np.einsum("thd,shd->hts", p.q.astype(float), keys) * dim**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    exact = np.einsum("hts,shd->thd", weights, values).reshape(130, -1)
    assert np.abs(out - exact).max() < EPS * 100


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] % 32 == 0])
def test_halves_are_as_near_as_bfloat16_allows(halves, oracle, poisoned, shape, window):
    """Values of size 1, weights and scores are rounded by at most 2^-8 of their size."""
    p = paged(1, shape, 150)
    exact = attend(
        oracle, Paged(p.q.astype(float), p.kv.astype(float), p.table), slice(None), window
    )
    out = attend(halves, p, slice(None), window, poisoned(150, shape[0] * shape[2]))
    distance = np.abs(out - exact)
    assert EPS * 100 < distance.max() < 2.0**-6
    assert distance.mean() < 2.0**-9


@pytest.mark.parametrize("shape", [(8, 1, 32, 16), (9, 1, 64, 16), (16, 1, 32, 8), (3, 3, 96, 16)])
def test_few_queries_have_the_bits_of_many(halves, shape):
    """Numbers of any size, subnormal ones too; up to 8 queries use no tiles of AMX."""
    p, rng = paged(9, shape, 200), np.random.default_rng(10)
    p.q *= np.exp2(rng.integers(-130, 1, (*p.q.shape[:2], 1))).astype(np.float32)
    p.kv *= np.exp2(rng.integers(-130, 1, (len(p.kv), 2, 1, 1, 1))).astype(np.float32)
    whole = attend(halves, p, slice(None))
    for row in range(200):
        assert np.array_equal(attend(halves, p, slice(row, row + 1))[0], whole[row]), row


@pytest.mark.parametrize("step", [64, 24, -64])
def test_a_peak_that_grows_from_tile_to_tile(halves, oracle, step):
    """Scores of one tile are equal, the next 8, 3 or -8 larger, exact in bfloat16."""
    p = paged(11, (4, 2, 64, 16), 200)
    at = np.arange(200)
    p.q[:], p.q[:, :, 0] = 0, 1
    p.kv[p.table[at // 16], 0, :, at % 16, 0] = (at // 64 * step)[:, None]
    exact = attend(oracle, Paged(p.q.astype(float), p.kv.astype(float), p.table), slice(None))
    whole = attend(halves, p, slice(None))
    assert np.abs(whole - exact).max() < 2.0**-7
    for row in (63, 64, 140, 199):
        assert np.array_equal(attend(halves, p, slice(row, row + 1))[0], whole[row])
