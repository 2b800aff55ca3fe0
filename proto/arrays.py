"""Arrays inside messages: one msgpack ext whose payload names dtype, shape and place.

Payload, little-endian::

    u8 dtype code | u8 ndim | u16 frame | u32 dims[ndim] | zeros up to a multiple of 8 | data

``frame`` 0: the data follow here. ``frame`` k: they are the k-th frame behind the message,
whole and alone. Data are in C order; bfloat16 travels as uint16 bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .errors import DecodeFailed, LimitExceeded
from .limits import MAX_ARRAY_BYTES, MAX_ARRAY_NDIM

EXT_ARRAY = 1
"""The msgpack ext code of an array."""

Array = npt.NDArray[np.generic]

Frame = bytes | bytearray | memoryview
"""One received or to be sent piece of a ZeroMQ message."""

DTYPES: dict[int, np.dtype[np.generic]] = {
    code: np.dtype(name)
    for code, name in enumerate(
        ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"),
        start=1,
    )
}
"""Allowed element types by code; nothing else is ever decoded."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_HEAD = struct.Struct("<BBH")
_HEAD_1D = struct.Struct("<BBHI")
_DIMS = [struct.Struct(f"<{ndim}I") for ndim in range(MAX_ARRAY_NDIM + 1)]


def plain(array: Array) -> Array:
    """The array in C order and little-endian; TypeError for an element type not allowed."""
    if array.dtype in _CODES and array.flags.c_contiguous:
        return array
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _CODES:
        raise TypeError(f"arrays of {array.dtype} cannot be sent")
    return np.ascontiguousarray(array, dtype=dtype).reshape(array.shape)


def array_header(array: Array, frame: int) -> bytes:
    """Payload of the ext up to the data; ``array`` as made by :func:`plain`."""
    code = _CODES[array.dtype]
    if array.ndim == 1:
        return _HEAD_1D.pack(code, 1, frame, len(array))
    if array.ndim > MAX_ARRAY_NDIM:
        raise TypeError(f"arrays of {array.ndim} dimensions cannot be sent")
    head = _HEAD.pack(code, array.ndim, frame) + _DIMS[array.ndim].pack(*array.shape)
    return head + bytes(-len(head) % 8)


def read_array(payload: bytes, frames: Sequence[Frame]) -> tuple[Array, int]:
    """Read-only array of an ext payload, without copying, and its frame number.

    ``frames``: all frames of the envelope, the message's own at 0. Everything is checked
    before the array is made.
    """
    if len(payload) < 8:
        raise DecodeFailed(f"an array header of {len(payload)} bytes is too short")
    code, ndim, frame, count = _HEAD_1D.unpack_from(payload)
    shape: tuple[int, ...]
    source: Frame
    dtype = DTYPES.get(code)
    if dtype is None:
        raise DecodeFailed(f"array dtype code {code} is unknown")
    start, shape = 8, (count,)
    if ndim != 1:
        start, shape = _read_shape(payload, ndim)
        count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if nbytes > MAX_ARRAY_BYTES:
        raise LimitExceeded(f"an array of {nbytes} bytes, at most {MAX_ARRAY_BYTES} are allowed")
    if frame >= len(frames):
        raise DecodeFailed(f"array frame {frame} is missing")
    if frame:
        source, start = frames[frame], 0
        found = memoryview(source).nbytes
    else:
        source = payload
        found = len(payload) - start
    if found != nbytes:
        raise DecodeFailed(f"an array of shape {shape} has {found} bytes instead of {nbytes}")
    array: Array = np.ndarray(shape, dtype, source, start)
    array.setflags(write=False)
    return array, frame


def _read_shape(payload: bytes, ndim: int) -> tuple[int, tuple[int, ...]]:
    """Where the data begin, and the dimensions."""
    if ndim > MAX_ARRAY_NDIM:
        raise LimitExceeded(f"an array of {ndim} dimensions, at most {MAX_ARRAY_NDIM} are allowed")
    dims = _DIMS[ndim]
    start = 4 + dims.size
    start += -start % 8
    if len(payload) < start:
        raise DecodeFailed("an array header is cut short")
    return start, dims.unpack_from(payload, 4)
