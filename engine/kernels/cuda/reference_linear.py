"""The NumPy definition of ``skinny_linear.cu``, float64 inside."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..bfloat16 import bfloat16_bits
from ..fp8 import dequantized
from .reference import F64, Bits, from_bf16

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


def linear(
    x: Bits, weight: Bits, bias: npt.NDArray[np.float32] | None = None, onto: F64 | None = None
) -> F64:
    """Return ``x @ weight.T + bias``, plus ``onto``, without rounding."""
    product: F64 = from_bf16(x) @ from_bf16(weight).T
    if bias is not None:
        product += bias
    return product if onto is None else product + onto


def fp8_weights(codes: U8, scales: F32, group: int) -> Bits:
    """Return the bf16 weights of codes ``[N, K]`` with a scale per ``group`` columns."""
    return bfloat16_bits(dequantized(codes, scales, group))


def linear_silu_mul(x: Bits, weight: Bits) -> F64:
    """Return ``silu(x @ gate.T) * (x @ up.T)`` without rounding; ``weight`` is gate above up."""
    gate, up = np.split(linear(x, weight), 2, axis=1)
    product: F64 = gate / (1 + np.exp(-gate)) * up
    return product
