"""Chained keyed hashes of KV blocks: equal hashes mean equal tokens from position 0 on.

Only servers compute them. The key is the tenant's salt (with what else the KV depends on),
so that one tenant's prompts cannot be guessed through another's prefix hits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16

ImageSpan = tuple[int, int, bytes]
"""Tokens ``[start, end)`` that stand for an image, and the image's 16-byte key."""

_SPAN = struct.Struct("<ii16s")


def block_hashes(
    tokens: npt.NDArray[np.integer],
    block_size: int,
    salt: bytes,
    parent: bytes = b"",
    images: Sequence[ImageSpan] = (),
) -> list[bytes]:
    """Hashes of the full blocks of ``tokens``; a last partial block has none.

    ``tokens``: integers ``[n]`` (hashed as int32) that start on a block boundary.
    ``parent``: hash of the block before, empty at position 0. ``images``: sorted, positions
    counted from ``tokens[0]``; a block with tokens of an image depends on the image's key and
    on where the image lies, for the tokens of all images are alike.
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
    """Records of 24 bytes behind the tokens; with or without a parent no two inputs are alike."""
    for first, end, key in images:
        if first < start + block_size and end > start:
            block.update(_SPAN.pack(first - start, end - start, key))


def cache_salt(fingerprint: str, tenant: str) -> bytes:
    """Key of one tenant's block hashes for one model; both pools derive the same."""
    return blake2b(
        tenant.encode("utf-8", "surrogatepass"), key=fingerprint.encode()[:64], digest_size=32
    ).digest()
