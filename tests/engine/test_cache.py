"""Paged cache: reservations, shared prefixes and reference counts, also under random operations.

The state machine keeps a model of what a KV pool would contain: every allocation "writes"
its own tokens into the blocks it may write to, and reading an allocation back must give the
tokens it stands for. A shared block that is overwritten, or a prefix hit on a block
with other content, shows as a wrong token.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from baton.engine.cache.paged_cache import Allocation, PagedCache
from baton.proto.errors import InternalError

BLOCK = 4


def hashes_of(tokens: list[int]) -> list[bytes]:
    """A chain: the hash of a block depends on all tokens up to its end."""
    return [bytes(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]


def reserved(cache: PagedCache, tokens: list[int], growth: int = 0) -> Allocation:
    allocation = cache.reserve(hashes_of(tokens), len(tokens), growth)
    assert allocation is not None
    return allocation


def test_reserve_finds_the_published_prefix_but_leaves_one_token() -> None:
    cache = PagedCache(8, BLOCK)
    tokens = list(range(8))
    first = reserved(cache, tokens)
    cache.publish(first, hashes_of(tokens), 8)
    same, longer = reserved(cache, tokens), reserved(cache, [*tokens, 9])
    assert (first.cached_blocks, same.cached_blocks, longer.cached_blocks) == (0, 1, 2)
    assert longer.blocks[:2] == first.blocks
    cache.check_integrity([first, same, longer])


def test_reserve_is_all_or_nothing_and_pins_idle_hits() -> None:
    cache = PagedCache(4, BLOCK)
    tokens = list(range(8))
    first = reserved(cache, tokens)
    cache.publish(first, hashes_of(tokens), 8)
    cache.free(first)
    other = reserved(cache, [50] * 8)
    # 2 hits (idle) + 1 fresh fit only if the hits are not counted as available as well.
    assert cache.reserve(hashes_of(tokens), 9, growth=4) is None
    assert cache.pool.cached == 2
    hit = reserved(cache, [*tokens, 9]) if cache.pool.available > 2 else None
    assert hit is None
    cache.free(other)
    hit = reserved(cache, [*tokens, 9])
    assert hit.cached_blocks == 2
    cache.check_integrity([hit])


def test_publish_only_counts_full_valid_blocks() -> None:
    cache = PagedCache(8, BLOCK)
    tokens = list(range(12))
    allocation = reserved(cache, tokens)
    cache.publish(allocation, hashes_of(tokens), 7)
    assert len(cache.match(hashes_of(tokens), 9)) == 1
    cache.publish(allocation, hashes_of(tokens), 12)
    assert cache.match(hashes_of(tokens), 9) == allocation.blocks


def test_growth_keeps_old_tables_as_they_were() -> None:
    cache = PagedCache(4, BLOCK)
    allocation = reserved(cache, [1, 2, 3])
    snapshot = allocation.block_table
    assert cache.grow(allocation, 4)
    assert allocation.block_table is snapshot
    assert cache.grow(allocation, 9)
    assert len(snapshot) == 1 and len(allocation.block_table) == 3
    assert allocation.capacity == 12
    assert not cache.grow(allocation, 17)
    assert allocation.capacity == 12


def test_an_allocation_is_used_up_once() -> None:
    cache = PagedCache(4, BLOCK)
    allocation = reserved(cache, [1, 2, 3])
    cache.free(allocation)
    with pytest.raises(InternalError, match="twice"):
        cache.free(allocation)
    with pytest.raises(InternalError, match="cannot grow"):
        cache.grow(allocation, 9)
    with pytest.raises(InternalError, match="cannot be published"):
        cache.publish(allocation, [], 0)


def test_prefixes_outlive_their_tails() -> None:
    cache = PagedCache(3, BLOCK)
    tokens = list(range(12))
    allocation = reserved(cache, tokens)
    cache.publish(allocation, hashes_of(tokens), 12)
    cache.free(allocation)
    reserved(cache, [99] * BLOCK)
    assert len(cache.match(hashes_of(tokens), 9)) == 2


def test_integrity_check_sees_two_writers() -> None:
    cache = PagedCache(4, BLOCK)
    first = reserved(cache, [1, 2, 3])
    cache.pool.pin(first.blocks[0])
    twin = Allocation(first.block_table, 0, first.capacity)
    with pytest.raises(InternalError, match="is writable but has several holders"):
        cache.check_integrity([first, twin])


class CacheMachine(RuleBasedStateMachine):
    """Random reservations, growth, publishing and frees, checked by the written tokens."""

    allocations = Bundle("allocations")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache(10, BLOCK)
        self.live: dict[Allocation, list[int]] = {}
        self.content: dict[tuple[int, int], int] = {}

    # Only two symbols, so that many prefixes are equal.
    @rule(
        target=allocations,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        growth=st.integers(0, 9),
    )
    def reserve(self, tokens: list[int], growth: int) -> Allocation | None:
        before = self.cache.pool.used, self.cache.pool.cached
        allocation = self.cache.reserve(hashes_of(tokens), len(tokens), growth)
        if allocation is None:
            assert (self.cache.pool.used, self.cache.pool.cached) == before
            return None
        assert allocation.cached_blocks * BLOCK < len(tokens)
        assert allocation.capacity >= len(tokens) + growth
        self.live[allocation] = tokens
        self._write(allocation, allocation.cached_blocks * BLOCK)
        return allocation

    @rule(allocation=allocations, tail=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def grow(self, allocation: Allocation | None, tail: list[int]) -> None:
        if allocation not in self.live:
            return
        tokens = self.live[allocation]
        if self.cache.grow(allocation, len(tokens) + len(tail)):
            self.live[allocation] = tokens + tail
            self._write(allocation, len(tokens))

    @rule(allocation=allocations, cut=st.integers(0, 5))
    def publish(self, allocation: Allocation | None, cut: int) -> None:
        if allocation in self.live:
            tokens = self.live[allocation]
            self.cache.publish(allocation, hashes_of(tokens), max(len(tokens) - cut, 0))

    @rule(allocation=consumes(allocations))
    def free(self, allocation: Allocation | None) -> None:
        if self.live.pop(allocation, None) is not None:
            self.cache.free(allocation)

    @invariant()
    def books_fit(self) -> None:
        self.cache.check_integrity(self.live)

    @invariant()
    def every_allocation_reads_its_own_tokens(self) -> None:
        for allocation, tokens in self.live.items():
            read = [self.content[slot] for slot in self._slots(allocation, 0, len(tokens))]
            assert read == tokens

    def _write(self, allocation: Allocation, start: int) -> None:
        tokens = self.live[allocation]
        slots = self._slots(allocation, start, len(tokens))
        self.content.update(zip(slots, tokens[start:], strict=True))

    def _slots(self, allocation: Allocation, start: int, end: int) -> list[tuple[int, int]]:
        blocks = allocation.blocks
        return [(blocks[i // BLOCK], i % BLOCK) for i in range(start, end)]


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40)
