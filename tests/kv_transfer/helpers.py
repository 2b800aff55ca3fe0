"""A small decode side and a small prefill side, without sockets."""

from __future__ import annotations

import numpy as np

from baton.engine.cache.paged_cache import Allocation, PagedCache
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.receiver_grants import ReceiverConfig
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.sender_handoff import SenderConfig
from baton.proto.layout import KVLayout
from baton.proto.wire.context_maps import grown_map
from baton.proto.wire.messages import Commit, GrantRef, Reserve
from baton.proto.wire.wire_context import WireContext, WireTokens

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=4)
REQUEST = b"r" * 16
PEER = b"prefill-0:1"
INCARNATION = 77


class Store:
    """A PagedCache that counts the allocated blocks."""

    def __init__(self, blocks: int = 16) -> None:
        self.cache = PagedCache(blocks, LAYOUT.block_size)

    def reserve(self, hashes, num_tokens, growth, key=b"") -> Allocation | None:
        return self.cache.reserve(hashes, num_tokens, growth)

    def free(self, allocation: Allocation) -> None:
        self.cache.free(allocation)

    @property
    def used(self) -> int:
        return self.cache.pool.used


def make_receiver(blocks: int = 16, **config: object) -> tuple[Receiver[Allocation], Store]:
    store = Store(blocks)
    return Receiver(INCARNATION, LAYOUT, store, ReceiverConfig(**config)), store


def make_sender(frame_bytes: int = 128) -> Sender:
    return Sender(5, LAYOUT, SenderConfig(frame_bytes=frame_bytes))


def reserve(tokens: int = 10, attempt: int = 1, serial: int = 1, **fields: object) -> Reserve:
    return Reserve(
        request=REQUEST,
        attempt=attempt,
        incarnation=fields.pop("incarnation", 5),
        hashes=fields.pop("hashes", []),
        num_tokens=tokens,
        growth=4,
        serial=serial,
        deadline=fields.pop("deadline", 60.0),
    )


def context() -> WireContext:
    return WireContext(tokens=WireTokens(np.arange(10, dtype=np.int32)), max_length=100)


def commit(grant: GrantRef, frames: int, nbytes: int, digest: int, attempt: int = 1) -> Commit:
    return Commit(
        request=REQUEST,
        attempt=attempt,
        grant=grant,
        frames=frames,
        bytes=nbytes,
        digest=digest,
        context=grown_map(context(), [3]),
        router="router-0",
        deadline=60.0,
    )
