"""One-buffer codec: any declared type as one msgpack message, arrays as maps.

An array is ``{"__np__": true, "data": bytes in C order, "shape": [...], "dtype": text}``.
For files, tests and peers that know this form; between Baton's processes :mod:`.codec` is
used, whose limits are stricter and whose arrays are not copied.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

from .arrays import Frame
from .errors import ConfigError, DecodeFailed, LimitExceeded
from .limits import MAX_ARRAY_BYTES, MAX_ARRAY_NDIM

T = TypeVar("T")

_ALLOWED = frozenset(
    np.dtype(kind + size).str
    for kind in "<>"
    for size in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
)


def _encode_object(value: object) -> object:
    if isinstance(value, np.ndarray):
        if value.dtype.str not in _ALLOWED:
            raise TypeError(f"arrays of {value.dtype} cannot be encoded")
        data = np.ascontiguousarray(value)
        return {
            "__np__": True,
            "data": data.data.cast("B") if data.size else b"",
            "shape": value.shape,
            "dtype": value.dtype.str,
        }
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _decode_array(value: object, *, copy: bool) -> npt.NDArray[np.generic]:
    if not isinstance(value, dict) or value.get("__np__") is not True:
        raise DecodeFailed("an array must be a map with __np__")
    data, shape, dtype = value.get("data"), value.get("shape"), value.get("dtype")
    if not isinstance(data, bytes) or not isinstance(shape, list) or dtype not in _ALLOWED:
        raise DecodeFailed(f"an array map is malformed (dtype {dtype!r:.40})")
    if len(shape) > MAX_ARRAY_NDIM:
        raise LimitExceeded(f"an array of {len(shape)} dimensions")
    if not all(type(n) is int and n >= 0 for n in shape):
        raise DecodeFailed("an array's shape must be whole numbers")
    element = np.dtype(dtype)
    if math.prod(shape) * element.itemsize != len(data):
        raise DecodeFailed(f"an array of shape {shape} has {len(data)} bytes")
    array: npt.NDArray[np.generic] = np.ndarray(tuple(shape), element, data)
    return array.copy() if copy else array


class NumpyEncoder:
    """Callable that encodes one object; see :func:`msgpack_numpy_encoder`."""

    def __init__(self, use_shared_memory: bool, shared_memory_threshold: int) -> None:
        if use_shared_memory:
            raise ConfigError("arrays in shared memory are not available in this codec")
        self._use_shared_memory = use_shared_memory
        self._shared_memory_threshold = shared_memory_threshold
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_object)

    def __call__(self, obj: object) -> bytes:
        """Encode ``obj``; TypeError names the type that cannot be encoded."""
        return self._encoder.encode(obj)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self._use_shared_memory, self._shared_memory_threshold)


class NumpyDecoder(Generic[T]):
    """Callable that decodes one message into a type; see :func:`msgpack_numpy_decoder`."""

    def __init__(self, type_: type[T], copy: bool) -> None:
        self._type = type_
        self._copy = copy
        self._decoder = msgspec.msgpack.Decoder(type_, dec_hook=self._decode_object)

    def __call__(self, message: Frame) -> T:
        """Decode; DecodeFailed or LimitExceeded for anything but a valid message."""
        try:
            if memoryview(message).nbytes > MAX_ARRAY_BYTES:
                raise LimitExceeded(f"a message of more than {MAX_ARRAY_BYTES} bytes")
            return self._decoder.decode(message)
        except (DecodeFailed, LimitExceeded):
            raise
        except (RecursionError, MemoryError):
            raise LimitExceeded("a message is nested too deep or too large") from None
        except Exception as error:
            raise DecodeFailed(f"not a valid message: {str(error)[:200]}") from None

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self._type, self._copy)

    def _decode_object(self, type_: type, value: object) -> object:
        if (get_origin(type_) or type_) is np.ndarray:
            return _decode_array(value, copy=self._copy)
        raise DecodeFailed(f"{type_} cannot be decoded")


def msgpack_numpy_encoder(
    use_shared_memory: bool = False, shared_memory_threshold: int = 24_000_000
) -> NumpyEncoder:
    """Encoder of any msgspec-encodable object with arrays inside; ``encoder(obj) -> bytes``."""
    return NumpyEncoder(use_shared_memory, shared_memory_threshold)


def msgpack_numpy_decoder(type_: type[T], copy: bool = True) -> NumpyDecoder[T]:
    """Decoder for ``type_``; arrays are decoded where the type declares them.

    ``copy=False`` gives read-only arrays that keep the decoded message alive.
    """
    return NumpyDecoder(type_, copy)
