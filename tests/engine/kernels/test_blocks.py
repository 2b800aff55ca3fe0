"""Moves of blocks: gather, checksum, scatter."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import xxhash

from baton.engine.kernels.reference import NumpyBackend


@pytest.fixture
def pool(rng):
    return rng.standard_normal((3, 7, 2, 2, 4, 8), dtype=np.float32)


IDS = np.array([5, 0, 3], np.int32)


def payload_for(pool, layers, ids=IDS):
    return np.full(layers * len(ids) * pool[0, 0].nbytes, 0xAB, np.uint8)


@pytest.mark.parametrize(("start", "count"), [(0, 3), (1, 1), (2, 1), (0, 0)])
def test_gather_is_layer_major_and_hashes_the_copy(backend, pool, start, count):
    payload = payload_for(pool, count)
    digest = backend.gather_blocks(pool, start, count, IDS, payload)
    assert payload.tobytes() == pool[start : start + count, IDS].tobytes()
    assert digest == xxhash.xxh3_64_intdigest(payload.tobytes())


@pytest.mark.parametrize(("start", "count"), [(0, 3), (1, 2)])
def test_scatter_inverts_gather_and_touches_nothing_else(backend, pool, start, count):
    payload = payload_for(pool, count)
    backend.gather_blocks(pool, start, count, IDS, payload)
    target = np.full_like(pool, np.nan)
    other = np.array([1, 6, 2], np.int32)
    backend.scatter_blocks(target, start, count, other, payload)
    assert np.array_equal(target[start : start + count, other], pool[start : start + count, IDS])
    assert np.isfinite(target).sum() == count * 3 * pool[0, 0].size


def test_scatter_reads_a_read_only_payload(backend, pool):
    payload = payload_for(pool, 1)
    backend.gather_blocks(pool, 0, 1, IDS, payload)
    received = np.frombuffer(payload.tobytes(), np.uint8)
    target = np.zeros_like(pool)
    backend.scatter_blocks(target, 0, 1, IDS, received)
    assert np.array_equal(target[0, IDS], pool[0, IDS])


# Bytes of a block beside the stripes (64) and rounds (1024) of the checksum; 40 is no whole
# stripe, and one block of 64 bytes is too short for the long form of the sum.
@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 8, 16), (2, 8, 8), (1, 5, 1), (4, 16, 32)])
@pytest.mark.parametrize("blocks", [1, 2, 5, 16, 17])
def test_one_pass_copies_and_sums(backend, rng, shape, blocks):
    pool = rng.standard_normal((2, 40, 2, *shape), dtype=np.float32)
    target = np.zeros_like(pool)
    ids = rng.permutation(40)[:blocks].astype(np.int32)
    for layers in (1, 2):
        payload = np.full(layers * blocks * pool[0, 0].nbytes, 0xAB, np.uint8)
        expected = xxhash.xxh3_64_intdigest(pool[:layers, ids].tobytes())
        assert backend.gather_blocks(pool, 0, layers, ids, payload) == expected
        assert backend.scatter_blocks(target, 0, layers, ids, payload) == expected
        assert np.array_equal(target[:layers, ids], pool[:layers, ids])


def test_large_scatter_writes_past_the_cache_and_sums(backend, rng):
    pool = rng.standard_normal((1, 40, 2, 4, 16, 64), dtype=np.float32)
    target = np.zeros_like(pool)
    ids = rng.permutation(40)[:20].astype(np.int32)
    payload = pool[0, ids].reshape(-1).view(np.uint8)
    digest = backend.scatter_blocks(target, 0, 1, ids, payload)
    assert digest == xxhash.xxh3_64_intdigest(payload.tobytes())
    assert np.array_equal(target[0, ids], pool[0, ids])
    assert not np.delete(target[0], ids, axis=0).any()


@pytest.mark.parametrize("size", [0, 1, 240, 241, 255, 256, 257, 1023, 1024, 1025, 1088, 5000])
def test_checksum_is_xxh3_of_any_length(backend, rng, size):
    payload = rng.integers(0, 256, size, np.uint8)
    assert backend.checksum(payload) == xxhash.xxh3_64_intdigest(payload.tobytes())


@pytest.mark.parametrize(
    ("start", "count", "ids", "extra"),
    [
        (0, 4, [0], 0),
        (-1, 1, [0], 0),
        (3, 1, [0], 0),
        (0, 1, [7], 0),
        (0, 1, [-1], 0),
        (0, 1, [0], 1),
        (0, 1, [0], -1),
    ],
)
def test_bad_arguments_raise_and_write_nothing(backend, pool, start, count, ids, extra):
    block_ids = np.array(ids, np.int32)
    payload = np.full(max(count, 0) * len(ids) * pool[0, 0].nbytes + extra, 0xAB, np.uint8)
    before = pool.copy()
    for move in (backend.gather_blocks, backend.scatter_blocks):
        with pytest.raises(ValueError):
            move(pool, start, count, block_ids, payload)
    assert (payload == 0xAB).all()
    assert np.array_equal(pool, before)


def pools(rng, shape, layers=2, blocks=(40, 23)):
    """A read-only source, as memory of another process is, and a target of another length."""
    source = rng.standard_normal((layers, blocks[0], 2, *shape), dtype=np.float32)
    source.flags.writeable = False
    return source, np.full((layers, blocks[1], 2, *shape), np.nan, np.float32)


@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 8, 16), (2, 8, 8), (1, 5, 1), (4, 16, 32)])
@pytest.mark.parametrize("blocks", [0, 1, 2, 5, 16, 17])
def test_copy_and_sum_do_as_numpy_and_agree_with_gather(backend, rng, shape, blocks):
    source, target = pools(rng, shape)
    expected = target.copy()
    ids = rng.integers(0, 40, blocks, np.int32)
    others = rng.permutation(23)[:blocks].astype(np.int32)
    for start, layers in ((1, 1), (0, 2), (2, 0)):
        digest = NumpyBackend().copy_blocks(source, expected, start, layers, ids, others)
        payload = payload_for(source, layers, ids)
        assert backend.gather_blocks(source, start, layers, ids, payload) == digest
        assert backend.copy_blocks(source, target, start, layers, ids, others) == digest
        assert backend.sum_blocks(source, start, layers, ids) == digest
        assert np.array_equal(target, expected, equal_nan=True)
        assert digest == xxhash.xxh3_64_intdigest(source[start : start + layers, ids].tobytes())


@pytest.mark.parametrize("skip", [0, 1])
def test_large_copy_writes_past_the_cache_aligned_or_not(backend, rng, skip):
    source, _ = pools(rng, (4, 16, 64))
    memory = np.zeros(source.size + 32, np.float32)
    first = -memory.ctypes.data % 64 // 4 + skip
    target = memory[first : first + source.size].reshape(source.shape)
    ids, others = (rng.permutation(40)[:20].astype(np.int32) for _ in range(2))
    digest = backend.copy_blocks(source, target, 0, 2, ids, others)
    assert digest == xxhash.xxh3_64_intdigest(source[:, ids].tobytes())
    assert np.array_equal(target[:, others], source[:, ids])
    assert np.count_nonzero(memory) == np.count_nonzero(target[:, others])


@pytest.mark.parametrize("kv_heads", [4, 5])
@pytest.mark.parametrize(
    ("start", "count", "ids", "others"),
    [
        (0, 3, [0], [0]),
        (-1, 1, [0], [0]),
        (2, 1, [0], [0]),
        (0, -1, [0], [0]),
        (0, 1, [0, 40], [0, 1]),
        (0, 1, [0, -1], [0, 1]),
        (0, 1, [0, 1], [0, 23]),
        (0, 1, [0, 1], [0, -1]),
        (0, 1, [0, 1], [0]),
        (0, 1, [0], [0, 1]),
    ],
)
def test_a_bad_copy_writes_nothing(backend, rng, kv_heads, start, count, ids, others):
    source, target = pools(rng, (kv_heads, 1, 4))
    source_ids, target_ids = np.array(ids, np.int32), np.array(others, np.int32)
    with pytest.raises(ValueError):
        backend.copy_blocks(source, target, start, count, source_ids, target_ids)
    assert np.isnan(target).all()
    if len(ids) == len(others) and max(others) < 23 and min(others) >= 0:
        with pytest.raises(ValueError):
            backend.sum_blocks(source, start, count, source_ids)


@pytest.mark.parametrize("shape", [(3, 7, 2, 2, 4, 8), (2, 7, 2, 4, 4, 8), (2, 7, 2, 2, 8, 4)])
def test_copies_between_pools_of_other_shapes_are_refused(backend, rng, shape):
    source, _ = pools(rng, (2, 4, 8))
    target = np.full(shape, np.nan, np.float32)
    with pytest.raises(ValueError):
        backend.copy_blocks(source, target, 0, 1, IDS, IDS)
    assert np.isnan(target).all()


@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("kinds", list(permutations((np.float32, np.uint16, np.int8), 2)))
def test_copies_between_pools_of_other_types_are_refused(backend, kinds, blocks):
    source, target = (np.full((2, 8, 2, 4, 4, 16), fill, kinds[fill]) for fill in (0, 1))
    with pytest.raises(ValueError, match="different types"):
        backend.copy_blocks(source, target, 0, 1, IDS[:blocks], IDS[:blocks])
    assert (target == 1).all()


def test_pools_that_overlap_or_have_gaps_or_are_read_only_targets_are_refused(backend, rng):
    pool = rng.standard_normal((2, 8, 2, 4, 4, 8), dtype=np.float32)
    other, before = np.zeros_like(pool), pool.copy()
    halves = memoryview(pool).cast("B")
    overlapping = np.frombuffer(halves[pool.nbytes // 4 :], np.float32, pool.size // 2)
    calls = [(pool, pool), (pool[:, ::2], other[:, :4]), (other[:, :4], pool[:, ::2])]
    calls += [(pool[:, :4], other[:, :4]), (pool.transpose(0, 1, 2, 4, 3, 5), other)]
    calls.append((pool[:1], overlapping.reshape(1, *pool.shape[1:])))
    sealed = other.view()
    sealed.flags.writeable = False
    calls.append((pool, sealed))
    for source, target in calls:
        with pytest.raises(ValueError):
            backend.copy_blocks(source, target, 0, 1, IDS[2:], IDS[2:])
    with pytest.raises(ValueError):
        backend.sum_blocks(pool[:, ::2], 0, 1, IDS[2:])
    assert np.array_equal(pool, before)
    assert not other.any()
