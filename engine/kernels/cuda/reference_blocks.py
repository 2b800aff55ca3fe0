"""The NumPy definition of the kernels in ``csrc/blocks.cu``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
I32 = npt.NDArray[np.int32]


def gather_blocks(pool: U16, ids: I32, start: int, count: int) -> U8:
    """Return the payload of blocks of layers ``start .. start + count``."""
    return np.ascontiguousarray(pool[start : start + count, ids]).reshape(-1).view(np.uint8)


def scatter_blocks(payload: U8, ids: I32, pool: U16, start: int, count: int) -> None:
    """Write a payload into blocks of ``pool``."""
    shape = (count, len(ids), *pool.shape[2:])
    pool[start : start + count, ids] = payload.view(np.uint16).reshape(shape)
