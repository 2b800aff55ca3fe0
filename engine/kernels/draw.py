"""Choice of one of many weights in compiled code.

The result is the one of the sampler's NumPy form, bit by bit; where it might not be, or where
nothing was compiled, the answer is None.
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
    """Index drawn from ``weights[n]`` (0 or more, contiguous) after top-p and min-p.

    None where rounding could decide a filter, or without compiled kernels.
    """
    if _draw is None:
        return None
    index = _draw(weights, top_p, min_p, uniform)
    return index if index >= 0 else None
