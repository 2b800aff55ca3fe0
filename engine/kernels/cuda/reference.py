"""bfloat16 on the host and the NumPy definition of the elementwise kernels.

A definition computes in float64 and rounds where its kernel writes. The kernel computes in float32,
so it may differ by one bfloat16 step if the exact value is near the middle of two steps.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backend import Activation
from ..bfloat16 import bfloat16_bits

F64 = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint16]


def to_bf16(values: npt.ArrayLike) -> Bits:
    """Round float32 values to bfloat16 bits, ties to even; NaN stays NaN."""
    return bfloat16_bits(np.asarray(values, np.float32))


def from_bf16(bits: npt.NDArray[Any]) -> F64:
    """Widen bfloat16 bits, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def embed(ids: npt.NDArray[np.int32], table: Bits) -> Bits:
    """Return ``table[ids]``, with zeros for ids outside the table."""
    known = (ids >= 0) & (ids < len(table))
    return np.where(known[:, None], table[np.where(known, ids, 0)], np.uint16(0))


def rms_norm(x: Bits, weight: Bits, eps: float) -> F64:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` along the last axis, without rounding."""
    return _rms(from_bf16(x), weight, eps)


def add_rms_norm(x: Bits, residual: Bits, weight: Bits, eps: float) -> tuple[Bits, F64]:
    """Return the new residual ``residual + x``, rounded, and its norm, without rounding."""
    total = to_bf16(from_bf16(residual) + from_bf16(x))
    return total, rms_norm(total, weight, eps)


def layer_norm(x: Bits, weight: Bits, bias: Bits, eps: float) -> F64:
    """Return ``(x - mean) / sqrt(variance + eps) * weight + bias`` by row, without rounding."""
    wide = from_bf16(x)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    scaled: F64 = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
    return scaled * from_bf16(weight) + from_bf16(bias)


def put_rows(x: Bits, rows: npt.NDArray[np.int32], out: Bits, *, add: bool) -> None:
    """``out[rows[i]] = x[i]``, or ``+= x[i]`` rounded; rows outside ``out`` are left out."""
    inside = (rows >= 0) & (rows < len(out))
    there, taken = rows[inside], x[inside]
    out[there] = to_bf16(from_bf16(out[there]) + from_bf16(taken)) if add else taken


def qk_norm_rope_append(
    qkv: Bits,
    positions: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int64],
    cos_sin: npt.NDArray[np.float32],
    q_norm: Bits | None,
    k_norm: Bits | None,
    eps: float,
    kv_layer: Bits,
    heads: int,
) -> Bits:
    """Write k and v into ``kv_layer[NB, 2, Hk, BS, D]``; return q ``[T, heads, D]``."""
    blocks, _, kv_heads, block_size, dim = kv_layer.shape
    rows = qkv.reshape(len(qkv), heads + 2 * kv_heads, dim)
    q, k, v = np.split(rows, [heads, heads + kv_heads], axis=1)
    table = cos_sin[positions].astype(np.float64)[:, None, :]
    turned = []
    for part, weight in ((q, q_norm), (k, k_norm)):
        wide = from_bf16(part)
        a, b = np.split(wide if weight is None else _rms(wide, weight, eps), 2, axis=2)
        cos, sin = np.split(table, 2, axis=2)
        turned.append(to_bf16(np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)))
    kept = (slots >= 0) & (slots < blocks * block_size)
    block, offset = np.divmod(slots[kept], block_size)
    kv_layer[block, 0, :, offset] = turned[1][kept]
    kv_layer[block, 1, :, offset] = v[kept]
    return turned[0]


def _rms(x: F64, weight: Bits, eps: float) -> F64:
    root: F64 = np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x / root * from_bf16(weight)


def silu_mul(gate_up: Bits) -> Bits:
    """Return ``silu(gate) * up`` for ``gate_up[T, 2 F]``."""
    gate, up = np.split(from_bf16(gate_up), 2, axis=1)
    with np.errstate(over="ignore"):  # exp overflows for a very negative gate; the result is 0
        return to_bf16(gate / (1 + np.exp(-gate)) * up)


def activate(x: Bits, kind: Activation) -> F64:
    """Return the activation of every element, without rounding."""
    wide = from_bf16(x)
    if kind == "gelu":
        upper = np.fromiter((math.erfc(-v / math.sqrt(2)) / 2 for v in wide.flat), float, wide.size)
        product: F64 = wide * upper.reshape(wide.shape)
        return product
    if kind == "tanh":
        return np.tanh(wide)
    inner = {
        "silu": wide,
        "quick_gelu": 1.702 * wide,
        "gelu_tanh": math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3),
    }[kind]
    with np.errstate(over="ignore"):  # as in silu_mul
        result: F64 = wide / (1 + np.exp(-inner))
    return result
