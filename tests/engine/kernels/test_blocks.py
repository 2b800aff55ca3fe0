"""Blocks on the move: gather, checksum, scatter."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash


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
