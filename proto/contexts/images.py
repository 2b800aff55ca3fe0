"""One image of a prompt: its placeholder tokens, its pixels, and its key for the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from .equality import same_fields

IMAGE_KEY_BYTES = 16
_HASH_BYTES = 8


@dataclass(slots=True, kw_only=True, eq=False)
class ImageMetadata:
    """An image and its placeholder tokens ``[start_idx, end_idx)``.

    ``pixel_values``: uint8 ``[height, width, 3]``, resized for the model (other models may take
    float32, or uint16 with the bits of bfloat16, in their shape); empty after the handoff, which
    needs no pixels. ``image_hash``: 64-bit identity of the image for the prefix cache
    (:func:`image_hash`); None: computed from the pixels when needed. Raises ValueError for an empty
    range or a negative start.
    """

    start_idx: int
    end_idx: int
    pixel_values: npt.NDArray[Any]
    image_hash: int | None = None

    def __post_init__(self) -> None:
        if self.start_idx < 0:
            raise ValueError(f"image start {self.start_idx} must not be negative")
        if self.end_idx <= self.start_idx:
            raise ValueError(f"image end {self.end_idx} must be after its start {self.start_idx}")

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other) if isinstance(other, ImageMetadata) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return (
            f"ImageMetadata(start_idx={self.start_idx}, end_idx={self.end_idx}, "
            f"pixel_values=<{self.pixel_values.dtype} {self.pixel_values.shape}>)"
        )

    def key(self) -> bytes:
        """Return the image's 16-byte key for block hashes; see :func:`image_key`."""
        return image_key(self.pixel_values, self.image_hash)


def image_hash(pixels: npt.NDArray[np.uint8]) -> int:
    """Return the 64-bit identity of an image: a keyless hash of its pixels and their shape.

    ``pixels``: uint8 ``[height, width, 3]``. A worker computes it again, because a client's value
    may be wrong.
    """
    digest = blake2b(digest_size=_HASH_BYTES, person=b"baton-pixels")
    digest.update(np.array(pixels.shape, "<i8").tobytes())
    digest.update(np.ascontiguousarray(pixels).data.cast("B") if pixels.size else b"")
    return int.from_bytes(digest.digest(), "little")


def image_key(pixels: npt.NDArray[Any], image_hash: int | None = None) -> bytes:
    """Return the 16-byte key of an image, from its hash if it has one, else from its pixels.

    Element type and shape count too: equal bytes in another shape are another image. The hash
    comes from the client and can be wrong. So the key must only be used together with a tenant's
    salt, as in :func:`..hashing.block_hashes`.
    """
    digest = blake2b(digest_size=IMAGE_KEY_BYTES, person=b"baton-image")
    if image_hash is not None:
        digest.update(b"h" + str(image_hash).encode())
    else:
        data = np.ascontiguousarray(pixels)
        digest.update(f"p{data.dtype.str}{data.shape}".encode())
        digest.update(data.data.cast("B") if data.size else b"")
    return digest.digest()
