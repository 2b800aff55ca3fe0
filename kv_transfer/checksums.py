"""The XXH3-64 checksum of control messages between prefill and decode workers."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from baton.proto.wire.arrays import Frame


def envelope_digest(parts: Sequence[Frame]) -> int:
    """Return the XXH3-64 of the concatenated ``parts``, without concatenating them."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()
