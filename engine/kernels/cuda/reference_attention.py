"""The NumPy definition of paged attention, with the rounding of the CUDA kernels.

Computes in float64. Weights are rounded to bfloat16 relative to a maximum that is a power of two,
so the rounding does not depend on the keys processed before. The rounded weights are summed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .reference import F64, Bits, from_bf16, to_bf16

I32 = npt.NDArray[np.int32]


def attention(
    q: Bits,
    kv_layer: Bits,
    block_tables: I32,
    row_offsets: I32,
    positions: I32,
    scale: float,
    window: int,
) -> F64:
    """Return the attention ``[T, Hq, D]`` of ``q[T, Hq, D]`` over ``kv_layer[NB, 2, Hk, BS, D]``.

    Row ``t`` of sequence ``s`` (``row_offsets[S+1]``) attends to positions
    ``max(0, p - window + 1) .. p``, ``p = positions[t]`` (``window`` 0: all), through
    ``block_tables[S, Nmax]``. The result is not rounded.
    """
    rows, heads, dim = q.shape
    kv_heads, block_size = kv_layer.shape[2:4]
    out = np.zeros((rows, heads, dim))
    for s in range(len(row_offsets) - 1):
        for t in range(row_offsets[s], row_offsets[s + 1]):
            end = int(positions[t]) + 1
            seen = np.arange(max(0, end - window) if window else 0, end)
            blocks = kv_layer[block_tables[s, seen // block_size], :, :, seen % block_size]
            keys, values = from_bf16(blocks).transpose(1, 2, 0, 3)  # [2, Hk, n, D]
            queries = from_bf16(q[t]).reshape(kv_heads, -1, dim)
            scores = queries @ keys.transpose(0, 2, 1) * (scale * np.log2(np.e))
            peaks = np.ceil(scores.max(axis=2, keepdims=True))
            weights = from_bf16(to_bf16(np.exp2(scores - peaks)))
            out[t] = (weights @ values / weights.sum(axis=2, keepdims=True)).reshape(heads, dim)
    return out


def decode_attention(
    q: Bits, kv_layer: Bits, block_tables: I32, lengths: I32, scale: float, window: int
) -> F64:
    """One row ``q[S, Hq, D]`` per sequence at position ``lengths[S] - 1``; zeros for length 0."""
    out = np.zeros(q.shape)
    used = np.flatnonzero(lengths)
    offsets = np.arange(len(used) + 1, dtype=np.int32)
    out[used] = attention(
        q[used], kv_layer, block_tables[used], offsets, lengths[used] - 1, scale, window
    )
    return out
