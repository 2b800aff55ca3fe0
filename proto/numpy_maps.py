"""One-buffer codec: any declared type as one msgpack message, arrays as maps.

An array is ``{"__np__": true, "data": bytes in C order, "shape": [...], "dtype": text}``, or
with its bytes in shared memory (:mod:`.shared_memory`) ``{"__shm__": true, "name", "shape",
"dtype"}``. A context is the map of its fields with its class under ``type``, so a subclass
arrives as itself where its base is declared; a map without ``type`` is of the declared class, and
the earlier form of a context (:mod:`.earlier_maps`) is read too.
Of a buffer only the valid part is written; room behind it, as others write it, is read.

For files, tests and peers that know this form; between Baton's processes :mod:`.codec` is
used, whose limits are stricter and whose arrays are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from operator import is_not
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from .arrays import Frame
from .contexts import TextContext
from .earlier_maps import EARLIER_FORMS
from .errors import DecodeFailed, LimitExceeded
from .limits import MAX_ARRAY_BYTES, MAX_ARRAY_NDIM
from .log_prob_maps import LogProbMaps, build_log_probs
from .outputs import LogProbabilities
from .pixels import PixelContext
from .shadows import ArrayMap, Shadows
from .shared_memory import open_segment, process_store
from .speech import TTSContext
from .vision import TextAndVisionContext

T = TypeVar("T")

_CONTEXTS = (TextContext, TextAndVisionContext, TTSContext, PixelContext)
"""The registry: only these are ever built for a ``type`` that a message names."""

_KNOWN: dict[type, tuple[Any, Callable[[Any], Any]]] = {
    LogProbabilities: (LogProbMaps, build_log_probs)
}

_NONE_KNOWN: Mapping[type, tuple[Any, Callable[[Any], Any]]] = {}

_LEAVES = {int, float, bool, str, bytes, type(None), np.ndarray}
_SETTERS = (object.__setattr__, msgspec.structs.force_setattr)
"""Set a field, also a frozen one, of a dataclass and of a struct."""

_DTYPES = {
    name: dtype
    for kind in "<>"
    for size in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
    for dtype in (np.dtype(kind + size),)
    for name in (dtype.str, str(dtype))
}
"""Allowed element types under both names that are written for them: ``<i4`` and ``int32``."""


def _encode_object(value: object, threshold: float) -> object:
    if isinstance(value, np.ndarray):
        return _encode_array(value, threshold)
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "consume_token"):  # grammar state: replaying the tokens rebuilds it
        return None
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _encode_array(array: npt.NDArray[Any], threshold: float) -> dict[str, object]:
    if array.dtype.str not in _DTYPES:
        raise TypeError(f"arrays of {array.dtype} cannot be encoded")
    data = np.ascontiguousarray(array)
    store = process_store() if data.nbytes >= threshold else None
    name = store.put(data) if store is not None else None
    if name is not None:
        return {"__shm__": True, "name": name, "shape": array.shape, "dtype": array.dtype.str}
    return {
        "__np__": True,
        "data": data.data.cast("B") if data.size else b"",
        "shape": array.shape,
        "dtype": array.dtype.str,
    }


def _decode_array(value: ArrayMap, *, copy: bool) -> npt.NDArray[Any]:
    if value.np is value.shm:
        raise DecodeFailed("an array must be a map with either __np__ or __shm__")
    shape, data = value.shape, value.data
    element = _DTYPES.get(value.dtype)
    if shape is None or element is None:
        raise DecodeFailed(f"an array map is malformed (dtype {value.dtype!r})")
    if len(shape) > MAX_ARRAY_NDIM:
        raise LimitExceeded(f"an array of {len(shape)} dimensions")
    nbytes = math.prod(shape) * element.itemsize
    if nbytes > MAX_ARRAY_BYTES:
        raise LimitExceeded(f"an array of {nbytes} bytes, at most {MAX_ARRAY_BYTES} are allowed")
    if value.shm and nbytes:
        return open_segment(value.name, tuple(shape), element, nbytes, copy=copy)
    if data is None or nbytes != data.nbytes:
        raise DecodeFailed(f"an array of shape {shape} has other bytes than {nbytes}")
    array: npt.NDArray[Any] = np.ndarray(tuple(shape), element, data)
    if copy:
        return array.copy()
    array.flags.writeable = False
    return array


def _trimmed(value: Any) -> Any:
    """The value, every speech context in it without the room behind its speech tokens.

    msgspec writes the fields of a dataclass without asking, so it is given another one.
    """
    kind = type(value)
    if kind is TTSContext:
        return value.trimmed()
    if kind in _LEAVES or isinstance(value, (TextContext, PixelContext)):
        return value
    if kind in (list, tuple):
        if _LEAVES.issuperset(map(type, value)):
            return value
        parts = [_trimmed(item) for item in value]
        return kind(parts) if any(map(is_not, parts, value)) else value
    if kind is dict:
        if _LEAVES.issuperset(map(type, value.values())):
            return value
        pairs = {key: _trimmed(item) for key, item in value.items()}
        return pairs if any(map(is_not, pairs.values(), value.values())) else value
    names: Iterable[str]
    names = getattr(kind, "__struct_fields__", ()) or getattr(kind, "__dataclass_fields__", ())
    items = {name: getattr(value, name, None) for name in names}
    changed = {name: new for name, item in items.items() if (new := _trimmed(item)) is not item}
    if changed:
        value = copy(value)
        for name, new in changed.items():
            _SETTERS[isinstance(value, msgspec.Struct)](value, name, new)
    return value


class NumpyEncoder:
    """Callable that encodes one object; see :func:`msgpack_numpy_encoder`."""

    def __init__(self, use_shared_memory: bool, shared_memory_threshold: int) -> None:
        self._use_shared_memory = use_shared_memory
        self._shared_memory_threshold = shared_memory_threshold
        threshold = shared_memory_threshold if use_shared_memory else math.inf
        self._encoder = msgspec.msgpack.Encoder(
            enc_hook=partial(_encode_object, threshold=threshold)
        )

    def __call__(self, obj: object) -> bytes:
        """Encode ``obj``; TypeError names the type that cannot be encoded."""
        return self._encoder.encode(_trimmed(obj))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self._use_shared_memory, self._shared_memory_threshold)


class NumpyDecoder(Generic[T]):
    """Callable that decodes one message into a type; see :func:`msgpack_numpy_decoder`."""

    def __init__(self, type_: type[T], copy: bool) -> None:
        self._type = type_
        self._copy = copy
        self._decode = self._decoder_of(_family)
        self._others: dict[str, Callable[[Frame], Any]] = {}  # made when first needed

    def __call__(self, message: Frame) -> T:
        """Decode; DecodeFailed or LimitExceeded for anything but a valid message."""
        try:
            if memoryview(message).nbytes > MAX_ARRAY_BYTES:
                raise LimitExceeded(f"a message of more than {MAX_ARRAY_BYTES} bytes")
            result: T = self._decode_either(message)
            return result
        except (DecodeFailed, LimitExceeded):
            raise
        except (RecursionError, MemoryError):
            raise LimitExceeded("a message is nested too deep or too large") from None
        except Exception as error:
            raise DecodeFailed(f"not a valid message: {str(error)[:200]}") from None

    def _decode_either(self, message: Frame) -> Any:
        """Contexts by ``type``, as declared where others write none, or in the earlier form."""
        try:
            return self._decode(message)
        except msgspec.ValidationError as error:
            reason = str(error)
            if "missing required field `type`" in reason:
                return self._other("untagged", lambda: self._decoder_of(_no_family))(message)
            if "request_id`" not in reason and "tokens`" not in reason:
                raise
            try:
                return self._other("earlier", self._earlier_decoder)(message)
            except msgspec.ValidationError:
                raise error from None

    def _other(
        self, form: str, make: Callable[[], Callable[[Frame], Any]]
    ) -> Callable[[Frame], Any]:
        if form not in self._others:
            self._others[form] = make()
        return self._others[form]

    def _earlier_decoder(self) -> Callable[[Frame], Any]:
        """Reads contexts in the form of :mod:`.earlier_maps`."""
        shadows = Shadows(partial(_decode_array, copy=self._copy), _no_family, _KNOWN)
        known = {kind: shadows.becoming(form) for kind, form in EARLIER_FORMS.items()}
        return self._decoder_of(_family, known)

    def _decoder_of(
        self,
        family: Callable[[type], Sequence[type]],
        known: Mapping[type, tuple[Any, Callable[[Any], Any]]] = _NONE_KNOWN,
    ) -> Callable[[Frame], Any]:
        array = partial(_decode_array, copy=self._copy)
        shadow, build = Shadows(array, family, {**_KNOWN, **known}).of(self._type)
        decode = msgspec.msgpack.Decoder(shadow).decode
        return decode if build is None else lambda message: build(decode(message))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self._type, self._copy)


def _family(kind: type) -> tuple[type, ...]:
    return tuple(other for other in _CONTEXTS if issubclass(other, kind))


def _no_family(_: type) -> tuple[type, ...]:
    return ()


def msgpack_numpy_encoder(
    use_shared_memory: bool = False, shared_memory_threshold: int = 24_000_000
) -> NumpyEncoder:
    """Encoder of any msgspec-encodable object with arrays inside; ``encoder(obj) -> bytes``.

    ``use_shared_memory``: arrays of ``shared_memory_threshold`` bytes and more go to shared
    memory if there is room, to be decoded on this host within the lease.
    """
    return NumpyEncoder(use_shared_memory, shared_memory_threshold)


def msgpack_numpy_decoder(type_: type[T], copy: bool = True) -> NumpyDecoder[T]:
    """Decoder for ``type_``; arrays are decoded where the type declares them.

    Where it says ``Any``, an array stays the map it is on the wire. ``copy=False`` gives
    read-only arrays that keep the decoded message, or its shared memory, alive.
    """
    return NumpyDecoder(type_, copy)
