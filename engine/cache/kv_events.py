"""What a worker's prefix cache stores and removes, in the published event schema of vLLM.

Routers of other projects follow the blocks of a worker by these events. A batch is a msgpack array
``[time, events, data parallel rank]``, an event an array that begins with its name. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from baton.proto.hashing import HASH_BYTES

MAX_PENDING = 65_536
"""Events that wait to be taken. Further ones are dropped, and the batch's number is left out."""


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Consecutive blocks that can be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Blocks that were evicted."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """The cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Events in order. ``ts``: seconds since 1970."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


_encode = msgspec.msgpack.Encoder().encode


class KvEventLog:
    """Collects the events of one cache, from its start. ``medium``: ``GPU`` or ``CPU``."""

    def __init__(self, block_size: int, medium: str) -> None:
        self._block_size = block_size
        self._medium = medium
        self._events: list[KvEvent] = [AllBlocksCleared()]
        self.dropped = 0
        """Events that did not fit since the last batch."""

    def stored(self, keys: Sequence[bytes], parent: bytes | None, tokens: list[int]) -> None:
        """Note consecutive blocks. ``parent``: key of the block before; None at position 0."""
        above = None if parent is None else block_number(parent)
        hashes = [block_number(key) for key in keys]
        self._add(BlockStored(hashes, above, tokens, self._block_size, None, self._medium))

    def removed(self, key: bytes) -> None:
        """Note the eviction of a block."""
        last = self._events[-1] if self._events else None
        if type(last) is BlockRemoved:
            last.block_hashes.append(block_number(key))
        else:
            self._add(BlockRemoved([block_number(key)], self._medium))

    def _add(self, event: KvEvent) -> None:
        if len(self._events) >= MAX_PENDING:
            self.dropped += 1
        else:
            self._events.append(event)

    @property
    def pending(self) -> bool:
        """Whether there are events to take."""
        return bool(self._events)

    def take(self, now: float) -> bytes:
        """Return all events since the last call as a batch. ``now``: seconds since 1970."""
        events, self._events = self._events, []
        return _encode(EventBatch(now, events))


def block_number(key: bytes) -> int:
    """Return the 64-bit number of a block by its key in the prefix index.

    Blocks with KV of another sender have longer keys, and numbers of their own.
    """
    digest = key if len(key) == HASH_BYTES else blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest[:8], "big")
