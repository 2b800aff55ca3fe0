"""Rows of keys and values in the types of a KV cache: the reference of ``csrc/kv_rows.h``.

A pool in host memory is ``[L, NB, 2, Hk, BS, E]`` in float32, uint16 (bfloat16 bits) or int8. A row
has ``E = D`` elements; an int8 row has two more, the bytes of its largest magnitude ``m`` as
bfloat16. The values of its codes ``q`` are ``q * (m / 127)``, rounded to 8 significant bits.

Invariant: the values of int8 rows are bfloat16 numbers, and those are float32 numbers. So a row
that was rounded to a type is the same in this type and in every wider one, however often it is
converted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from baton.proto.layout import INT8_SCALE_BYTES as SCALE_BYTES

from .bfloat16 import bfloat16_bits

F32 = npt.NDArray[np.float32]
Stored = npt.NDArray[Any]

CODES = np.float32(127)
_LEAST = np.float32(2.0**-100)
_NAN_BITS = 0x7FFF


def kv_type(array: Stored) -> str:
    """Return the type of keys and values of an array; float64 counts as float32."""
    return {"H": "bfloat16", "b": "int8"}.get(array.dtype.char, "float32")


def row_dim(array: Stored) -> int:
    """Return the size of a head whose rows the array has."""
    return int(array.shape[-1]) - (SCALE_BYTES if array.dtype == np.int8 else 0)


def opened(rows: Stored) -> npt.NDArray[Any]:
    """Return the values of stored rows; floats are returned as they are."""
    if rows.dtype == np.uint16:
        return _floats(rows)
    if rows.dtype != np.int8:
        return rows
    scales = np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view(np.uint16)
    steps = _floats(scales) / CODES
    products = np.ascontiguousarray(rows[..., :-SCALE_BYTES].astype(np.float32) * steps)
    bits = (products.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def stored(x: F32, kind: str) -> Stored:
    """Return rows ``[..., D]`` in a type, each number as the nearest one that the type has."""
    if kind == "float32":
        return x
    if kind == "bfloat16":
        return bfloat16_bits(x)
    top = np.abs(x).max(axis=-1, keepdims=True, initial=0)
    largest = np.where(top < _LEAST, 0, bfloat16_bits(np.asarray(top, np.float32)))
    largest = np.where((largest >= 0x7F80) | ~np.isfinite(top), _NAN_BITS, largest)
    known = (largest > 0) & (largest < _NAN_BITS)
    magnitude = _floats(np.where(known, largest, 0x3F80).astype(np.uint16))
    with np.errstate(invalid="ignore", over="ignore"):
        codes = np.rint(x * (CODES / magnitude))
    codes = np.where(known, codes, np.where(largest == _NAN_BITS, 1, 0)).astype(np.int8)
    scales = np.ascontiguousarray(largest.astype(np.uint16)).view(np.int8)
    return np.concatenate([codes, scales], axis=-1)


def spread(x: F32) -> F32:
    """Return the Hadamard transform of queries or keys, whose products it does not change.

    A model's keys have a few channels with large numbers, for which the others would be rounded
    coarsely in int8. The transform spreads them over the row. It is in blocks of the largest power
    of two that divides the length of a row, and orthonormal; the spans of its sums go from the
    longest to the shortest. Source: QuaRot (arXiv 2404.00456).
    """
    dim = x.shape[-1]
    block = span = dim & -dim
    found = x.copy()
    while span := span // 2:
        pairs = found.reshape(*x.shape[:-1], -1, 2, span)
        first, second = pairs[..., 0, :].copy(), pairs[..., 1, :]
        pairs[..., 0, :] += second
        np.subtract(first, second, out=second)
    found *= np.float32(block**-0.5)
    return found


def appended(x: F32, kind: str, rounding: str) -> Stored:
    """Return rows in ``kind`` after rounding them to ``rounding``, which is not wider."""
    return stored(x if rounding == kind else opened(stored(x, rounding)), kind)


def converted(
    source: Stored, target: Stored, source_ids: npt.NDArray[np.int32],
    target_ids: npt.NDArray[np.int32], first: int,
) -> None:  # fmt: skip
    """Write token ``first + i`` of ``source_ids`` to token ``i`` of ``target_ids``.

    ``source``, ``target``: the same layers of two pools, whose block sizes and types may differ.
    Tokens after the last one of ``source_ids`` are zeros.
    """
    layers, _, _, heads, size, _ = target.shape
    taken = np.moveaxis(source[:, source_ids], 1, 3)  # [L, 2, Hk, blocks, BS, E]
    tokens = taken.reshape(layers, 2, heads, -1, taken.shape[-1])[:, :, :, first:]
    wanted = len(target_ids) * size
    rows = tokens[:, :, :, :wanted]
    if source.dtype != target.dtype:
        rows = stored(opened(rows), kv_type(target))
    whole = np.zeros((layers, 2, heads, wanted, target.shape[-1]), target.dtype)
    whole[:, :, :, : rows.shape[3]] = rows
    blocks = whole.reshape(layers, 2, heads, len(target_ids), size, -1)
    target[:, target_ids] = np.moveaxis(blocks, 3, 1)


def _floats(bits: npt.NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
