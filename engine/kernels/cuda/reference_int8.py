"""The NumPy definition of an int8 pool on a GPU: the rows of :mod:`..kv_rows`, in another order.

Eight tokens of a block and head form a group: their codes, each plus 128, then their magnitudes.
Of each 16 dims of a row the codes are in the order of :data:`ORDER`. A pool has as many bytes as
one in host memory, and its shape ``[L, NB, 2, Hk, BS, D + 2]`` names no rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from baton.proto.layout import INT8_SCALE_BYTES as SCALE_BYTES

I8 = npt.NDArray[np.int8]

GROUP = 8
"""Tokens whose magnitudes are neighbours."""
ORDER = np.array([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
"""The dim of each of 16 neighbouring codes: pairs of the two halves in turn."""
_OFFSET = np.int8(-128)  # the highest bit, which adds 128


def laid_out(rows: I8) -> I8:
    """Return the pool's bytes for rows ``[..., BS, D + 2]`` of :mod:`..kv_rows`."""
    *outer, size, length = rows.shape
    dim = length - SCALE_BYTES
    ordered = rows[..., :dim].reshape(*outer, size, dim // 16, 16)[..., ORDER] ^ _OFFSET
    codes = ordered.reshape(*outer, size // GROUP, GROUP * dim)
    magnitudes = rows[..., dim:].reshape(*outer, size // GROUP, GROUP * SCALE_BYTES)
    return np.concatenate([codes, magnitudes], axis=-1).reshape(rows.shape)


def rows_of(pool: I8) -> I8:
    """Return the rows of :mod:`..kv_rows` in a pool: the inverse of :func:`laid_out`."""
    *outer, size, length = pool.shape
    dim = length - SCALE_BYTES
    groups = np.ascontiguousarray(pool).reshape(*outer, size // GROUP, GROUP * length)
    ordered = groups[..., : GROUP * dim].reshape(*outer, size, dim // 16, 16) ^ _OFFSET
    codes: npt.NDArray[Any] = np.empty_like(ordered)
    codes[..., ORDER] = ordered
    magnitudes = groups[..., GROUP * dim :].reshape(*outer, size, SCALE_BYTES)
    return np.concatenate([codes.reshape(*outer, size, dim), magnitudes], axis=-1)
