"""Chained keyed hashes of KV blocks: equal hashes mean equal tokens from position 0 on.

Only servers compute them. The key is the tenant's salt (with what else the KV depends on),
so that one tenant's prompts cannot be guessed through another's prefix hits.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16


def block_hashes(
    tokens: npt.NDArray[np.integer], block_size: int, salt: bytes, parent: bytes = b""
) -> list[bytes]:
    """Hashes of the full blocks of ``tokens``; a last partial block has none.

    ``tokens``: integers ``[n]`` (hashed as int32) that start on a block boundary.
    ``parent``: hash of the block before, empty at position 0.
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
        parent = block.digest()
        hashes.append(parent)
    return hashes


def cache_salt(fingerprint: str, tenant: str) -> bytes:
    """Key of one tenant's block hashes for one model; both pools derive the same."""
    return blake2b(
        tenant.encode("utf-8", "surrogatepass"), key=fingerprint.encode()[:64], digest_size=32
    ).digest()
