"""The layout of a payload of KV blocks: elements, then the scales they were divided by."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

VECTOR = 8
"""Elements that kernels move at once; a head is a multiple of this."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The encoding of elements in a payload.

    ``dtype``: of the elements (bf16 and fp16 are uint16 bits, fp8 e4m3 uint8 bits). ``largest``:
    code of a tile's largest element; 0 without scales. ``per_token``: one scale per
    token of a head, instead of one scale per head of a block.
    """

    name: str
    dtype: np.dtype[Any]
    largest: float = 0.0
    per_token: bool = False


def _encodings() -> dict[str, Encoding]:
    two, fp8, int8 = np.dtype(np.uint16), np.dtype(np.uint8), np.dtype(np.int8)
    return {
        encoding.name: encoding
        for encoding in (
            Encoding("bf16", two),
            Encoding("fp16", two),
            Encoding("fp8_head", fp8, 448.0),
            Encoding("fp8_token", fp8, 448.0, per_token=True),
            Encoding("int8_head", int8, 127.0),
            Encoding("int8_token", int8, 127.0, per_token=True),
        )
    }


ENCODINGS = _encodings()


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """Shape of a payload: ``[layers, blocks, 2, heads, block_size, head_dim]`` in an encoding.

    Heads and block size are the receiver's; they may differ from the pool's. A *tile* is
    one (layer, block, K/V, head). After all elements follow the scales as float32
    ``[tiles, scale_slots]``: one per tile or one per token, padded with zero to an even number.
    Raises ValueError for sizes below 1, a head that is not whole vectors, or an unknown encoding.
    """

    layers: int
    blocks: int
    heads: int
    block_size: int
    head_dim: int
    encoding: str = "bf16"

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise ValueError(f"a payload of shape {self.shape} is empty")
        if self.head_dim % VECTOR:
            raise ValueError(f"head_dim {self.head_dim} is not a multiple of {VECTOR}")
        if self.encoding not in ENCODINGS:
            raise ValueError(f"encoding {self.encoding!r} is not one of {', '.join(ENCODINGS)}")

    @property
    def how(self) -> Encoding:
        """The encoding."""
        return ENCODINGS[self.encoding]

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """Shape of the elements."""
        return (self.layers, self.blocks, 2, self.heads, self.block_size, self.head_dim)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.layers * self.blocks * 2 * self.heads

    @property
    def scales(self) -> int:
        """Number of scales per tile."""
        if not self.how.largest:
            return 0
        return self.block_size if self.how.per_token else 1

    @property
    def scale_slots(self) -> int:
        """Slots for scales per tile: an even number, so that a 64-bit word belongs to one tile."""
        return self.scales + self.scales % 2

    @property
    def element_bytes(self) -> int:
        """Bytes of all elements: the offset of the scales."""
        return prod(self.shape) * self.how.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Total bytes, a multiple of 8."""
        return self.element_bytes + self.tiles * self.scale_slots * 4

    def elements(self, payload: U8) -> npt.NDArray[Any]:
        """Return a view of the elements of ``payload[nbytes]``, in this shape."""
        return payload[: self.element_bytes].view(self.how.dtype).reshape(self.shape)

    def scale_table(self, payload: U8) -> F32:
        """Return a view of the scales of ``payload[nbytes]``: ``[tiles, scale_slots]``."""
        table = payload[self.element_bytes :].view(np.float32)
        return table.reshape(self.tiles, self.scale_slots)
