"""Chained keyed hashes of KV blocks: equal hashes mean equal tokens from position 0 on.

Only servers compute them. The key is made from the tenant's salt and everything else that the KV
depends on. So a tenant cannot guess another tenant's prompts from prefix hits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16

ImageSpan = tuple[int, int, bytes]
"""Placeholder tokens ``[start, end)`` of an image, and the image's 16-byte key."""

_SPAN = struct.Struct("<ii16s")


def block_hashes(
    tokens: npt.NDArray[np.integer],
    block_size: int,
    salt: bytes,
    parent: bytes = b"",
    images: Sequence[ImageSpan] = (),
) -> list[bytes]:
    """Return the hashes of the full blocks of ``tokens``; a partial last block has no hash.

    ``tokens``: integers ``[n]`` (hashed as int32) that start on a block boundary.
    ``parent``: hash of the previous block, empty at position 0. ``images``: sorted, positions
    counted from ``tokens[0]``. The hash of a block with tokens of an image includes the image's
    key and position, because the tokens of all images are the same.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be positive, not {block_size}")
    key = salt if len(salt) <= 64 else blake2b(salt).digest()
    root = blake2b(digest_size=HASH_BYTES, key=key, person=b"baton-block")
    full = len(tokens) // block_size * block_size
    if not full:
        return []
    data = np.ascontiguousarray(tokens[:full], dtype="<i4").data.cast("B")
    step = 4 * block_size
    hashes = []
    for at in range(0, 4 * full, step):
        block = root.copy()
        block.update(parent)
        block.update(data[at : at + step])
        if images:
            _update_images(block, at // 4, block_size, images)
        parent = block.digest()
        hashes.append(parent)
    return hashes


def _update_images(
    block: blake2b, start: int, block_size: int, images: Sequence[ImageSpan]
) -> None:
    """Add records of 24 bytes after the tokens, so that no two inputs give the same bytes."""
    for first, end, key in images:
        if first < start + block_size and end > start:
            block.update(_SPAN.pack(first - start, end - start, key))


def cache_salt(fingerprint: str, tenant: str) -> bytes:
    """Return the key of a tenant's block hashes for a model; both pools derive the same key."""
    return blake2b(
        tenant.encode("utf-8", "surrogatepass"), key=fingerprint.encode()[:64], digest_size=32
    ).digest()
