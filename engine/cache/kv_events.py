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
MAX_PENDING_BYTES = 16 << 20
"""Events that wait to be taken: at most so many, and so many bytes once they are encoded.

Further ones are dropped, and the batch's number is left out.
"""

BATCH_BYTES = 1 << 15
"""Most bytes of a batch, so that a queue of batches is bounded in bytes (or one block's event)."""


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
        self._bytes = _bytes(self._events[0])
        self.dropped = 0
        """Events that did not fit since the last batch."""

    def stored(self, keys: Sequence[bytes], parent: bytes | None, tokens: list[int]) -> None:
        """Note consecutive blocks. ``parent``: key of the block before; None at position 0."""
        above = None if parent is None else block_number(parent)
        hashes = [block_number(key) for key in keys]
        size = self._block_size
        most = max(1, (BATCH_BYTES - _EVENT_BYTES) // (_NUMBER_BYTES * (1 + size)))
        for at in range(0, len(hashes), most):
            part, span = hashes[at : at + most], tokens[at * size : (at + most) * size]
            self._add(BlockStored(part, above, span, size, None, self._medium))
            above = part[-1]

    def removed(self, key: bytes) -> None:
        """Note the eviction of a block."""
        last = self._events[-1] if self._events else None
        room = MAX_PENDING_BYTES - self._bytes >= _NUMBER_BYTES
        if room and type(last) is BlockRemoved and _bytes(last) + _NUMBER_BYTES <= BATCH_BYTES:
            last.block_hashes.append(block_number(key))
            self._bytes += _NUMBER_BYTES
        else:
            self._add(BlockRemoved([block_number(key)], self._medium))

    def _add(self, event: KvEvent) -> None:
        size = _bytes(event)
        if len(self._events) >= MAX_PENDING or self._bytes + size > MAX_PENDING_BYTES:
            self.dropped += 1
        else:
            self._events.append(event)
            self._bytes += size

    @property
    def pending(self) -> bool:
        """Whether there are events to take."""
        return bool(self._events)

    def take(self, now: float) -> bytes:
        """Return the first pending events as a batch. ``now``: seconds since 1970."""
        count, size = 0, 0
        for event in self._events:
            more = _bytes(event)
            if count and size + more > BATCH_BYTES:
                break
            count, size = count + 1, size + more
        self._bytes -= size
        events, self._events = self._events[:count], self._events[count:]
        return _encode(EventBatch(now, events))


_NUMBER_BYTES = 9
_EVENT_BYTES = 64
"""Of an event and of its batch, without hashes and tokens."""


def _bytes(event: KvEvent) -> int:
    """Return the most bytes that an event is encoded in."""
    match event:
        case BlockStored():
            return _EVENT_BYTES + _NUMBER_BYTES * (len(event.block_hashes) + len(event.token_ids))
        case BlockRemoved():
            return _EVENT_BYTES + _NUMBER_BYTES * len(event.block_hashes)
    return _EVENT_BYTES


def block_number(key: bytes) -> int:
    """Return the 64-bit number of a block by its key in the prefix index.

    Blocks with KV of another sender have longer keys, and numbers of their own.
    """
    digest = key if len(key) == HASH_BYTES else blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest[:8], "big")
