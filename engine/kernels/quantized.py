"""Weights in the blocks of a GGUF file, and the NumPy definition of their integer products.

A block has some scales and the small integers of 32 or 256 weights of a row. Activations are
rounded to int8 per row; 256 of them share a scale if a block has 256 weights, else 32. Products
inside a block are summed as integers, blocks are added one after the other in float32. So a row's
bits depend on this row alone, and every instruction set gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .backend import F32, U8, QuantizedWeights

_FIVES, _SHIFTS = np.arange(8, dtype=np.uint8)[:, None], np.array([[0], [2], [4], [6]], np.uint8)
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


@dataclass(frozen=True, slots=True)
class Fields:
    """What ``n`` blocks hold; a weight is ``d * scale * value - least * minimum``.

    ``values[n, parts, items / parts]``, ``scales[n, parts]``, ``minima[n, parts]`` are integers.
    """

    values: npt.NDArray[Any]
    scales: npt.NDArray[Any]
    minima: npt.NDArray[Any]
    d: F32
    least: F32


def _half(blocks: U8, at: int) -> F32:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)[:, 0].astype(np.float32)


def _halves(packed: U8) -> npt.NDArray[Any]:
    """Return the low halves of bytes ``[..., b]``, then the high halves: ``[..., 2 b]``."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _with_minima(blocks: U8, low: U8, high: npt.NDArray[Any] | int) -> Fields:
    """Q4_K and Q5_K: eight scales and minima of six bits."""
    values = _halves(low.reshape(-1, 4, 32)).reshape(-1, 8, 32) | high
    one, two, three = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([one & 63, three & 15 | one >> 6 << 4], axis=1)
    minima = np.concatenate([two & 63, three >> 4 | two >> 6 << 4], axis=1)
    return Fields(values, scales, minima, _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: U8) -> Fields:
    return _with_minima(blocks, blocks[:, 16:], 0)


def _q5_k(blocks: U8) -> Fields:
    return _with_minima(blocks, blocks[:, 48:], (blocks[:, None, 16:48] >> _FIVES & 1) << 4)


def _scaled(values: npt.NDArray[Any], scales: npt.NDArray[Any], d: F32) -> Fields:
    """Blocks without minima."""
    return Fields(values, scales, np.zeros_like(scales), d, np.zeros_like(d))


def _q6_k(blocks: U8) -> Fields:
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _SHIFTS & 3
    values = (low | high << 4).reshape(-1, 16, 16).astype(np.int32) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return _scaled(values, scales, _half(blocks, 208))


def _q3_k(blocks: U8) -> Fields:
    low = blocks[:, 32:96].reshape(-1, 2, 1, 32) >> _SHIFTS & 3
    third = (blocks[:, None, :32] >> _FIVES & 1).reshape(-1, 2, 4, 32)
    values = (low | third << 2).reshape(-1, 16, 16).astype(np.int32) - 4
    high = (blocks[:, None, 104:108] >> _SHIFTS & 3).reshape(-1, 16)
    scales = (_halves(blocks[:, 96:104]) | high << 4).astype(np.int32) - 32
    return _scaled(values, scales, _half(blocks, 108))


def _narrow(
    less: int = 0, *, minimum: bool = False, fifth: bool = False, table: bool = False
) -> Callable[[U8], Fields]:
    """Blocks of 32: scale, perhaps a minimum, perhaps fifth bits, halves of bytes.

    Values are the codes ``less`` a number, or those of the table of IQ4_NL.
    """

    def fields(blocks: U8) -> Fields:
        at = 4 if minimum else 2
        codes = _halves(blocks[:, at + 4 * fifth :]).astype(np.int32)
        if fifth:
            bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
            codes += bits * np.int32(16)
        values = _IQ4_NL[codes] if table else codes - less
        ones = np.ones((len(blocks), 1), np.int32)
        # The minimum is added: the least value is its negative.
        least = -_half(blocks, 2) if minimum else np.zeros(len(blocks), np.float32)
        return Fields(values[:, None], ones, ones, _half(blocks, 0), least)

    return fields


def _q8_0(blocks: U8) -> Fields:
    values = np.ascontiguousarray(blocks[:, 2:]).view(np.int8)[:, None]
    return _scaled(values, np.ones((len(blocks), 1), np.int32), _half(blocks, 0))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of blocks: weights and bytes of one, and how to read blocks ``[n, nbytes]``."""

    items: int
    nbytes: int
    fields: Callable[[U8], Fields]


KINDS = {
    "Q4_K": Kind(256, 144, _q4_k),
    "Q5_K": Kind(256, 176, _q5_k),
    "Q6_K": Kind(256, 210, _q6_k),
    "Q3_K": Kind(256, 110, _q3_k),
    "Q8_0": Kind(32, 34, _q8_0),
    "Q5_0": Kind(32, 22, _narrow(16, fifth=True)),
    "Q4_0": Kind(32, 18, _narrow(8)),
    "IQ4_NL": Kind(32, 18, _narrow(table=True)),
    "Q4_1": Kind(32, 20, _narrow(minimum=True)),
    "Q5_1": Kind(32, 24, _narrow(minimum=True, fifth=True)),
}
"""The kinds with integer products, by the names of GGUF."""
NUMERICS = "int8-1"
"""Name of this arithmetic; increase its number with a change of a bit of the results."""


def dequantized(weights: QuantizedWeights) -> F32:
    """Return the weights as float32, rounded as ggml rounds."""
    kind = KINDS[weights.kind]
    f = kind.fields(weights.blocks.reshape(-1, kind.nbytes))
    values = (f.d[:, None] * f.scales.astype(np.float32))[..., None] * f.values.astype(np.float32)
    if f.minima.any():
        values = values - (f.least[:, None] * f.minima.astype(np.float32))[..., None]
    return values.reshape(weights.shape)


def round_rows(x: F32, items: int) -> tuple[npt.NDArray[np.int64], F32]:
    """Round rows ``[T, in]`` to int8 ``[T, n, items]`` with a float32 scale of each ``[T, n]``.

    The scale of values that are not all finite is NaN, that of values below 1e-30 is 0.
    """
    parts = x.reshape(len(x), -1, items)
    most = np.abs(parts).max(axis=2)
    with np.errstate(all="ignore"):
        usable = (most >= np.float32(1e-30)) & (most <= np.float32(3e38))
        inverse = np.where(usable, np.float32(127) / most, np.float32(0))
        rounded = np.rint(np.where(usable[..., None], parts, 0) * inverse[..., None])
        scales = np.where(usable, most / np.float32(127), np.float32(0))
        scales[~(most <= np.float32(3e38))] = np.nan
    return rounded.astype(np.int64), scales.astype(np.float32)


def product(x: F32, weights: QuantizedWeights, bias: F32 | None = None) -> F32:
    """Return ``x[T, in] @ weights.T + bias`` with rounded rows, as kernels compute it."""
    kind, (out, columns) = KINDS[weights.kind], weights.shape
    fields = kind.fields(weights.blocks.reshape(-1, kind.nbytes))
    count, parts = columns // kind.items, fields.scales.shape[1]
    values = fields.values.reshape(out, count, parts, -1).astype(np.int64)
    scales, minima = (f.reshape(out, count, parts).astype(np.int64)
                      for f in (fields.scales, fields.minima))  # fmt: skip
    d, least = fields.d.reshape(out, count), fields.least.reshape(out, count)
    q, scale_x = round_rows(x, kind.items)
    q = q.reshape(len(x), count, parts, -1)
    sums = np.zeros((len(x), out), np.float32)
    if bias is not None:
        sums += bias
    for b in range(count):
        dots = np.einsum("tpi,opi,op->to", q[:, b], values[:, b], scales[:, b])
        low = np.einsum("tpi,op->to", q[:, b], minima[:, b])
        one = scale_x[:, b, None]
        term = (d[:, b] * one) * dots.astype(np.float32)
        if fields.minima.any():
            term = term - (least[:, b] * one) * low.astype(np.float32)
        sums = sums + term
    return sums
