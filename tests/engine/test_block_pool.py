"""The block pool's states, eviction order and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.engine.cache.block_pool import BlockPool
from baton.proto.errors import InternalError


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    first = taken(pool, 3)
    assert pool.allocate(2) is None
    assert (pool.used, pool.cached, pool.available) == (3, 0, 1)
    assert sorted([*first, *taken(pool, 1)]) == [0, 1, 2, 3]


def test_released_block_is_cached_only_when_its_hash_is_known() -> None:
    pool = BlockPool(3)
    known, unknown = taken(pool, 2)
    assert pool.index(known, b"h")
    pool.unpin(known)
    pool.unpin(unknown)
    assert (pool.used, pool.cached, pool.available) == (0, 1, 3)
    assert pool.lookup(b"h") == known
    pool.check_integrity({})


def test_eviction_takes_free_blocks_first_then_the_least_recently_released() -> None:
    pool = BlockPool(3)
    blocks = taken(pool, 3)
    for block in blocks[:2]:
        pool.index(block, b"%d" % block)
    pool.unpin(blocks[1])
    pool.unpin(blocks[0])
    pool.unpin(blocks[2])
    assert taken(pool, 1) == [blocks[2]]
    assert taken(pool, 1) == [blocks[1]]
    assert pool.lookup(b"%d" % blocks[1]) is None
    assert pool.lookup(b"%d" % blocks[0]) == blocks[0]
    pool.check_integrity({blocks[2]: 1, blocks[1]: 1})


def test_pinned_cached_block_is_not_evicted() -> None:
    pool = BlockPool(2)
    block = taken(pool, 1)[0]
    pool.index(block, b"h")
    pool.unpin(block)
    pool.pin(block)
    assert block not in taken(pool, 1)
    assert pool.allocate(1) is None


def test_second_block_of_a_hash_stays_unindexed() -> None:
    pool = BlockPool(2)
    first, second = taken(pool, 2)
    assert pool.index(first, b"h")
    assert not pool.index(second, b"h")
    assert pool.lookup(b"h") == first
    pool.unpin(second)
    pool.check_integrity({first: 1})


def test_misuse_raises_instead_of_corrupting() -> None:
    pool = BlockPool(2)
    block = taken(pool, 1)[0]
    pool.unpin(block)
    with pytest.raises(InternalError, match="more often"):
        pool.unpin(block)
    with pytest.raises(InternalError, match="free"):
        pool.pin(block)
    with pytest.raises(InternalError, match="no owner"):
        pool.index(block, b"h")


def test_integrity_check_sees_a_lost_reference() -> None:
    pool = BlockPool(2)
    block = taken(pool, 1)[0]
    pool.check_integrity({block: 1})
    with pytest.raises(InternalError, match="references"):
        pool.check_integrity({})
    with pytest.raises(InternalError, match="references"):
        pool.check_integrity({block: 2})


def _free_one_has_a_hash(pool: BlockPool) -> None:
    pool._hashes[0] = b"h"
    pool._index[b"h"] = 0


def _cached_one_has_no_hash(pool: BlockPool) -> None:
    pool._hashes[1], _ = None, pool._index.clear()


def _index_names_another_hash(pool: BlockPool) -> None:
    pool._index[b"other"] = pool._index.pop(b"one")


def _index_lacks_a_hash(pool: BlockPool) -> None:
    pool._hashes[2] = b"two"


def _block_is_lost(pool: BlockPool) -> None:
    pool._free.remove(0)


def _block_is_free_twice(pool: BlockPool) -> None:
    pool._free.append(0)


def _owned_block_is_free(pool: BlockPool) -> None:
    pool._free[pool._free.index(0)] = 2


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_free_one_has_a_hash, "free block has a hash"),
        (_cached_one_has_no_hash, "cached block has no hash"),
        (_index_names_another_hash, "does not list block 1 by its hash"),
        (_index_lacks_a_hash, "does not list all"),
        (_block_is_lost, "no state"),
        (_block_is_free_twice, "available twice"),
        (_owned_block_is_free, "in two"),
    ],
)
def test_integrity_check_sees_a_block_in_a_wrong_state(
    damage: Callable[[BlockPool], None], text: str
) -> None:
    pool = BlockPool(3)
    blocks = sorted(taken(pool, 3))
    pool.index(1, b"one")
    pool.unpin(0)
    pool.unpin(1)
    pool.check_integrity({blocks[2]: 1})
    damage(pool)
    with pytest.raises(InternalError, match=text):
        pool.check_integrity({blocks[2]: 1})
