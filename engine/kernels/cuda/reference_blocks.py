"""The NumPy definition of the kernels in ``csrc/blocks.cu``.

Error of a number x after encoding to a payload and decoding to bf16. A is the largest finite
magnitude of its tile (or token), u = 2^-8 is bf16's rounding, and terms below 2^-20 are omitted:

* bf16: none. fp16: none for magnitudes from 2^-14 to 65504, at most 2^-25 below, 65504 beyond.
* fp8: ``(2^-4 + u + 2^-11) * |x| + (1 + 2^-7) * 2^-10 * A / 448``. e4m3 has 4 significant bits,
  or steps of 2^-9 below 2^-6.
* int8: ``(1 + 2^-7) * A / 254 + u * |x|``: half a step, then bf16.

Infinity becomes A (65504 in fp16). NaN stays NaN, except in int8, where it becomes 0. If A is below
2^-100, the scale is 0 and all decoded values are 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..bfloat16 import bfloat16_bits
from ..fp8 import FP8_VALUES, NAN_FP8
from .payload import F32, U8, PayloadLayout

U16 = npt.NDArray[np.uint16]
I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]

SMALLEST = 2.0**-100
NAN_16 = 0x7FFF


def gather_blocks(
    pool: U16, ids: I32, layout: PayloadLayout, *, layer_start: int = 0, head_start: int = 0
) -> U8:
    """Return the payload ``[layout.nbytes]`` of some blocks; see :mod:`.blocks`."""
    taken = _tokens(pool, layout, layer_start, head_start)[:, ids]
    moved = _resliced(taken, layout.blocks, layout.block_size)
    payload = np.zeros(layout.nbytes, np.uint8)
    encode(moved, layout, payload)
    return payload


def scatter_blocks(
    payload: U8,
    layout: PayloadLayout,
    ids: I32,
    pool: U16,
    *,
    layer_start: int = 0,
    head_start: int = 0,
) -> None:
    """Write a payload into ``pool``; pool tokens that the payload lacks keep their values."""
    place = _tokens(pool, layout, layer_start, head_start)
    size = pool.shape[4]
    moved = _resliced(decode(payload, layout), len(ids), size)
    tokens = layout.blocks * layout.block_size
    for i, block in enumerate(ids):
        count = min(size, tokens - i * size)
        place[:, block, :, :, :count] = moved[:, i, :, :, :count]


def encode(elements: U16, layout: PayloadLayout, payload: U8) -> None:
    """Write bf16 elements of ``layout.shape`` with their scales into a zeroed payload."""
    out, name = layout.elements(payload), layout.encoding
    if name == "bf16":
        out[...] = elements
        return
    values = widened(elements)
    if name == "fp16":
        with np.errstate(invalid="ignore"):
            halves = np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
        out[...] = np.where(np.isnan(values), NAN_16, halves)
        return
    scale, factor = scaling(values, layout)
    layout.scale_table(payload)[:, : layout.scales] = scale.reshape(layout.tiles, layout.scales)
    out[...] = (_fp8_codes if name.startswith("fp8") else _int8_codes)(values, factor)


def decode(payload: U8, layout: PayloadLayout) -> U16:
    """Return the elements of a payload as bf16 of ``layout.shape``."""
    elements, name = layout.elements(payload), layout.encoding
    if name == "bf16":
        return np.array(elements, np.uint16)
    if name == "fp16":
        return rounded(elements.view(np.float16).astype(np.float32))
    scale = layout.scale_table(payload)[:, : layout.scales]
    scale = scale.reshape(*layout.shape[:4], layout.scales, 1)
    numbers = FP8_VALUES[elements] if name.startswith("fp8") else elements.astype(np.float32)
    return rounded(numbers * scale)


def scaling(values: F32, layout: PayloadLayout) -> tuple[F32, F32]:
    """Return the scales, and the factors that numbers are multiplied by: ``[..., scales, 1]``."""
    finite = np.where(np.isfinite(values), np.abs(values), np.float32(0))
    largest = finite.max(-1 if layout.how.per_token else (-2, -1), keepdims=True)
    zero = largest < SMALLEST
    safe = np.where(zero, np.float32(1), largest)
    code = np.float32(layout.how.largest)
    scale = np.where(zero, np.float32(0), largest * (np.float32(1) / code))
    # A zero scale gives zeros whatever the codes are, but fp8 must keep NaN.
    blank = np.float32(0 if layout.how.dtype == np.int8 else 1)
    return scale, np.where(zero, blank, code / safe)


def reslice_blocks(
    source: U16,
    source_ids: npt.NDArray[np.int32],
    target: U16,
    target_ids: npt.NDArray[np.int32],
    *,
    heads: int,
    source_head: int,
    target_head: int,
    layer_start: int,
    layer_count: int,
) -> None:
    """Copy heads of a request from one pool ``[L, NB, 2, Hk, BS, D]`` into another."""
    layers = slice(layer_start, layer_start + layer_count)
    taken = source[layers, source_ids, :, source_head : source_head + heads]
    placed = _resliced(taken, len(target_ids), target.shape[4])
    for i, block in enumerate(target_ids):
        target[layers, block, :, target_head : target_head + heads] = placed[:, i]


def widened(bits: U16) -> F32:
    """Return bf16 as float32; subnormal numbers become zeros, as on a GPU."""
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    return np.where(np.abs(values) < 2.0**-126, np.copysign(np.float32(0), values), values)


def rounded(values: F32) -> U16:
    """Round float32 to bf16, ties to even; all NaNs become the same."""
    return bfloat16_bits(values.astype(np.float32, copy=False))


def _tokens(pool: U16, layout: PayloadLayout, layer_start: int, head_start: int) -> U16:
    layers = slice(layer_start, layer_start + layout.layers)
    return pool[layers, :, :, head_start : head_start + layout.heads]


def _resliced(blocks: U16, count: int, size: int) -> U16:
    """Rearrange ``[layers, n, 2, heads, BS, D]`` into ``count`` blocks of another size."""
    layers, n, _, heads, block_size, head_dim = blocks.shape
    tokens = np.zeros((layers, 2, heads, max(n * block_size, count * size), head_dim), np.uint16)
    lined_up = blocks.transpose(0, 2, 3, 1, 4, 5).reshape(layers, 2, heads, -1, head_dim)
    tokens[:, :, :, : n * block_size] = lined_up
    cut = tokens[:, :, :, : count * size].reshape(layers, 2, heads, count, size, head_dim)
    return cut.transpose(0, 3, 1, 2, 4, 5)


def _int8_codes(values: F32, factor: F32) -> npt.NDArray[np.int8]:
    """Int8: the product rounded once, ties to even."""
    with np.errstate(invalid="ignore"):
        product = values.astype(np.float64) * factor
    return np.clip(np.rint(np.where(np.isnan(product), 0, product)), -127, 127).astype(np.int8)


def _fp8_codes(values: F32, factor: F32) -> U8:
    """Bits of e4m3: the product rounded to float32, then to nearest even."""
    with np.errstate(over="ignore"):
        product = values * factor
    size = np.minimum(np.abs(product.astype(np.float64)), 448.0)
    size = np.where(np.isnan(product), 0.0, size)
    exponent = np.where(size < 2.0**-6, -6, np.frexp(size)[1] - 1)
    steps = np.rint(np.ldexp(size, 3 - exponent)).astype(np.int64)  # 8..16 unless subnormal
    code = np.minimum((exponent + 6) * 8 + steps, 0x7E) | np.where(np.signbit(product), 0x80, 0)
    return np.where(np.isnan(product), NAN_FP8, code).astype(np.uint8)
