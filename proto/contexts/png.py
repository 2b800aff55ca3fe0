"""Encode 8-bit pixels as PNG, using only zlib."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

_COLOURS = {1: 0, 3: 2, 4: 6}  # channels: grey, RGB, RGB and alpha


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode uint8 ``[height, width]`` or ``[height, width, 1, 3 or 4]``; else ValueError."""
    if pixels.ndim not in (2, 3):
        raise ValueError(
            f"Expected 2D or 3D array [height, width(, channels)], not shape {pixels.shape}"
        )
    height, width = pixels.shape[:2]
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if channels not in _COLOURS:
        raise ValueError(f"Unsupported number of channels: {channels}, an image has 1, 3 or 4")
    if pixels.dtype != np.uint8:
        raise ValueError(f"pixels must be uint8, not {pixels.dtype}")
    if not height or not width:
        raise ValueError(f"an image of shape {pixels.shape} has no pixels")
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with filter 0: none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6))
        + _chunk(b"IEND", b"")
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
