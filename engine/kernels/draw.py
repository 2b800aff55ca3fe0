"""Compiled selection of one of many weights.

The result equals the sampler's NumPy form bit by bit. If it might differ, or if the kernels are
not compiled, the result is None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .backend import F32


def _compiled() -> Callable[[F32, float, float, float], int] | None:
    try:
        from . import _cpu
    except ImportError:
        return None
    return partial(_cpu.draw, _cpu.instruction_sets()[0][0])


_draw = _compiled()


def draw(weights: F32, top_p: float, min_p: float, uniform: float) -> int | None:
    """Return the index drawn from ``weights[n]`` (>= 0, contiguous) after top-p and min-p.

    Returns None if rounding could decide a filter, or without compiled kernels.
    """
    if _draw is None:
        return None
    index = _draw(weights, top_p, min_p, uniform)
    return index if index >= 0 else None
