"""The events of a prefix cache, decoded by structs of the published schema."""

import random

import numpy as np
import pytest

from baton.engine.cache.kv_events import (
    BATCH_BYTES,
    MAX_PENDING,
    MAX_PENDING_BYTES,
    KvEventLog,
    block_number,
)
from baton.engine.cache.paged_cache import PagedCache
from baton.proto.hashing import block_hashes

from ..kv_subscriber import BlockRemoved, BlockStored, Follower, decode

SIZE = 4


class Worker:
    """A cache of few blocks and the requests that hold some."""

    def __init__(self, blocks=64, medium="CPU"):
        self.cache = PagedCache(blocks, SIZE)
        self.log = KvEventLog(SIZE, medium)
        self.cache.record(self.log)
        self.follower = Follower()

    def serve(self, tokens, source=b"", steps=1):
        """Compute a request in steps, and return its allocation; None without room."""
        row = np.asarray(tokens, np.int32)
        hashes = block_hashes(row, SIZE, b"salt")
        allocation = self.cache.reserve(hashes, len(row), 0, source)
        if allocation is None:
            return None
        for step in range(1, steps + 1):
            upto = len(row) * step // steps
            self.cache.publish(allocation, hashes, upto, lambda start, end: row[start:end])
        return allocation

    def follow(self):
        if self.log.pending:
            self.follower.take(self.log.take(1.5))

    @property
    def numbers(self):
        return {block_number(key) for key in self.cache.pool.indexed}


def test_ten_thousand_requests_with_evictions_end_with_the_same_blocks():
    rng = random.Random(7)
    worker, held = Worker(), []
    prompts = [[rng.randrange(1000) for _ in range(rng.randrange(1, 80))] for _ in range(60)]
    for _ in range(10_000):
        prompt = rng.choice(prompts)[: rng.randrange(1, 80)] + [rng.randrange(1000)] * 3
        source = rng.choice((b"", b"", b"k" * 32))
        allocation = worker.serve(prompt, source, rng.randrange(1, 4))
        if allocation is not None:
            held.append(allocation)
        while held and (allocation is None or rng.random() < 0.5):
            worker.cache.free(held.pop(rng.randrange(len(held))))
            allocation = held[-1] if held else worker
        if rng.random() < 0.3:
            worker.follow()
    worker.follow()
    follower = worker.follower
    assert follower.blocks.keys() == worker.numbers
    assert follower.cleared == 1
    assert follower.removed > 5_000
    assert follower.stored - follower.removed == len(follower.blocks) > 0


def test_a_block_has_its_tokens_and_its_parent():
    worker = Worker()
    worker.serve(range(12))
    worker.follow()
    hashes = [block_number(one) for one in block_hashes(np.arange(12), SIZE, b"salt")]
    assert worker.follower.blocks == {
        hashes[0]: (None, (0, 1, 2, 3)),
        hashes[1]: (hashes[0], (4, 5, 6, 7)),
        hashes[2]: (hashes[1], (8, 9, 10, 11)),
    }
    worker.serve([*range(8), 50, 51, 52, 53])  # its first two blocks are known
    batch = decode(worker.log.take(2.5))
    (event,) = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (2.5, None)
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash == hashes[1]
    assert (event.token_ids, event.block_size) == ([50, 51, 52, 53], SIZE)
    assert (event.lora_id, event.medium) == (None, "CPU")


def test_evictions_of_one_turn_are_one_event():
    worker = Worker(blocks=4, medium="GPU")
    worker.cache.free(worker.serve(range(16)))
    worker.follow()
    worker.serve(range(100, 112))
    removed, stored = decode(worker.log.take(0.0)).events
    assert isinstance(removed, BlockRemoved)
    assert (len(removed.block_hashes), removed.medium) == (3, "GPU")
    assert isinstance(stored, BlockStored)


def test_blocks_of_another_sender_have_numbers_of_their_own():
    worker = Worker()
    worker.serve(range(8))
    worker.serve(range(8), source=b"k" * 32)
    worker.follow()
    assert len(worker.follower.blocks) == 4
    assert worker.follower.blocks.keys() == worker.numbers


def test_without_a_reader_the_log_is_bounded():
    log = KvEventLog(SIZE, "CPU")
    for number in range(MAX_PENDING + 10):
        log.stored([number.to_bytes(16, "big")], None, [1, 2, 3, 4])
    assert log.dropped == 11  # the first event says that the cache is empty
    events = 0
    while log.pending:
        batch = log.take(0.0)
        assert len(batch) <= BATCH_BYTES
        events += len(decode(batch).events)
    assert events == MAX_PENDING


def test_without_a_reader_the_bytes_of_the_log_are_bounded():
    """65,536 events of whole batches would be 2 GB."""
    log, size = KvEventLog(SIZE, "CPU"), 700
    keys = [number.to_bytes(16, "big") for number in range(size)]
    for _ in range(2000):
        log.stored(keys, None, [100_000] * (SIZE * size))
        log.removed(keys[0])
    dropped, total = log.dropped, 0
    assert dropped > 1000
    while log.pending:
        total += len(log.take(0.0))
    assert MAX_PENDING_BYTES / 4 < total <= MAX_PENDING_BYTES
    log.stored(keys, None, [100_000] * (SIZE * size))
    assert log.dropped == dropped  # there is room again


def test_evictions_that_join_one_event_are_bounded_too(monkeypatch):
    monkeypatch.setattr("baton.engine.cache.kv_events.MAX_PENDING_BYTES", 1 << 16)
    log = KvEventLog(SIZE, "CPU")
    for _ in range(10_000):
        log.removed(b"k" * 16)
    assert log.dropped
    assert sum(len(log.take(0.0)) for _ in iter(lambda: log.pending, False)) <= 1 << 16


def test_long_prompts_and_evictions_are_divided_into_bounded_batches():
    log, follower = KvEventLog(SIZE, "CPU"), Follower()
    keys = [number.to_bytes(16, "little") for number in range(1, 20_001)]
    log.stored(keys, None, [1 << 30] * SIZE * len(keys))
    batches = []
    while log.pending:
        batches.append(log.take(0.0))
        follower.take(batches[-1])
    assert len(follower.blocks) == 20_000
    assert [parent for parent, _ in follower.blocks.values()] == [None, *follower.blocks][:-1]
    for key in keys:
        log.removed(key)
    while log.pending:
        batches.append(log.take(0.0))
        follower.take(batches[-1])
    assert not follower.blocks
    assert max(len(batch) for batch in batches) <= BATCH_BYTES


@pytest.mark.parametrize("key", [b"h" * 16, b"k" * 32 + b"h" * 16])
def test_a_number_fits_64_bits(key):
    assert 0 <= block_number(key) < 1 << 64
