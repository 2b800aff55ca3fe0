"""Self-attention of text encoders and of the VAE: no rotation, an optional bias on the scores."""

from __future__ import annotations

import numpy as np

from ..kernels.backend import F32
from ..kernels.host_backend import HostBackend
from ..models.workspace import Workspace


def identity_rotation(dim: int) -> F32:
    """Return the rope table ``[1, dim]`` that changes nothing."""
    table = np.zeros((1, dim), np.float32)
    table[:, : dim // 2] = 1.0
    return table


def attend(
    backend: HostBackend, space: Workspace, qkv: F32, heads: int, scale: float, bias: F32 | None
) -> F32:
    """Return the attention ``[T, heads * dim]`` of one sample, from ``qkv[T, 3 * heads * dim]``.

    The result is in the workspace, valid until the next call.
    """
    rows, dim = len(qkv), qkv.shape[1] // (3 * heads)
    q = space.rows("attend.q", rows, heads * dim).reshape(rows, heads, dim)
    kv = space.rows("attend.kv", 2 * heads * rows, dim).reshape(1, 2, heads, rows, dim)
    mixed = space.rows("attend.mixed", rows, heads * dim)
    zero, slots = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int64)
    table = identity_rotation(dim)
    backend.qk_norm_rope_append(qkv, zero, slots, table, None, None, 0.0, kv, q)
    backend.dense_attention(q, kv[0], bias, scale, mixed)
    return mixed
