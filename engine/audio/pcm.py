"""Samples as 16-bit PCM, and the header of a WAV file."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

UNKNOWN_BYTES = 0xFFFFFFFF - 36
"""Length of a WAV file's samples that is not known when its header is written."""


def pcm16(samples: npt.NDArray[np.floating[Any]]) -> bytes:
    """Return samples in -1..1 as little-endian 16-bit integers; others are clipped."""
    scaled: npt.NDArray[np.int16] = np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2")
    return scaled.tobytes()


def wav_header(sample_rate: int, data_bytes: int = UNKNOWN_BYTES) -> bytes:
    """Return the header of a WAV file with one channel of 16-bit samples."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    riff = struct.pack("<4sI4s", b"RIFF", 36 + data_bytes, b"WAVE")
    return riff + form + struct.pack("<4sI", b"data", data_bytes)
