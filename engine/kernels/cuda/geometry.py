"""The numbers that describe a move of KV blocks to the kernels of ``csrc/blocks.cu``."""

from __future__ import annotations

import numpy as np

from .payload import VECTOR, PayloadLayout

PIECE_LANES = 32

_DIVISOR = np.dtype([("by", "u4"), ("factor", "u4"), ("shift", "u4")])
_WIDE = ("pool_start", "layer_stride", "scales_at", "payload_bytes")
_NARROW = (
    "block_stride", "side_stride", "head_stride", "tile_vectors", "pieces", "tiles", "pool_ids",
    "scales",
)  # fmt: skip
_DIVISORS = (
    "run_vectors", "pieces_per_run", "runs_per_tile", "heads", "sides", "blocks",
    "runs_per_pool_block", "token_vectors",
)  # fmt: skip
GEOMETRY = np.dtype(
    [
        *((name, "i8") for name in _WIDE),
        *((name, "u4") for name in _NARROW),
        *((name, _DIVISOR) for name in _DIVISORS),
    ],
    align=True,
)
"""``struct Geometry``, passed to kernels by value."""

_LIMIT = 2**31  # the kernels' divisions are exact below this number


def divisor(by: int) -> tuple[int, int, int]:
    """``(by, factor, shift)`` with ``n // by == (n * factor >> 32) >> shift`` for n < 2^31.

    No such factor exists for ``by`` 1; kernels leave n unchanged. Source: Granlund and Montgomery
    1994, "Division by invariant integers using multiplication".
    """
    if not 1 <= by < _LIMIT:
        raise ValueError(f"cannot divide by {by}")
    if by == 1:
        return 1, 0, 0
    power = 31 + (by - 1).bit_length()
    return by, -(-(1 << power) // by), power - 32


def geometry(
    pool_shape: tuple[int, ...],
    layout: PayloadLayout,
    layer_start: int,
    head_start: int,
    pool_ids: int,
    slots: int,
    run_tokens: int = 0,
) -> np.void:
    """Return the record for a pool ``[L, NB, 2, Hk, BS, D]`` and a payload of the pool.

    ``slots``: vectors of a piece per lane. Elements that are contiguous on both sides form one run:
    a whole block, all heads of a shard, or the tokens shared by both block sizes. With scales,
    runs stay within a tile.
    ``run_tokens``: tokens of a run of one head, if a second pool limits the runs; then
    runs are not joined. The arguments must be checked already. Raises ValueError
    for a move of more than 2^31 pieces.
    """
    _, num_blocks, _, pool_heads, pool_block, _ = pool_shape
    vectors = layout.head_dim // VECTOR
    head = pool_block * vectors
    apart = run_tokens > 0
    run_tokens = run_tokens or min(pool_block, layout.block_size)
    sides, heads, run = 2, layout.heads, run_tokens * vectors
    if layout.block_size == pool_block and not layout.scales and not apart:
        heads, run = 1, layout.heads * head
        if layout.heads == pool_heads:
            sides, run = 1, 2 * run
    per_tile, per_pool_block = layout.block_size // run_tokens, pool_block // run_tokens
    pieces_per_run = -(-run // (PIECE_LANES * slots))
    tiles = layout.layers * layout.blocks * sides * heads
    pieces = tiles * per_tile * pieces_per_run
    block = 2 * pool_heads * head
    if max(pieces, tiles * per_tile, block, pool_ids * per_pool_block) >= _LIMIT:
        raise ValueError(f"a move of {pieces} pieces is too large for one launch")
    values = {
        "pool_start": layer_start * num_blocks * block + head_start * head,
        "layer_stride": num_blocks * block,
        "scales_at": layout.element_bytes,
        "payload_bytes": layout.nbytes,
        "block_stride": block,
        "side_stride": pool_heads * head,
        "head_stride": head,
        "tile_vectors": layout.block_size * vectors,
        "pieces": pieces,
        "tiles": tiles,
        "pool_ids": pool_ids,
        "scales": layout.scale_slots,
        "run_vectors": divisor(run),
        "pieces_per_run": divisor(pieces_per_run),
        "runs_per_tile": divisor(per_tile),
        "heads": divisor(heads),
        "sides": divisor(sides),
        "blocks": divisor(layout.blocks),
        "runs_per_pool_block": divisor(per_pool_block),
        "token_vectors": divisor(vectors),
    }
    record = np.array([tuple(values[name] for name in (*_WIDE, *_NARROW, *_DIVISORS))], GEOMETRY)
    found: np.void = record[0]
    return found
