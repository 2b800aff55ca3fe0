"""Dequantizes the block formats of GGUF files to float32, as ggml computes it.

A block has some scales and the small integers of 32 or 256 elements. The functions of
:data:`BLOCKS` take blocks as bytes ``[n, nbytes]`` and return float32 ``[n, items]``. They round
where ggml does, so the values are those of the reference, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_ELEMENTS_AT_ONCE = 1 << 20
"""Bounds the temporary arrays of a large tensor."""
_IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
"""The values of IQ4_NL's sixteen codes."""


def dequantize(dtype: str, raw: memoryview, out: F32) -> None:
    """Write the values of the blocks ``raw`` of a type of :data:`BLOCKS` into the flat ``out``."""
    items, nbytes, convert = BLOCKS[dtype]
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, nbytes)
    rows = out.reshape(-1, items)
    step = _ELEMENTS_AT_ONCE // items
    for first in range(0, len(blocks), step):
        rows[first : first + step] = convert(blocks[first : first + step])


def _scale(blocks: U8, at: int) -> F32:
    """Return the float16 at byte ``at`` of each block, ``[n, 1]``."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """Return the low halves of the bytes ``[..., b]``, then the high halves: ``[..., 2 b]``."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1, dtype=np.uint8)


def _bits(packed: U8) -> U8:
    """Return the 32 bits of 4 bytes ``[n, 4]``, the lowest first: ``[n, 32]``."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _q4_0(blocks: U8) -> F32:
    return _scale(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: U8) -> F32:
    return _scale(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _scale(blocks, 2)


def _q5_0(blocks: U8) -> F32:
    values = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _scale(blocks, 0) * (values.astype(np.float32) - 16)


def _q5_1(blocks: U8) -> F32:
    values = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _scale(blocks, 0) * values.astype(np.float32) + _scale(blocks, 2)


def _q8_0(blocks: U8) -> F32:
    return _scale(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def _iq4_nl(blocks: U8) -> F32:
    return _scale(blocks, 0) * _IQ4_NL[_nibbles(blocks[:, 2:])]


def _q3_k(blocks: U8) -> F32:
    """Sixteen 6-bit scales; two bits per element in ``qs``, the third, inverted, in ``hmask``."""
    n = len(blocks)
    hmask, qs, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low = _nibbles(packed[:, :8])
    shifts = np.array([0, 2, 4, 6], np.uint8)
    high = (packed[:, None, 8:] >> shifts[:, None] & 3).reshape(n, 16)
    scales = _scale(blocks, 108) * ((low | high << 4).astype(np.float32) - 32)
    two = (qs.reshape(n, 2, 1, 32) >> shifts[:, None] & 3).reshape(n, 256)
    third = (hmask[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(n, 256)
    values: F32 = two.astype(np.float32) - ((third ^ 1) << 2)
    products: F32 = scales[:, :, None] * values.reshape(n, 16, 16)
    return products.reshape(n, 256)


def scales_and_minima(packed: U8) -> tuple[U8, U8]:
    """Unpack the eight 6-bit scales and minima of Q4_K and Q5_K, ``[n, 12]`` to ``[n, 8]`` each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = [first & 63, third & 15 | first >> 6 << 4]
    minima = [second & 63, third >> 4 | second >> 6 << 4]
    return _joined(scales), _joined(minima)


def _joined(parts: Sequence[npt.NDArray[np.integer[Any]]]) -> U8:
    return np.concatenate(parts, axis=1, dtype=np.uint8, casting="same_kind")


def _with_minima(blocks: U8, values: U8) -> F32:
    """Scale the integers ``[n, 8, 32]`` of Q4_K or Q5_K and subtract their minima."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    d: F32 = _scale(blocks, 0) * scales
    m: F32 = _scale(blocks, 2) * minima
    return (d[:, :, None] * values - m[:, :, None]).reshape(-1, 256)


def _q4_k(blocks: U8) -> F32:
    return _with_minima(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: U8) -> F32:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return _with_minima(blocks, low | high << np.uint8(4))


def _q6_k(blocks: U8) -> F32:
    """Low four bits in ``ql``, high two in ``qh``, one signed scale per 16 elements."""
    n = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(n, 2, 64)).reshape(n, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)
    high = blocks[:, 128:192].reshape(n, 2, 1, 32) >> shifts[:, None] & 3
    values = (low | high << 4).astype(np.float32) - 32
    scales = _scale(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    products: F32 = scales[:, :, None] * values.reshape(n, 16, 16)
    return products.reshape(n, 256)


BLOCKS: dict[str, tuple[int, int, Callable[[U8], F32]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "IQ4_NL": (32, 18, _iq4_nl),
    "Q3_K": (256, 110, _q3_k),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
}
"""Elements and bytes of a block, and the conversion, by the type's name."""
