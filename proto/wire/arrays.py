"""Arrays in messages: maps with shape, element type and the bytes or their location.

``{"__np__": true, "data": bytes in C order, "shape": [...], "dtype": text}``. Instead of ``data``,
``"frame": k`` means that the bytes are the whole k-th frame after the message, and
``{"__shm__": true, "name": ...}`` means shared memory of this host (:mod:`..codec.shared_memory`).
bfloat16 is sent as its bits in uint16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta
from msgspec.structs import astuple

from ..errors import DecodeFailed, LimitExceeded
from ..limits import INLINE_ARRAY_BYTES, MAX_ARRAY_BYTES, MAX_ARRAY_FRAMES, MAX_ARRAY_NDIM

Array = npt.NDArray[Any]

Frame = bytes | bytearray | memoryview
"""One frame of a ZeroMQ message, received or to send."""

OpenShared = Callable[[str, tuple[int, ...], "np.dtype[Any]"], Array]
"""Opens shared memory: name, shape, element type."""

_NAMES = ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
DTYPES: dict[str, np.dtype[Any]] = {
    name: dtype
    for kind in "<>"
    for size in _NAMES
    for dtype in (np.dtype(kind + size),)
    for name in (dtype.str, str(dtype))
}
"""Allowed element types by both of their names, such as ``<i4`` and ``int32``."""

_WRITTEN = {dtype: dtype.str for dtype in DTYPES.values()}


class ArrayMap(msgspec.Struct, kw_only=True, rename={"np": "__np__", "shm": "__shm__"}, gc=False):
    """An array as a map; see the module."""

    # In the order of encoding, which msgspec expects.
    np: bool = False
    shm: bool = False
    name: Annotated[str, Meta(max_length=256)] = ""
    data: memoryview | None = None
    frame: Annotated[int, Meta(ge=0, le=MAX_ARRAY_FRAMES)] = 0
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=64)]
    dtype: Annotated[str, Meta(max_length=32)]


def array_map(array: Array, frames: list[Frame] | None = None) -> dict[str, object]:
    """Return the map of an array; raises TypeError for an element type that is not allowed.

    ``frames``: the message and its frames so far. A large array is appended as a view of its
    memory, up to the maximum of frames. Without ``frames``, all bytes are in the map.
    """
    dtype = _WRITTEN.get(array.dtype)
    if dtype is None or array.ndim > MAX_ARRAY_NDIM:
        raise _not_encoded(array)
    nbytes = array.nbytes
    if frames is None or nbytes < INLINE_ARRAY_BYTES or len(frames) > MAX_ARRAY_FRAMES:
        # For so few bytes, a copy is faster than a view.
        data = array.tobytes() if nbytes < INLINE_ARRAY_BYTES else array_bytes(array)
        return {"__np__": True, "data": data, "shape": array.shape, "dtype": dtype}
    frames.append(array_bytes(array))
    return {"__np__": True, "frame": len(frames) - 1, "shape": array.shape, "dtype": dtype}


def frame_map(array: Array, number: int) -> dict[str, object]:
    """Return the map of an array whose bytes are frame ``number``; errors as :func:`array_map`."""
    dtype = _WRITTEN.get(array.dtype)
    if dtype is None or array.ndim > MAX_ARRAY_NDIM:
        raise _not_encoded(array)
    return {"__np__": True, "frame": number, "shape": array.shape, "dtype": dtype}


def array_bytes(array: Array) -> Frame:
    """Return the bytes of an array in C order; a view if the array is contiguous."""
    try:
        return array.data.cast("B")
    except TypeError:  # not contiguous, or empty
        return np.ascontiguousarray(array).data.cast("B") if array.nbytes else b""


def _not_encoded(array: Array) -> TypeError:
    if array.ndim > MAX_ARRAY_NDIM:
        return TypeError(f"arrays of {array.ndim} dimensions cannot be encoded")
    return TypeError(f"arrays of {array.dtype} cannot be encoded")


class ArrayReader:
    """Makes the arrays of one message, and records which of its frames they used.

    ``frames``: received frames; the message is at ``base``, frame k of a map at ``base + k``.
    ``copy``: copy the arrays; otherwise they are read-only views of the message, the frame or the
    shared memory. ``shared``: opens shared memory; None refuses it. ``aligned``: False returns
    views also if the bytes of a large array are not aligned.
    """

    __slots__ = ("_aligned", "_base", "_copy", "_frames", "_seen", "_shared")

    def __init__(
        self,
        frames: Sequence[Frame] = (),
        base: int = 0,
        *,
        copy: bool = False,
        shared: OpenShared | None = None,
        aligned: bool = True,
    ) -> None:
        self._aligned = aligned
        self._frames, self._base, self._copy, self._shared = frames, base, copy, shared
        self._seen = 0  # a bit for each frame

    def read(self, value: ArrayMap) -> Array:
        """Return the array of a map; raises DecodeFailed or LimitExceeded before allocation."""
        if value.shm:
            return self._open(value)
        number = value.frame
        if number:
            self._seen |= 1 << number
        return read_array(value, self._frames, self._base, self._copy, aligned=self._aligned)

    def _open(self, value: ArrayMap) -> Array:
        dtype, shape = DTYPES.get(value.dtype), value.shape
        if dtype is None or value.np:
            raise _malformed(value)
        nbytes = dtype.itemsize * _items(shape)
        if nbytes > MAX_ARRAY_BYTES:
            raise _too_large(nbytes)
        if not nbytes:
            return np.zeros(shape, dtype)
        if self._shared is None:
            raise DecodeFailed("shared memory is not read here")
        return self._shared(value.name, tuple(shape), dtype)

    def used(self) -> int:
        """Return the number of used frames; raises DecodeFailed if a frame was skipped."""
        seen = self._seen
        if seen & (seen + 2):
            raise DecodeFailed("an array frame is not referred to")
        return seen.bit_length() - 1 if seen else 0


def read_array(
    value: ArrayMap,
    frames: Sequence[Frame],
    base: int,
    copy: bool = False,
    *,
    aligned: bool = True,
) -> Array:
    """Return the array of a map without shared memory; see :class:`ArrayReader`.

    Without ``copy`` the array is read-only, and a view of the message or the frame. If the bytes
    are not aligned, it is a copy, unless ``aligned`` is False.
    """
    inside, shm, _, data, number, shape, name = astuple(value)
    dtype = DTYPES.get(name)
    if dtype is None or not inside or shm:
        raise _malformed(value)
    nbytes = dtype.itemsize * (shape[0] if len(shape) == 1 else _items(shape))
    if nbytes > MAX_ARRAY_BYTES:
        raise _too_large(nbytes)
    if number:
        if base + number >= len(frames):
            raise DecodeFailed(f"array frame {number} is missing")
        data = frames[base + number]
    if data is None or (data.nbytes if type(data) is memoryview else len(data)) != nbytes:
        raise DecodeFailed(f"an array of shape {shape} does not have {nbytes} bytes")
    if not copy and nbytes < INLINE_ARRAY_BYTES:
        data = bytes(data)  # aligned, so the array is not copied
    if nbytes and len(shape) == 1:
        array: Array = np.frombuffer(data, dtype)  # faster
    else:
        array = np.ndarray(shape, dtype, data)
    if copy:
        return array.copy()
    if type(data) is not bytes:  # an array of bytes is aligned and read-only
        flags = array.flags
        if aligned and not flags.aligned:
            array = array.copy()
            flags = array.flags
        if flags.writeable:
            flags.writeable = False
    return array


def _items(shape: list[int]) -> int:
    if len(shape) > MAX_ARRAY_NDIM:
        raise LimitExceeded(f"an array of {len(shape)} dimensions, at most {MAX_ARRAY_NDIM}")
    return math.prod(shape)


def _malformed(value: ArrayMap) -> DecodeFailed:
    return DecodeFailed(f"an array map is malformed (dtype {value.dtype!r})")


def _too_large(nbytes: int) -> LimitExceeded:
    return LimitExceeded(f"an array of {nbytes} bytes, at most {MAX_ARRAY_BYTES} allowed")
