"""Argument checks before a launch: a wrong argument raises ValueError, never a wild access."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .device import DeviceArray

BF16: np.dtype[Any] = np.dtype(np.uint16)
"""bfloat16 in NumPy and CuPy: the bits."""


def check_array(
    name: str, array: DeviceArray, dtype: npt.DTypeLike, shape: tuple[int | None, ...]
) -> None:
    """Raise ValueError unless ``array`` is row-major, of ``dtype`` and of ``shape`` (None: any)."""
    if array.dtype != np.dtype(dtype):
        raise ValueError(f"{name} is {array.dtype}, not {np.dtype(dtype)}")
    fits = len(array.shape) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} has shape {array.shape}, not ({wanted})")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is not contiguous: strides {array.strides} of shape {array.shape}"
        )


def check_multiple(name: str, value: int, of: int) -> None:
    """Raise ValueError unless ``value`` is a positive multiple of ``of``."""
    if value < 1 or value % of:
        raise ValueError(f"{name} is {value}, not a multiple of {of}")


def check_below(name: str, ids: npt.NDArray[np.integer[Any]], limit: int) -> None:
    """Raise ValueError unless all ``ids``, known on the host, are in ``0 .. limit - 1``."""
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= limit):
        raise ValueError(f"{name} must be in 0..{limit - 1}, got {ids.min()}..{ids.max()}")
